"""Mistral (Jiang et al., 2023): Llama whose layers all see a sliding window, where the config has one.

The window is the config's and is applied by attention and cache, so nothing is left to say here. In GGUF files these models
call themselves `llama`.
"""

from kvant.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Llama's network; what differs is which keys a query sees."""
