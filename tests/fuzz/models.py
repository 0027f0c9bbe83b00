"""The whole files that are spoiled: tiny models as GGUF and as a folder, complete enough to answer."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoint.files import TYPE_IDS, Tensor, Typed, entry, gguf_bytes, safetensors_bytes, string, typed
from tests.fuzz.mutate import NUMBERS, json_text, spoil_bytes, spoil_json, spoil_template, spoil_tokenizer, strange
from tests.tokenizer.conftest import CHATML, byte_level, gguf_metadata, spm_like

HIDDEN, FFN, HEADS, KV_HEADS, SIZE, LAYERS = 256, 64, 4, 2, 64, 2
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16")


def shapes(vocab: int) -> dict[str, tuple[int, ...]]:
    """A Llama's tensors, by GGUF name without the layers' prefix."""
    layer = {
        "attn_q": (HEADS * SIZE, HIDDEN), "attn_k": (KV_HEADS * SIZE, HIDDEN), "attn_v": (KV_HEADS * SIZE, HIDDEN),
        "attn_output": (HIDDEN, HEADS * SIZE), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
        "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
    }  # fmt: skip
    outer = {"token_embd": (vocab, HIDDEN), "output_norm": (HIDDEN,)}
    return outer | {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}


def gguf_model() -> tuple[dict[str, Any], list[Tensor]]:
    """Metadata and tensors of a Llama with byte-level BPE; every format occurs."""
    backend = byte_level("smollm")
    tokenizer = gguf_metadata(backend, "smollm")
    keys = {
        "block_count": LAYERS, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": SIZE,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4, "rope.dimension_count": SIZE,
    }  # fmt: skip
    metadata = {"general.architecture": "llama", "general.name": "tiny", "general.sampling.temp": 0.5}
    metadata |= {f"llama.{key}": value for key, value in keys.items()} | tokenizer
    metadata["tokenizer.ggml.token_type"] = Typed(5, tokenizer["tokenizer.ggml.token_type"], array=True)
    tensors = []
    for number, (name, shape) in enumerate(shapes(len(tokenizer["tokenizer.ggml.tokens"])).items()):
        wide = FORMATS[number % len(FORMATS)]
        format = "F32" if len(shape) == 1 else wide if shape[-1] % 256 == 0 or "K" not in wide else "Q8_0"
        tensors.append(Tensor(f"{name}.weight", shape, TYPE_IDS[format], packed(format, shape)))
    return metadata, tensors


def packed(format: str, shape: tuple[int, ...]) -> bytes:
    """Random weights of about 1/16, by the gguf package where it can pack, else zeros."""
    import gguf

    rng = np.random.default_rng(len(shape) + shape[0])
    values = rng.standard_normal(shape).astype(np.float32) / 16 + (1 if len(shape) == 1 else 0)
    kind = gguf.GGMLQuantizationType[format]
    try:
        return gguf.quantize(values, kind).tobytes()
    except NotImplementedError:  # the package only unpacks this one
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        return bytes(values.size // elements * size)


def spm_metadata() -> dict[str, Any]:
    """A SentencePiece vocabulary's keys with the types that files give them."""
    metadata = spm_like()[1]
    metadata["tokenizer.ggml.token_type"] = Typed(5, metadata["tokenizer.ggml.token_type"], array=True)
    return metadata


def write_folder(folder: Path) -> dict[str, Any]:
    """A Llama folder; returns what its JSON files hold, by name."""
    backend = byte_level("smollm")
    vocab = backend.get_vocab_size()
    hf = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    header: dict[str, Any] = {}
    data = b""
    for name, shape in shapes(vocab).items():
        layer, _, brick = name.rpartition(".")
        full = f"model.layers.{layer.removeprefix('blk.')}.{hf[brick]}" if layer else hf[brick]
        raw = packed("BF16", shape)
        header[f"{full}.weight"] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FFN, "vocab_size": vocab,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": SIZE,
            "max_position_embeddings": 64, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "eos_token_id": 2, "hidden_act": "silu",
            "sliding_window": None, "rope_theta": 1e4,
        },
        "generation_config.json": {"temperature": 0.7, "top_p": 0.9, "eos_token_id": [2], "do_sample": True, "top_k": 40},
        "tokenizer.json": json.loads(backend.to_str()),
        "tokenizer_config.json": {
            "bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": CHATML,
            "added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True}},
        },
    }  # fmt: skip
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, data))
    return files | {"header": header, "data": data}


# --- one spoiled model per number ---------------------------------------------------------------------------------------

Spoil = Callable[[Path, random.Random], Path]


def gguf_cases(folder: Path) -> dict[str, Spoil]:
    """Kinds of spoiled GGUF files: each writes one into the folder and returns what to open."""
    metadata, tensors = gguf_model()
    path, good = folder / "model.gguf", gguf_bytes(metadata, tensors)
    head = len(good) - sum(-(-len(tensor.data) // 32) * 32 for tensor in tensors)
    spm = metadata | spm_metadata()

    def write(data: bytes) -> Path:
        path.write_bytes(data)
        return path

    return {
        "gguf bytes": lambda _, rng: write(spoil_bytes(good[:head], rng) + good[head:]),
        "gguf truncated": lambda _, rng: write(good[: rng.randrange(head if rng.random() < 0.8 else len(good))]),
        "gguf metadata": lambda _, rng: write(gguf_bytes(spoil_metadata(metadata, rng), tensors)),
        "gguf sentencepiece": lambda _, rng: write(gguf_bytes(spoil_metadata(spm, rng), tensors)),
        "gguf tensors": lambda _, rng: write(gguf_bytes(metadata, spoil_tensors(tensors, rng))),
        "gguf template": lambda _, rng: write(
            gguf_bytes(metadata | {"tokenizer.chat_template": spoil_template(CHATML, rng)}, tensors)
        ),
    }


def boundaries() -> list[int]:
    """Where fields begin and end in the head of the GGUF file: its keys, its values' types and counts, its tensors."""
    metadata, tensors = gguf_model()
    ends = [0, 4, 8, 16, 24]
    for key, value in metadata.items():
        begin = ends[-1]
        ends += [begin + 8, begin + len(string(key)), begin + len(string(key)) + 4, begin + len(entry(key, value))]
    for tensor in tensors:
        begin, name = ends[-1], len(string(tensor.name))
        ends += [begin + 8, begin + name, begin + name + 4]
        ends += [begin + name + 4 + 8 * len(tensor.shape) + more for more in (0, 4, 12)]
    return ends


def spoil_metadata(metadata: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    out = dict(metadata)
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(list(out))
        value = typed(out[key])
        kind = rng.randrange(5)
        if kind == 0:
            del out[key]
        elif kind == 1:
            out[rng.choice([*metadata, "", "x" * 2000, key + "."])] = out.pop(key)
        elif kind == 2 and value.array and value.value:
            items = list(value.value)
            items[rng.randrange(len(items))] = fitting(value.kind, rng)
            out[key] = Typed(value.kind, items, array=True)
        elif kind == 3 and value.array:
            count = rng.choice([0, 1, len(value.value) - 1, len(value.value) + 1])
            out[key] = Typed(value.kind, (list(value.value) * 2)[: max(count, 0)], array=True)
        else:
            kind_id = rng.choice([value.kind, value.kind, 0, 4, 5, 6, 7, 8, 10, 11, 12])
            array = rng.random() < 0.2
            out[key] = Typed(kind_id, [fitting(kind_id, rng)] * 3 if array else fitting(kind_id, rng), array=array)
    return out


def fitting(kind: int, rng: random.Random) -> Any:
    """A strange value that a field of this type can hold."""
    if kind == 8:
        value = strange(rng, "text")
        return value if isinstance(value, str) else str(value)[:3000]
    if kind in (6, 12):
        return rng.choice([0.0, -1.0, 1e-38, 1e38, float("nan"), float("inf")])
    if kind == 7:
        return rng.random() < 0.5
    bits = {0: 8, 1: 8, 2: 16, 3: 16, 4: 32, 5: 32, 10: 64, 11: 64}[kind]
    value = rng.choice(NUMBERS) % 2**bits
    return value - 2**bits if kind in (1, 3, 5, 11) and value >= 2 ** (bits - 1) else value


def spoil_tensors(tensors: list[Tensor], rng: random.Random) -> list[Tensor]:
    out = list(tensors)
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(out))
        tensor, kind = out[at], rng.randrange(7)
        if kind == 0:
            out[at] = tensor._replace(shape=tensor.shape[::-1])
        elif kind == 1:
            shape = list(tensor.shape)
            shape[rng.randrange(len(shape))] = rng.choice([*NUMBERS, tensor.shape[0] - 1, tensor.shape[0] + 1]) % 2**64
            out[at] = tensor._replace(shape=tuple(shape))
        elif kind == 2:
            out[at] = tensor._replace(type_id=rng.choice([*range(42), 2**31, 2**32 - 1]))
        elif kind == 3:
            out[at] = tensor._replace(name=rng.choice(["", "x", "blk.9.attn_q.weight", rng.choice(tensors).name, "n" * 900]))
        elif kind == 4:
            out[at] = tensor._replace(data=tensor.data[: rng.randrange(len(tensor.data) + 1)])
        elif kind == 5:
            out[at] = tensor._replace(data=rng.randbytes(len(tensor.data)))
        elif len(out) > 1:
            del out[at]
    return out


def folder_cases(folder: Path) -> dict[str, Spoil]:
    """Kinds of spoiled folders: one file at a time; the others are written anew whenever they were touched."""
    good = write_folder(folder)
    header, data = good.pop("header"), good.pop("data")
    whole = (folder / "model.safetensors").read_bytes()
    touched: set[str] = set()

    def put(name: str, content: bytes) -> Path:
        for other in touched - {name}:
            (folder / other).write_bytes(whole if other == "model.safetensors" else json.dumps(good[other]).encode())
        touched.clear()
        touched.add(name)
        (folder / name).write_bytes(content)
        return folder

    def spoiled(name: str) -> Spoil:
        spoil = spoil_tokenizer if name == "tokenizer.json" else spoil_json
        return lambda _, rng: put(name, json_text(spoil(good[name], rng), rng))

    def templated(_: Path, rng: random.Random) -> Path:
        value = good["tokenizer_config.json"] | {"chat_template": spoil_template(CHATML, rng)}
        return put("tokenizer_config.json", json.dumps(value).encode())

    weights = "model.safetensors"
    return {
        "safetensors bytes": lambda _, rng: put(weights, spoil_bytes(whole[: -len(data)], rng) + data),
        "safetensors truncated": lambda _, rng: put(weights, whole[: rng.randrange(len(whole) - len(data) + 50)]),
        "safetensors header": lambda _, rng: put(weights, safetensors_bytes(json_text(spoil_json(header, rng), rng), data)),
        **{name: spoiled(name) for name in good},
        "folder template": templated,
    }
