"""The decoder: embedding, a stack of layers over one residual stream, a last norm; and the network around it with its head.

    x = embed(ids)                                    fp32: what is only ever added to is not rounded
    for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    hidden = norm(x)                       logits = head(hidden[rows])

The logits are a call of their own: only rows that somebody wants pay for the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

from kvant.batch import Batch, Hidden
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.kernels.deferred import now
from kvant.layers.brick import Brick
from kvant.layers.embedding import Embedding, Head
from kvant.layers.norm import RMSNorm


class DecoderLayer(Brick):
    """Pre-norm block: the residual stream is only ever added to. The attention and the mlp are the family's."""

    def __init__(self, config: ModelConfig, attention: Brick, mlp: Brick):
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x: Any, batch: Batch, cache: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x), batch, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class SandwichLayer(Brick):
    """Gemma 2's and 3's block: what attention and mlp add to the stream is normalised once more. Norms hold w - 1."""

    def __init__(self, config: ModelConfig, attention: Brick, mlp: Brick):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, offset=1.0)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(size, eps, offset=1.0)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, offset=1.0)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(size, eps, offset=1.0)

    def forward(self, x: Any, batch: Batch, cache: Any) -> Any:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), batch, cache))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Decoder(Brick):
    """[T] ids -> Hidden. `taps` names layers whose outputs are kept."""

    def __init__(self, embed_tokens: Embedding, layers: Sequence[Brick], norm: RMSNorm):
        self.embed_tokens = embed_tokens
        self.layers = list(layers)
        self.norm = norm
        self.taps: frozenset[int] = frozenset()

    def forward(self, batch: Batch, cache: Any) -> Hidden:
        x = self.embed_tokens(batch.input_ids)  # [T, D]
        taps = {}
        for number, layer in enumerate(self.layers):
            x = layer(x, batch, cache)
            if number in self.taps:
                taps[number] = now(x)
        return Hidden(final=now(self.norm(x)), taps=taps)


class CausalLM(Brick):
    """A decoder and its head: `model(batch, cache)` gives hidden states, `model.logits(rows)` fp32 logits [R, V]."""

    def __init__(self, config: ModelConfig, mesh: Mesh, decoder: Decoder):
        self.config = config
        self.mesh = mesh
        self.model = decoder
        tied = decoder.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = Head(config.vocab_size, config.hidden_size, mesh, tied, config.final_logit_softcapping)

    def forward(self, batch: Batch, cache: Any) -> Hidden:
        return self.model(batch, cache)

    def logits(self, rows: Any) -> Any:
        return self.lm_head(rows)
