"""Programs of the two small models, written by hand straight from their GGUF files: what the bricks' lowering must equal.

Used by the scratch measurements in this folder. The public `gguf` reader is slow but independent of Kvant's own.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader

from kvant.config.formats import StoredTensor
from kvant.config.model import CacheGroup
from kvant.native.program import Program

HALF = 2


@dataclass
class File:
    """A GGUF's tensors and metadata."""

    tensors: dict[str, StoredTensor]
    fields: dict[str, object]


def read(path: Path) -> File:
    reader = GGUFReader(str(path))
    tensors = {}
    for t in reader.tensors:
        shape = tuple(int(n) for n in reversed(t.shape))
        raw = np.ascontiguousarray(t.data).view(np.uint8).reshape(shape[0] if len(shape) > 1 else 1, -1)
        tensors[t.name] = StoredTensor(t.name, t.tensor_type.name, shape, raw)
    fields = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer")}
    return File(tensors, fields)


def unpermuted(stored: StoredTensor, heads: int) -> StoredTensor:
    """Llama's GGUF interleaves the two halves of every head's rows; this undoes it."""
    rows = stored.shape[0]
    order = np.arange(rows).reshape(heads, rows // heads // HALF, HALF).swapaxes(1, 2).reshape(-1)
    return StoredTensor(stored.name, stored.format, stored.shape, stored.raw[order])


def vector(stored: StoredTensor) -> np.ndarray:
    return stored.raw.reshape(-1).view(np.float32)


def frequencies(size: int, base: float) -> np.ndarray:
    return (1.0 / base ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))).astype(np.float32)


def llama(file: File, prefix: str = "llama") -> Program:
    f, t = file.fields, file.tensors
    layers, heads, kv_heads = (f[f"{prefix}.{k}"] for k in ("block_count", "attention.head_count", "attention.head_count_kv"))
    hidden = f[f"{prefix}.embedding_length"]
    size = hidden // heads
    eps, base = f[f"{prefix}.attention.layer_norm_rms_epsilon"], f[f"{prefix}.rope.freq_base"]
    program = Program(
        (CacheGroup(name="full", layers=tuple(range(layers)), window=None, num_kv_heads=kv_heads, head_dim=size),)
    )
    inv = frequencies(size, base)
    x = program.embedding(t["token_embd.weight"])
    for n in range(layers):
        w = {
            k: t[f"blk.{n}.{k}.weight"] for k in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        }
        h = program.rms_norm(x, vector(t[f"blk.{n}.attn_norm.weight"]), eps)
        q, k, v = program.linear(h, [unpermuted(w["attn_q"], heads), unpermuted(w["attn_k"], kv_heads), w["attn_v"]]).split(
            (heads * size, kv_heads * size, kv_heads * size), -1
        )
        q, k = program.rotary(q, size, inv), program.rotary(k, size, inv)
        program.store_kv(k, v, n)
        x = x + program.linear(program.attention(q, n, size**-0.5), [w["attn_output"]])
        h = program.rms_norm(x, vector(t[f"blk.{n}.ffn_norm.weight"]), eps)
        x = x + program.linear(program.gated(program.linear(h, [w["ffn_gate"], w["ffn_up"]]), "silu"), [w["ffn_down"]])
    program.output(program.rms_norm(x, vector(t["output_norm.weight"]), eps))
    program.logits([t.get("output.weight", t["token_embd.weight"])])
    return program


def gemma3(file: File) -> Program:
    f, t = file.fields, file.tensors
    layers, heads, kv_heads = (f[f"gemma3.{k}"] for k in ("block_count", "attention.head_count", "attention.head_count_kv"))
    hidden, size, window = f["gemma3.embedding_length"], f["gemma3.attention.key_length"], f["gemma3.attention.sliding_window"]
    eps = f["gemma3.attention.layer_norm_rms_epsilon"]
    full = tuple(n for n in range(layers) if n % 6 == 5)
    local = tuple(n for n in range(layers) if n % 6 != 5)
    groups = (
        CacheGroup(name="sliding", layers=local, window=window, num_kv_heads=kv_heads, head_dim=size),
        CacheGroup(name="full", layers=full, window=None, num_kv_heads=kv_heads, head_dim=size),
    )
    program = Program(groups)
    near, far = frequencies(size, 10_000.0), frequencies(size, f["gemma3.rope.freq_base"])
    x = program.embedding(t["token_embd.weight"], scale=hidden**0.5)
    for n in range(layers):
        w = {
            k: t[f"blk.{n}.{k}.weight"] for k in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        }
        norm = {
            k: vector(t[f"blk.{n}.{k}.weight"])
            for k in ("attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        }
        h = program.rms_norm(x, norm["attn_norm"], eps)
        q, k, v = program.linear(h, [w["attn_q"], w["attn_k"], w["attn_v"]]).split(
            (heads * size, kv_heads * size, kv_heads * size), -1
        )
        inv = far if n in full else near
        q = program.rotary(program.head_norm(q, norm["attn_q_norm"], eps), size, inv)
        k = program.rotary(program.head_norm(k, norm["attn_k_norm"], eps), size, inv)
        program.store_kv(k, v, n)
        a = program.attention(q, n, 256**-0.5, None if n in full else window)
        x = x + program.rms_norm(program.linear(a, [w["attn_output"]]), norm["post_attention_norm"], eps)
        h = program.rms_norm(x, norm["ffn_norm"], eps)
        g = program.gated(program.linear(h, [w["ffn_gate"], w["ffn_up"]]), "gelu_pytorch_tanh")
        x = x + program.rms_norm(program.linear(g, [w["ffn_down"]]), norm["post_ffw_norm"], eps)
    program.output(program.rms_norm(x, vector(t["output_norm.weight"]), eps))
    program.logits([t["token_embd.weight"]])
    return program
