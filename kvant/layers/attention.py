"""Attention as a brick: projections, position, the attention itself, and the way out.

    x [T, D] ─▶ QKV ─▶ q [T, N, H], k, v [T, K, H] ─▶ rotate ─▶ write k, v to the cache, attend ─▶ [T, N * H] ─▶ o_proj

A family overrides `rotate`; the cache decides how attention is computed. N query heads share
K key-value heads (grouped-query attention; Ainslie et al., 2023).
"""

from typing import Any

from kvant.attention.pattern import AttentionRule
from kvant.batch import Batch
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.layers.brick import Brick
from kvant.layers.linear import FusedLinear, Linear
from kvant.layers.norm import RMSNorm
from kvant.layers.rotary import Rotary


class Attention(Brick):
    """The attention of one layer: [T, D] -> [T, D]. Without `rotary` it knows no positions.

    `qkv_bias`: whether q, k and v have biases, where that is the family's and not the config's `attention_bias`.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary | None, qkv_bias: bool | None = None):
        bias = config.attention_bias if qkv_bias is None else qkv_bias
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width = {"q_proj": self.heads, "k_proj": self.kv_heads, "v_proj": self.kv_heads}
        rows = {name: heads * self.head_dim for name, heads in width.items()}
        self.qkv_proj = FusedLinear(config.hidden_size, rows, bias, mesh)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, config.attention_bias, mesh)
        self.rotary = rotary
        scalar = config.query_pre_attn_scalar or config.head_dim
        self.rule = AttentionRule(layer, scalar**-0.5, config.window(layer), config.attn_logit_softcapping)

    def rotate(self, q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
        """Gives queries [T, N, H] and keys [T, K, H] their positions."""
        return (q, k) if self.rotary is None else self.rotary(q, k, positions)

    def forward(self, x: Any, batch: Batch, cache: Any) -> Any:
        heads, kv_heads, size = self.heads, self.kv_heads, self.head_dim
        q, k, v = self.qkv_proj(x).split((heads * size, kv_heads * size, kv_heads * size), -1)
        q = q.reshape(-1, heads, size)  # [T, N, H]
        k = k.reshape(-1, kv_heads, size)  # [T, K, H]
        v = v.reshape(-1, kv_heads, size)
        q, k = self.rotate(q, k, batch.positions)
        attended = cache.attend(q, k, v, self.rule)  # [T, N, H]
        return self.o_proj(attended.reshape(-1, heads * size))


class NormedAttention(Attention):
    """Queries and keys are normalised, head by head, before they turn (Qwen 3, Gemma 3)."""

    def __init__(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary | None, norm_offset: float = 0.0):
        super().__init__(config, mesh, layer, rotary)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, norm_offset)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, norm_offset)

    def rotate(self, q: Any, k: Any, positions: Any) -> tuple[Any, Any]:
        return super().rotate(self.q_norm(q), self.k_norm(k), positions)
