"""Gemma 3 text models (Gemma Team, 2025). What differs from Llama:

embedding   scaled by sqrt(hidden_size)
norms       weight stored as w - 1; before *and* after attention and feed-forward; one per head on queries and keys
positions   five of six layers see a sliding window and turn with a base of 10,000; the sixth sees everything, base 1e6
scores      scaled by query_pre_attn_scalar ** -0.5
gate        GELU (tanh)
"""

from typing import Any

from kvant.batch import Batch
from kvant.config.model import ModelConfig, RopeScaling
from kvant.distributed.mesh import Mesh
from kvant.layers.attention import Attention
from kvant.layers.brick import Brick
from kvant.layers.decoder import CausalLM, Decoder
from kvant.layers.embedding import Embedding
from kvant.layers.mlp import GatedMLP
from kvant.layers.norm import RMSNorm
from kvant.layers.rotary import Rotary


class Gemma3Attention(Attention):
    """Queries and keys are normalised per head before they turn."""

    def __init__(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary):
        super().__init__(config, mesh, layer, rotary)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, offset=1.0)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, offset=1.0)

    def rotate(self, q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
        return self.rotary(self.q_norm(q), self.k_norm(k), positions)


class Gemma3Layer(Brick):
    """Sandwich norms: what attention and feed-forward add to the stream is normalised once more."""

    def __init__(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, offset=1.0)
        self.self_attn = Gemma3Attention(config, mesh, layer, rotary)
        self.post_attention_layernorm = RMSNorm(size, eps, offset=1.0)
        self.pre_feedforward_layernorm = RMSNorm(size, eps, offset=1.0)
        self.mlp = GatedMLP(config, mesh)
        self.post_feedforward_layernorm = RMSNorm(size, eps, offset=1.0)

    def forward(self, x: Any, batch: Batch, cache: Any) -> Any:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), batch, cache))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3ForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, mesh: Mesh):
        everywhere = Rotary(config.head_dim, config.rope_theta, config.rope_scaling)
        nearby = Rotary(config.head_dim, config.rope_local_base_freq or 10_000.0, RopeScaling())
        layers = [
            Gemma3Layer(config, mesh, layer, nearby if config.window(layer) else everywhere)
            for layer in range(config.num_hidden_layers)
        ]
        embed = Embedding(config.vocab_size, config.hidden_size, mesh, scale=config.hidden_size**0.5)
        norm = RMSNorm(config.hidden_size, config.rms_norm_eps, offset=1.0)
        super().__init__(config, mesh, Decoder(embed, layers, norm))
