"""Qwen 3 (Qwen Team, 2025): Llama with a norm per head on queries and keys, and no biases."""

from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.layers.attention import Attention, NormedAttention
from kvant.layers.rotary import Rotary
from kvant.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    def attention(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary | None) -> Attention:
        return NormedAttention(config, mesh, layer, rotary)
