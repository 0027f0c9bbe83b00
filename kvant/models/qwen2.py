"""Qwen 2 and 2.5 (Qwen Team, 2024): Llama with biases on queries, keys and values, and none on the way out.

Some sizes declare a sliding window for their upper layers and switch it off (`use_sliding_window`); the config decides.
"""

from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.layers.attention import Attention
from kvant.layers.rotary import Rotary
from kvant.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    def attention(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary | None) -> Attention:
        return Attention(config, mesh, layer, rotary, qkv_bias=True)
