"""Gemma 3 text models (Gemma Team, 2025). What differs from Gemma 2:

norms       one per head on queries and keys, too
positions   five of six layers see a sliding window and turn with a base of 10,000; the sixth sees everything, base 1e6
caps        none

Windows and bases are the config's and are applied by the bricks.
"""

from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.layers.attention import Attention, NormedAttention
from kvant.layers.rotary import Rotary
from kvant.models.gemma2 import Gemma2ForCausalLM


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    def attention(self, config: ModelConfig, mesh: Mesh, layer: int, rotary: Rotary | None) -> Attention:
        return NormedAttention(config, mesh, layer, rotary, norm_offset=1.0)
