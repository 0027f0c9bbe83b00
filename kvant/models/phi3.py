"""Phi-3, Phi-3.5 and Phi-4 (Microsoft, 2024). What differs from Llama:

weights     q, k and v are one matrix in the file, gate and up another
positions   longrope: a divisor per frequency, one list for contexts up to the trained one, one for longer ones; cosines and
            sines times a factor. In Phi-4-mini three quarters of each head turn
window      sliding in every layer, where the config has one
"""

from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.layers.attention import Attention
from kvant.layers.linear import StackedLinear
from kvant.layers.mlp import GatedMLP
from kvant.layers.rotary import Rotary
from kvant.models.llama import LlamaForCausalLM


class Phi3Attention(Attention):
    def __init__(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary | None):
        super().__init__(config, mesh, layer, rotary)
        self.qkv_proj = StackedLinear(config.hidden_size, self.qkv_proj.outs, False, mesh)


class Phi3MLP(GatedMLP):
    def __init__(self, config: ModelConfig, mesh: Mesh):
        super().__init__(config, mesh)
        self.gate_up_proj = StackedLinear(config.hidden_size, self.gate_up_proj.outs, False, mesh)


class Phi3ForCausalLM(LlamaForCausalLM):
    def attention(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary | None) -> Attention:
        return Phi3Attention(config, mesh, layer, rotary)

    def mlp(self, config: ModelConfig, mesh: Mesh) -> GatedMLP:
        return Phi3MLP(config, mesh)
