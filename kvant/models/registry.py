"""Which class runs which architecture. A family is added by writing its file and one line here."""

from importlib import import_module
from typing import Any

from kvant.errors import UnsupportedError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}


def family(architecture: str) -> Any:
    """The network class of `architecture`; `UnsupportedError` names what there is."""
    if architecture not in FAMILIES:
        raise UnsupportedError(
            f"architecture {architecture[:60]!r} is not built here; supported: {', '.join(sorted(FAMILIES))} "
            "(see docs/models.md)"
        )
    return getattr(import_module(f"kvant.models.{FAMILIES[architecture]}"), architecture)
