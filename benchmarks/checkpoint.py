"""A checkpoint of random weights on disk, sharded as large models are, with a tokenizer that knows every id of its vocabulary.

The weights are those of the `dummy:` model of the same config, so that both say the same; a GPU makes them.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from kvant.checkpoint.dummy import DummyTensors
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.models.load import build
from kvant.quantization.random import make

SHARD_BYTES = 4 << 30


def write(config_file: Path, folder: Path, device: str, shard_bytes: int = SHARD_BYTES) -> int:
    """Writes config, tokenizer and bf16 shards into `folder`; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.loads(config_file.read_text())
    config = ModelConfig.from_dict(raw)
    write_tokenizer(folder, config.vocab_size)
    source = DummyTensors(config.torch_dtype)
    shards = list(_shards(config, shard_bytes))
    weight_map, total = {}, 0
    for number, shapes in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += _write_shard(folder / name, shapes, source, device)
        weight_map |= dict.fromkeys(shapes, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(raw))
    return total


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes first, then words that no text holds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"unused{number}" for number in range(len(words), vocab_size)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _shards(config: ModelConfig, shard_bytes: int) -> Iterator[dict[str, tuple[int, ...]]]:
    shard: dict[str, tuple[int, ...]] = {}
    for path, brick in build(config, Mesh()).walk():
        for name, shape in brick.wants().items():
            if shard and 2 * sum(math.prod(s) for s in shard.values()) + 2 * math.prod(shape) > shard_bytes:
                yield shard
                shard = {}
            shard[path + name] = shape
    yield shard


def _write_shard(path: Path, shapes: dict[str, tuple[int, ...]], source: DummyTensors, device: str) -> int:
    """The format of safetensors: the header's length in 8 bytes, the header as JSON, the values end to end."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            values = make(source.find(name, shape), device, torch.bfloat16).cpu()
            file.write(values.view(torch.uint8).numpy().reshape(-1).data)
    return offset
