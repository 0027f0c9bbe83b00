"""Llama (Touvron et al., 2023) and what is shaped like it, SmolLM2 too: pre-norm, rotary, grouped queries, SwiGLU.

Families that differ from it in one place derive from it and override that place.
"""

from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.layers.attention import Attention
from kvant.layers.brick import Brick
from kvant.layers.decoder import CausalLM, Decoder, DecoderLayer
from kvant.layers.embedding import Embedding
from kvant.layers.mlp import GatedMLP
from kvant.layers.norm import RMSNorm
from kvant.layers.rotary import Rotary, rotaries


class LlamaForCausalLM(CausalLM):
    """Nothing differs from the shared bricks: this file is what a family costs at the least."""

    def __init__(self, config: ModelConfig, mesh: Mesh):
        layers = [
            DecoderLayer(config, self.attention(config, mesh, layer, rotary), self.mlp(config, mesh))
            for layer, rotary in enumerate(rotaries(config))
        ]
        embed = Embedding(config.vocab_size, config.hidden_size, mesh)
        super().__init__(config, mesh, Decoder(embed, layers, RMSNorm(config.hidden_size, config.rms_norm_eps)))

    def attention(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary | None) -> Attention:
        return Attention(config, mesh, layer, rotary)

    def mlp(self, config: ModelConfig, mesh: Mesh) -> Brick:
        return GatedMLP(config, mesh)
