"""A model folder in Hugging Face layout with everything in it: a byte-level tokenizer, a chat template, random weights.

Random weights that are large enough for greedy texts to wander; `folder` alone opens it as a file's model.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from kvant.checkpoint.dummy import DummyTensors
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.models.load import build

MERGES = [("Ġ", "t"), ("t", "h"), ("h", "e"), ("i", "n")]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 272,  # eight more than the tokenizer knows
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "eos_token_id": 261,
}
GEMMA = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "sliding_window": 21,
    "tie_word_embeddings": False,
}


def write_folder(folder: Path, config: dict = LLAMA, spread: float = 2.0, **files: dict) -> Path:
    """A whole model, its matrices `spread` times the usual. `files` are further JSON files, by name without the ending."""
    write_tokenizer(folder)
    for name, content in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    source = DummyTensors("float32", norm_offset=1.0 if "Gemma" in config["architectures"][0] else 0.0)
    weights = {}
    for path, brick in build(ModelConfig.from_dict(config), Mesh()).walk():
        for name, shape in brick.wants().items():
            values = source.find(path + name, shape).raw.view(np.float32).reshape(shape)
            weights[path + name] = values if "norm" in path else np.float32(spread) * values
    save_file(weights, folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in MERGES]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
