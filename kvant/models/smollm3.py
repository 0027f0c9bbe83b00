"""SmolLM3 (Hugging Face, 2025): Llama in which every fourth layer has no positions (NoPE; Yang et al., 2025).

Which layers those are is the config's (`no_rope_layers`, where 0 means none); they get no rotary, and their attention leaves
queries and keys as they are.
"""

from kvant.models.llama import LlamaForCausalLM


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """Llama's network; what differs is which layers turn."""
