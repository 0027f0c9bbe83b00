"""EngineConfig: every option of the engine, each declared once. "auto" and None are decided in `config/resolve.py`."""

from dataclasses import dataclass

from kvant.config.option import option
from kvant.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs a model. Frozen: resolving returns a new one, nothing changes after start-up."""

    model: str = option(DEFAULT_MODEL, "alias, .gguf file, Hugging Face directory, or dummy:CONFIG.json")
    dtype: str = option("auto", "arithmetic of the network", choices=DTYPES)
    device: str = option("auto", "where the network runs", choices=DEVICES)
    max_model_len: int | None = option(None, "longest context; None: the model's own, as far as memory goes", unit="tokens")
    max_num_seqs: int = option(64, "the most sequences computed in one step")
    max_num_batched_tokens: int | None = option(None, "the most tokens computed in one step", unit="tokens")
    block_size: int = option(16, "tokens per KV block", unit="tokens")
    kv_cache_memory_bytes: int | None = option(None, "size of the KV cache; None: a share of free memory", unit="bytes")
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory that the engine may use")
    enable_prefix_caching: bool = option(True, "reuse the keys and values of prompts with a common beginning")
    seed: int | None = option(None, "makes requests without a seed of their own reproducible")
    threads: int | None = option(None, "CPU threads; None: the cores this process may use")

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        _at_least("threads", self.threads, 1)
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ConfigError(f"block_size must be 8, 16, 32, 64 or 128, not {self.block_size!r}", param="block_size")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {self.gpu_memory_utilization!r}",
                param="gpu_memory_utilization",
            )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}", param=name)


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise ConfigError(f"{name} must be a whole number of at least {low}, not {value!r}", param=name)
