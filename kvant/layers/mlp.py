"""The gated feed-forward block: down(act(gate(x)) * up(x)). SwiGLU in Llama, GEGLU in Gemma."""

from typing import Any

from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.kernels import deferred
from kvant.layers.brick import Brick
from kvant.layers.linear import FusedLinear, Linear
from kvant.native.program import Buffer


class GatedMLP(Brick):
    """[T, D] -> [T, D] through F hidden units."""

    def __init__(self, config: ModelConfig, mesh: Mesh):
        size = config.intermediate_size
        self.gate_up_proj = FusedLinear(config.hidden_size, {"gate_proj": size, "up_proj": size}, config.mlp_bias, mesh)
        self.gate = Gate(config.hidden_activation)
        self.down_proj = Linear(size, config.hidden_size, config.mlp_bias, mesh)

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.gate(self.gate_up_proj(x)))  # [T, D] -> [T, 2F] -> [T, F] -> [T, D]


class Gate(Brick):
    """act(gate) * up: [T, 2F] -> [T, F]."""

    def __init__(self, activation: str):
        self.activation = activation

    def forward(self, gate_up: Any) -> Any:
        return deferred.gated(gate_up, self.activation)

    def emit(self, gate_up: Buffer) -> Buffer:
        return gate_up.program.gated(gate_up, self.activation)
