"""EngineConfig: every option of the engine, each declared once. "auto" and None are decided in `config/resolve.py`."""

from dataclasses import dataclass

from kvant.config.option import option
from kvant.config.values import INT64, real, shown, truth, whole
from kvant.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
DEFAULT_MODEL = "smollm2-135m"
BLOCK_SIZES = (8, 16, 32, 64, 128)
# Far beyond what is of use; what lies above is a slip, and would end in a crash of the system's instead of a message.
MAX_SEQS = 8192
MAX_STEP_TOKENS = 1 << 20
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs a model. Frozen: resolving returns a new one, nothing changes after start-up."""

    model: str = option(DEFAULT_MODEL, "alias, .gguf file, folder, Hugging Face model org/name, or dummy:CONFIG.json")
    dtype: str = option("auto", "arithmetic of the network", choices=DTYPES)
    device: str = option("auto", "where the network runs", choices=DEVICES)
    max_model_len: int | None = option(None, "longest context; None: the model's own, as far as memory goes", unit="tokens")
    max_num_seqs: int = option(64, "the most sequences computed in one step")
    max_num_batched_tokens: int | None = option(None, "the most tokens computed in one step", unit="tokens")
    block_size: int = option(16, "tokens per KV block", unit="tokens")
    kv_cache_memory_bytes: int | None = option(None, "size of the KV cache; None: a share of free memory", unit="bytes")
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory that the engine may use")
    enable_prefix_caching: bool = option(True, "reuse the keys and values of prompts with a common beginning")
    deterministic: bool = option(False, "a request's tokens never depend on what else is computed; slower prompts")
    seed: int | None = option(None, "makes requests without a seed of their own reproducible")
    threads: int | None = option(None, "CPU threads; None: the cores this process may use")
    trace: str | None = option(None, "write a timeline for ui.perfetto.dev to this file", unit="file")

    def __post_init__(self) -> None:
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("device", self.device, DEVICES)
        for name, low, high in (
            ("max_model_len", 1, 2**31 - 1),
            ("max_num_batched_tokens", 1, MAX_STEP_TOKENS),
            ("kv_cache_memory_bytes", 1, INT64[1]),
            ("seed", *INT64),
            ("threads", 1, MAX_THREADS),
        ):
            if getattr(self, name) is not None:
                self._keep_whole(name, low, high)
        self._keep_whole("max_num_seqs", 1, MAX_SEQS)
        self._keep_whole("block_size", *INT64)
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size must be 8, 16, 32, 64 or 128, not {self.block_size}", param="block_size")
        share = real("gpu_memory_utilization", self.gpu_memory_utilization, *INT64, ConfigError)
        if not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {share:g}", param="gpu_memory_utilization"
            )
        object.__setattr__(self, "gpu_memory_utilization", share)
        truth("enable_prefix_caching", self.enable_prefix_caching, ConfigError)
        if self.trace is not None and not (isinstance(self.trace, str) and self.trace):
            raise ConfigError(f"trace must be the name of a file, not {shown(self.trace)}", param="trace")

    def _keep_whole(self, name: str, low: int, high: int) -> None:
        object.__setattr__(self, name, whole(name, getattr(self, name), low, high, ConfigError))


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {shown(value)}", param=name)
