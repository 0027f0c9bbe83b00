"""Kvant: an LLM inference engine. The public names are resolved when they are first used, so `import kvant` loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "LLM": "kvant.llm",
    "AsyncLLM": "kvant.llm",
    "SamplingParams": "kvant.config.sampling",
    "EngineConfig": "kvant.config.engine",
    "RequestOutput": "kvant.engine.outputs",
    "CompletionOutput": "kvant.engine.outputs",
    "KvantError": "kvant.errors",
    "ConfigError": "kvant.errors",
    "CapacityError": "kvant.errors",
    "RequestError": "kvant.errors",
    "ContextLengthError": "kvant.errors",
    "TemplateError": "kvant.errors",
    "ModelError": "kvant.errors",
    "ModelNotFoundError": "kvant.errors",
    "DownloadError": "kvant.errors",
    "CheckpointError": "kvant.errors",
    "UnsupportedError": "kvant.errors",
    "GenerationError": "kvant.errors",
}
__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from kvant.config.engine import EngineConfig
    from kvant.config.sampling import SamplingParams
    from kvant.engine.outputs import CompletionOutput, RequestOutput
    from kvant.errors import KvantError
    from kvant.llm import LLM, AsyncLLM


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
