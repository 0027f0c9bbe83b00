"""Chapter 1: a whole engine in 200 lines. It recomputes everything for every token, and it is right.

python docs/guide/code/chapter1.py [MODEL] [PROMPT]
"""

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvant.checkpoint.open import open_checkpoint
from kvant.checkpoint.store import resolve_model
from kvant.config.model import ModelConfig
from kvant.quantization.gguf import dequantize
from kvant.tokenizer.tokenizer import Tokenizer

Array = np.ndarray


# --- the network: ids in, hidden states out. It will not change any more in this guide ---------------


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, positions: Array, base: float) -> Array:
    """Turns every head of x [T, heads, H] by its token's position: pair i by position * base ** (-2i / H)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * base ** (-np.arange(half) / half)  # [T, H/2], in fp64
    cos, sin = (f(angles).astype(np.float32)[:, None, :] for f in (np.cos, np.sin))
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def softmax(scores: Array) -> Array:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(q: Array, k: Array, v: Array, positions: Array) -> Array:
    """Queries q [T, N, H] at `positions` look at keys and values k, v [L, K, H] of the positions 0 ... L-1.

    N query heads share K key-value heads, so each key head serves a group of N/K query heads.
    """
    (T, N, H), (L, K, _) = q.shape, k.shape
    grouped = q.reshape(T, K, N // K, H).transpose(1, 2, 0, 3).reshape(K, -1, H)
    scores = (grouped @ k.transpose(1, 2, 0)).reshape(K, N // K, T, L) * H**-0.5
    visible = np.arange(L) <= positions[:, None]  # [T, L]: nobody looks into the future
    weights = softmax(np.where(visible, scores, np.float32(-np.inf)))
    out = weights.reshape(K, -1, L) @ v.transpose(1, 0, 2)
    return out.reshape(K, N // K, T, H).transpose(2, 0, 1, 3).reshape(T, N * H)


class NoMemory:
    """Where attention finds keys and values. This one knows only those of the tokens being computed."""

    def attend(self, layer: int, q: Array, k: Array, v: Array, positions: Array) -> Array:
        return attention(q, k, v, positions)


class Layer(NamedTuple):
    """Matrices lie as [in, out]: y = x @ matrix. (Files have them as [out, in].)"""

    attention_norm: Array
    qkv: Array  # [D, (N + 2K) * H]
    out: Array  # [N * H, D]
    mlp_norm: Array
    gate_up: Array  # [D, 2F]
    down: Array  # [F, D]


class Model:
    """A Llama (Touvron et al., 2023): pre-norm, rotary positions, grouped queries, a gated MLP. All in fp32."""

    def __init__(self, config: ModelConfig, tensors: Any):
        if config.architecture != "LlamaForCausalLM":
            raise SystemExit(f"this guide's engine runs Llama models, not {config.architecture}")
        D, F, V, H = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
        N, K = config.num_attention_heads, config.num_key_value_heads

        def weight(name: str, *shape: int) -> Array:
            return np.ascontiguousarray(dequantize(tensors.find(name, shape)).T)

        def layer(prefix: str) -> Layer:
            rows = {"q": N * H, "k": K * H, "v": K * H}
            qkv = [weight(f"{prefix}self_attn.{name}_proj.weight", size, D) for name, size in rows.items()]
            gate_up = [weight(f"{prefix}mlp.{name}_proj.weight", F, D) for name in ("gate", "up")]
            return Layer(
                weight(f"{prefix}input_layernorm.weight", D),
                np.concatenate(qkv, axis=1),
                weight(f"{prefix}self_attn.o_proj.weight", D, N * H),
                weight(f"{prefix}post_attention_layernorm.weight", D),
                np.concatenate(gate_up, axis=1),
                weight(f"{prefix}mlp.down_proj.weight", D, F),
            )

        self.config = config
        self.head = weight("model.embed_tokens.weight", V, D)  # [D, V]
        self.embedding = self.head.T
        self.layers = [layer(f"model.layers.{number}.") for number in range(config.num_hidden_layers)]
        self.norm = weight("model.norm.weight", D)
        if not config.tie_word_embeddings:
            self.head = weight("lm_head.weight", V, D)

    def forward(self, ids: list[int], positions: Array, memory: Any) -> Array:
        """Hidden states [T, D] of tokens `ids` at `positions`. `memory` is where attention looks."""
        config = self.config
        N, K, H = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        x = self.embedding[ids]  # [T, D], the residual stream: everything below is added to it
        for number, layer in enumerate(self.layers):
            y = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
            qkv = (y @ layer.qkv).reshape(len(ids), N + 2 * K, H)
            q, k, v = np.split(qkv, (N, N + K), axis=1)
            q, k = (rotate(heads, positions, config.rope_theta) for heads in (q, k))
            x = x + memory.attend(number, q, k, v, positions) @ layer.out
            y = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            gate, up = np.split(y @ layer.gate_up, 2, axis=1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down  # SwiGLU
        return rms_norm(x, self.norm, config.rms_norm_eps)

    def logits(self, hidden: Array) -> Array:
        """[R, D] -> [R, V]. A call of its own: only rows that somebody wants pay for the vocabulary."""
        return hidden @ self.head


def load(name: str) -> tuple[Model, Tokenizer]:
    checkpoint = open_checkpoint(resolve_model(name))
    model = Model(ModelConfig.from_dict(checkpoint.config), checkpoint.tensors)
    return model, Tokenizer.from_source(checkpoint.tokenizer_source)


# --- the engine: requests in, tokens out -------------------------------------------------------------


@dataclass(eq=False)
class Sequence:
    tokens: list[int]  # prompt and answer
    num_prompt: int
    max_tokens: int
    finished: bool = False

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Row(NamedTuple):
    """Tokens [start, stop) of a sequence are computed in this step."""

    sequence: Sequence
    start: int
    stop: int


class Engine:
    def __init__(self, model: Model, ends: frozenset[int] = frozenset()):
        self.model = model
        self.ends = ends
        self.waiting: list[Sequence] = []

    def add(self, prompt: list[int], max_tokens: int) -> Sequence:
        sequence = Sequence(list(prompt), len(prompt), max_tokens)
        self.waiting.append(sequence)
        return sequence

    def has_work(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[tuple[Sequence, int]]:
        """The whole engine: everything in this guide makes one of these four lines better."""
        rows = self.schedule()
        hidden = self.run(rows)
        drawn = self.select(rows, hidden)
        return self.commit(drawn)

    def schedule(self) -> list[Row]:
        """Who computes which tokens: the first in the queue, all of its tokens."""
        sequence = self.waiting[0]
        return [Row(sequence, 0, len(sequence.tokens))]

    def run(self, rows: list[Row]) -> Array:
        """The network: the hidden state of each row's last token, [rows, D]."""
        last = []
        for sequence, start, stop in rows:
            hidden = self.model.forward(sequence.tokens[start:stop], np.arange(start, stop), NoMemory())
            last.append(hidden[-1])
        return np.stack(last)

    def select(self, rows: list[Row], hidden: Array) -> list[tuple[Sequence, int]]:
        """The next token of each row: here the likeliest one (greedy)."""
        tokens = self.model.logits(hidden).argmax(-1)
        return [(row.sequence, int(token)) for row, token in zip(rows, tokens, strict=True)]

    def commit(self, drawn: list[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
        """Appends what was drawn, and lets go of who is finished."""
        for sequence, token in drawn:
            sequence.tokens.append(token)
            sequence.finished = token in self.ends or len(sequence.answer) == sequence.max_tokens
            if sequence.finished:
                self.release(sequence)
        return drawn

    def release(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sequences = [self.add(prompt, max_tokens) for prompt in prompts]
        while self.has_work():
            self.step()
        return [sequence.answer for sequence in sequences]


def main(name: str = "smollm2-135m", prompt: str = "The capital of France is") -> None:
    model, tokenizer = load(name)
    engine = Engine(model, tokenizer.eos_ids)
    (answer,) = engine.generate([tokenizer.encode(prompt)], max_tokens=12)
    print(prompt + tokenizer.decode(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
