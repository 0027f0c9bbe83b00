"""Llama (Touvron et al., 2023) and what is shaped like it, SmolLM2 too: pre-norm, rotary, grouped queries, SwiGLU."""

from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.layers.attention import Attention
from kvant.layers.decoder import CausalLM, Decoder, DecoderLayer
from kvant.layers.embedding import Embedding
from kvant.layers.mlp import GatedMLP
from kvant.layers.norm import RMSNorm
from kvant.layers.rotary import Rotary


class LlamaForCausalLM(CausalLM):
    """Nothing differs from the shared bricks: this file is what a family costs at the least."""

    def __init__(self, config: ModelConfig, mesh: Mesh):
        rotary = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        layers = [
            DecoderLayer(config, Attention(config, mesh, layer, rotary), GatedMLP(config, mesh))
            for layer in range(config.num_hidden_layers)
        ]
        embed = Embedding(config.vocab_size, config.hidden_size, mesh)
        super().__init__(config, mesh, Decoder(embed, layers, RMSNorm(config.hidden_size, config.rms_norm_eps)))
