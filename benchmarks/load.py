"""From the start of a process to its first token: Kvant against transformers, alternating, on a warm machine.

    safetensors   a Llama of 507 M random weights in bf16, 1.0 GB, made once in <cache>/benchmarks/llama-1gb
    gguf          Gemma 3 270M, Q4_K_M, 253 MB, from the model store

Every measurement is a new Python that imports the engine, opens tokenizer and model as its documentation shows, and answers
PROMPT with one greedy token. The clock runs from before the process is started until the token's line arrives.

Warm means: the files are in the page cache, and memory for the weights has been in use a moment ago. A virtual machine gives
free memory back to its host within seconds; having it brought again costs up to 4 s per GB, whoever needs it first.

    python benchmarks/load.py [--rounds 5] [--only safetensors] [--output benchmarks/load.json]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.machine import Machine
from kvant.checkpoint.gguf import read_gguf
from kvant.checkpoint.store import resolve_model
from kvant.config.environment import read_environment

PROMPT = "The capital of France is"
SHAPE = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=9, num_attention_heads=32, num_key_value_heads=8)
MEMORY = 4 << 30  # bytes; transformers needs about 3
TARGET = 5.0  # times faster to the first token

KVANT = """
import sys
from kvant import LLM, SamplingParams
output = LLM(sys.argv[1]).generate(sys.argv[2], SamplingParams(temperature=0, max_tokens=1))[0].outputs[0]
print(output.token_ids[0], flush=True)
"""
TRANSFORMERS = """
import os, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(len(os.sched_getaffinity(0)))
path = Path(sys.argv[1])
where, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
tokenizer = AutoTokenizer.from_pretrained(where, **file)
model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, **file).eval()
ids = tokenizer(sys.argv[2], return_tensors="pt")
print(model.generate(**ids, max_new_tokens=1, do_sample=False)[0, -1].item(), flush=True)
"""
ENGINES = {"kvant": KVANT, "transformers": TRANSFORMERS}


def first_token(engine: str, model: Path) -> tuple[float, int]:
    """Seconds from nothing to the first token, and the token."""
    command = [sys.executable, "-c", ENGINES[engine], str(model), PROMPT]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        took = time.perf_counter() - start
        _, errors = child.communicate()
    if not line:
        raise RuntimeError(f"{engine} gave no token for {model}:\n{errors[-2000:]}")
    return took, int(line)


def llama_folder() -> Path:
    """A Llama of random weights in Hugging Face's layout, with SmolLM2's vocabulary. Made once."""
    folder = read_environment().cache / "benchmarks" / "llama-1gb"
    if not (folder / "config.json").is_file():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        vocab_size = write_tokenizer(folder)
        write_weights(folder, vocab_size)
        config = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size}
        config |= {"tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 2, "bos_token_id": 1}
        config |= {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu"}
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path) -> int:
    """SmolLM2's vocabulary as a tokenizer.json; returns its size."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    metadata = read_gguf(Path(resolve_model("smollm2-135m"))).metadata
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    backend.add_special_tokens([AddedToken(token, special=True) for token in control])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return len(tokens)


def write_weights(folder: Path, vocab_size: int) -> None:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    width, heads = SHAPE["hidden_size"], SHAPE["num_attention_heads"]
    kv, ffn = width // heads * SHAPE["num_key_value_heads"], SHAPE["intermediate_size"]
    bricks = {"q_proj": (width, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, width)}
    layer = {f"self_attn.{name}": shape for name, shape in bricks.items()}
    layer |= {"mlp.gate_proj": (ffn, width), "mlp.up_proj": (ffn, width), "mlp.down_proj": (width, ffn)}

    def matrix(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16) * shape[-1] ** -0.5

    weights = {"model.embed_tokens.weight": matrix((vocab_size, width)), "model.norm.weight": torch.ones(width)}
    for number in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        weights |= {f"{prefix}{name}.weight": matrix(shape) for name, shape in layer.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        weights |= {f"{prefix}{name}.weight": torch.ones(width, dtype=torch.bfloat16) for name in norms}
    weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def warm(model: Path) -> int:
    """Touches memory, then reads all of the model's files; returns their bytes."""
    np.ones(MEMORY, np.uint8)
    files = [file for file in model.iterdir() if file.is_file()] if model.is_dir() else [model]
    total = 0
    for file in files:
        with open(file, "rb") as stream:
            while piece := stream.read(1 << 24):
                total += len(piece)
    return total


def measure(model: Path, rounds: int) -> dict[str, Any]:
    """Seconds of every engine, and how many times faster Kvant was in each round."""
    size = warm(model)
    first_token("kvant", model)  # builds the native step, if it was never built here
    results: list[dict[str, float]] = []
    tokens: dict[str, set[int]] = {name: set() for name in ENGINES}
    machine = Machine()
    others = []
    for number in range(rounds):
        row = {}
        for name in list(ENGINES) if number % 2 else list(reversed(ENGINES)):
            warm(model)
            row[name], token = first_token(name, model)
            tokens[name].add(token)
        results.append(row)
        others.append(machine.lap())
        print("  ".join(f"{name} {took:.2f} s" for name, took in row.items()), f" others {others[-1]:.1f} cores", flush=True)
    ratios = sorted(row["transformers"] / row["kvant"] for row in results)
    spread = {name: sorted(row[name] for row in results) for name in ENGINES}
    return {
        "bytes": size,
        "seconds": {n: {"median": round(statistics.median(v), 3), "min": round(v[0], 3)} for n, v in spread.items()},
        "ratio": {"median": round(statistics.median(ratios), 2), "min": round(ratios[0], 2), "target": TARGET},
        "first_token": {name: sorted(found) for name, found in tokens.items()},
        "cores_used_by_others": round(statistics.median(others), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("safetensors", "gguf"))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    makers = {"safetensors": llama_folder, "gguf": lambda: Path(resolve_model("gemma3-270m"))}
    chosen = {name: make() for name, make in makers.items() if arguments.only in (None, name)}
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "machine": Machine.describe(),
        "versions": {name: version(name) for name in ("torch", "transformers", "numpy", "tokenizers")},
        "unit": "seconds from process start to the first token; ratio = transformers / Kvant",
        **{name: measure(path, arguments.rounds) for name, path in chosen.items()},
    }
    print(json.dumps(result, indent=1))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
