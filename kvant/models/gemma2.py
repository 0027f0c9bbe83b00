"""Gemma 2 (Gemma Team, 2024). What differs from Llama:

embedding   scaled by sqrt(hidden_size)
norms       weight stored as w - 1; before *and* after attention and feed-forward
positions   every other layer, beginning with the first, sees a sliding window; one base for all
scores      scaled by query_pre_attn_scalar ** -0.5, then soft-capped: c tanh(s / c)
gate        GELU (tanh)
logits      soft-capped

Window, scale, caps and gate are the config's and are applied by the bricks.
"""

from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.layers.attention import Attention
from kvant.layers.decoder import CausalLM, Decoder, SandwichLayer
from kvant.layers.embedding import Embedding
from kvant.layers.mlp import GatedMLP
from kvant.layers.norm import RMSNorm
from kvant.layers.rotary import Rotary, rotaries


class Gemma2ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, mesh: Mesh):
        layers = [
            SandwichLayer(config, self.attention(config, mesh, layer, rotary), GatedMLP(config, mesh))
            for layer, rotary in enumerate(rotaries(config))
        ]
        embed = Embedding(config.vocab_size, config.hidden_size, mesh, scale=config.hidden_size**0.5)
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        super().__init__(config, mesh, Decoder(embed, layers, norm))

    def attention(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary | None) -> Attention:
        return Attention(config, mesh, layer, rotary)
