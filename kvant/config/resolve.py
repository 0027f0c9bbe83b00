"""resolve(): every "auto" and None of an EngineConfig is decided here, once, and says why. Pure functions, no torch.

    EngineConfig + ModelConfig + Hardware + bytes of the weights  ──▶  Resolved: a config without open questions,
                                                                       the size of every block pool, reasons, notices

A *reason* is one line per decision that was left open. A *notice* is one line the user should see without asking: the
engine does something other than he may expect. What cannot be honoured raises, with the numbers and the remedy.
What takes memory stands in `config/memory.py`, how KV memory is divided in `config/kv_memory.py`.
"""

from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

from kvant.config.compilers import remedy
from kvant.config.engine import EngineConfig
from kvant.config.hardware import Gpu, Hardware
from kvant.config.kv_memory import KVPlan, divide, longest_context, show_bytes
from kvant.config.memory import ITEMSIZE, Part, fixed_parts, kv_parts
from kvant.config.model import CacheGroup, ModelConfig
from kvant.errors import CapacityError, ConfigError

# A prompt's chunk is computed while others wait for their next token. On two cores 512 tokens take about a quarter of a
# second and are where a CPU's prefill speed levels off; a data-centre GPU needs thousands to be busy.
TOKENS_PER_STEP = {"cpu": 512, "cuda": 8192}

NATIVE_BLOCK = 16  # the native cache keeps keys transposed in units of 16 positions

CPU_KV_SHARE = 0.4  # of what is left after the weights: activations, the page cache and other programs need the rest
CPU_KV_MOST = 4 << 30


T = TypeVar("T")


class Choice(NamedTuple, Generic[T]):
    """One decision. `reason` is empty where the user decided; `notice` where there is nothing to say."""

    value: T
    reason: str = ""
    notice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """An EngineConfig in which every field has a value, and what follows from it for memory."""

    config: EngineConfig
    executor: str  # "native": the CPU's own executor, if it can be built here; "torch": everywhere
    kv: KVPlan  # the block pools
    memory: tuple[Part, ...]  # everything that takes memory, the KV blocks among it
    reasons: tuple[str, ...]
    notices: tuple[str, ...]

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The layer groups of the model, with the block size of the config."""
        return self.kv.groups

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks per group, the null block included."""
        return self.kv.num_blocks

    @property
    def kv_bytes(self) -> int:
        """What those blocks take together."""
        return self.kv.num_bytes


def resolve(config: EngineConfig, model: ModelConfig, hardware: Hardware, weight_bytes: int) -> Resolved:
    """Decides what `config` leaves open. `weight_bytes`: what the weights will take in memory, not yet allocated.

    Raises `ConfigError` for a device, dtype or context that cannot be, `CapacityError` where memory does not suffice.
    """
    device = choose_device(config, hardware)
    executor = choose_executor(config, hardware, device.value)
    dtype = choose_dtype(config, hardware, device.value, model.torch_dtype, executor.value)
    threads = choose_threads(config, hardware)
    tokens = _tokens_per_step(config, device.value)
    config = replace(
        config,
        device=device.value,
        dtype=dtype.value,
        threads=threads.value,
        max_num_batched_tokens=tokens.value,
    )
    fixed = fixed_parts(config, model, executor.value, weight_bytes)
    context, plan, memory = _decide_memory(config, model, hardware, fixed)
    choices: tuple[Choice[str] | Choice[int], ...] = (device, executor, dtype, threads, tokens, context, memory)
    return Resolved(
        config=replace(config, max_model_len=context.value, kv_cache_memory_bytes=memory.value),
        executor=executor.value,
        kv=plan,
        memory=(*fixed, *kv_parts(plan)),
        reasons=tuple(choice.reason for choice in choices if choice.reason),
        notices=tuple(choice.notice for choice in choices if choice.notice),
    )


# --- device, dtype, threads ---------------------------------------------------------------------------------------------


def choose_device(config: EngineConfig, hardware: Hardware) -> Choice[str]:
    """Where the network runs: "cpu" or "cuda"."""
    if config.device == "cpu":
        return Choice("cpu")
    problem, remedy = "", ""
    if not hardware.gpus:
        problem, remedy = "no NVIDIA GPU was found", "take --device cpu, or check the driver with nvidia-smi"
    elif hardware.torch_cuda is None:
        problem, remedy = "the installed torch is built for CPUs only", "install torch with CUDA, or take --device cpu"
    if config.device == "cuda":
        if problem:
            raise ConfigError(f"device 'cuda' is not possible: {problem}; {remedy}", param="device")
        return Choice("cuda")
    if not problem:
        return Choice("cuda", f"device: cuda, because there is a GPU ({hardware.gpus[0].name})")
    unused = f"a GPU ({hardware.gpus[0].name}) is there but not used: {problem}; {remedy}" if hardware.gpus else ""
    return Choice("cpu", f"device: cpu, because {problem}", unused)


def choose_executor(config: EngineConfig, hardware: Hardware, device: str) -> Choice[str]:
    """ "native" on a CPU whose dtype is left open: it computes on the weights as they are stored, several times faster."""
    if config.deterministic and (device != "cpu" or config.dtype != "auto"):
        raise ConfigError(
            "deterministic is kept by the native executor alone; take --device cpu and leave the dtype open",
            param="deterministic",
        )
    if device != "cpu" or config.dtype != "auto":
        return Choice("torch")
    if hardware.compiler is None:
        notice = f"no C++ compiler was found, so torch computes, several times slower; {remedy()}"
        return Choice("torch", "executor: torch, because there is no C++ compiler for the native one", notice)
    if config.block_size % NATIVE_BLOCK:
        return Choice("torch", f"executor: torch, because the native one needs a block size of {NATIVE_BLOCK} or its multiple")
    return Choice("native", "executor: native, because the dtype is left open and there is a C++ compiler")


def choose_dtype(
    config: EngineConfig, hardware: Hardware, device: str, trained_in: str, executor: str = "torch"
) -> Choice[str]:
    """The arithmetic of the network. `trained_in` is the dtype the weights were published in.

    float16 is chosen only for weights published in it: activations of models trained in bfloat16 exceed its range (65,504).
    """
    fast = _has_fast_bfloat16(hardware, device)
    where = f"this {'CPU' if device == 'cpu' else 'GPU'}"
    if executor == "native":
        return Choice("bfloat16", "dtype: weights as they are stored, activations in int8 or bfloat16, keys in 16 bits")
    if config.dtype == "auto":
        if device == "cuda" and trained_in == "float16":
            return Choice("float16", "dtype: float16, because the weights were published in it")
        if fast:
            return Choice("bfloat16", f"dtype: bfloat16, because {where} computes in it directly")
        return Choice("float32", f"dtype: float32, because {where} does not compute in bfloat16 directly")
    notice = ""
    if config.dtype == "float16" and trained_in != "float16":
        notice = f"dtype float16 may overflow with weights published in {trained_in}; a request that does ends with an error"
    elif config.dtype == "bfloat16" and not fast:
        notice = f"dtype bfloat16 is slow here: {where} does not compute in it directly; float32 is faster"
    return Choice(config.dtype, notice=notice)


def _has_fast_bfloat16(hardware: Hardware, device: str) -> bool:
    if device == "cuda":
        return hardware.gpus[0].compute_capability >= (8, 0)
    return bool(hardware.cpu_flags & {"avx512_bf16", "amx_bf16"})


def choose_threads(config: EngineConfig, hardware: Hardware) -> Choice[int]:
    """How many CPU threads compute."""
    cores, cpus = hardware.num_cores, hardware.num_cpus
    if config.threads is None:
        return Choice(cores, f"threads: {cores}, because this process may use {_count(cores, 'core')}")
    notice = ""
    if config.threads > cpus:
        notice = f"{config.threads} threads on {_count(cpus, 'CPU')} wait for each other; {cores} would be faster"
    return Choice(config.threads, notice=notice)


def _tokens_per_step(config: EngineConfig, device: str) -> Choice[int]:
    if config.max_num_batched_tokens is not None:
        return Choice(config.max_num_batched_tokens)
    # Fewer tokens than sequences would make some of them sit out a step.
    tokens = max(TOKENS_PER_STEP[device], config.max_num_seqs)
    return Choice(tokens, f"max_num_batched_tokens: {tokens}, the default on a {'CPU' if device == 'cpu' else 'GPU'}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# --- memory and context -------------------------------------------------------------------------------------------------


class _Decided(NamedTuple):
    context: Choice[int]
    plan: KVPlan
    memory: Choice[int]


def _decide_memory(config: EngineConfig, model: ModelConfig, hardware: Hardware, fixed: tuple[Part, ...]) -> _Decided:
    """Context length and block pools of a config whose device, dtype and tokens per step are decided."""
    most = model.longest_context
    if config.max_model_len is not None and config.max_model_len > most:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is beyond the {most} positions of the model; ask for {most} or less",
            param="max_model_len",
        )
    groups = tuple(replace(group, block_size=config.block_size) for group in model.cache_groups())
    assert config.max_num_batched_tokens is not None
    plan = KVPlan(groups=groups, itemsize=ITEMSIZE[config.dtype], step_tokens=config.max_num_batched_tokens)
    budget = _kv_budget(config, hardware, fixed)
    wanted = config.max_model_len or most
    fits = longest_context(plan, budget, wanted)
    context = _choose_context(config, most, fits, plan, budget)
    exact = config.kv_cache_memory_bytes is not None
    plan = divide(plan, budget, context.value, config.max_num_seqs, spend_all=exact or config.device == "cuda")
    if exact:
        return _Decided(context, plan, Choice(budget))
    rule = "what the sequences can use at most" if plan.num_bytes < 0.99 * budget else _RULES[config.device]
    return _Decided(context, plan, Choice(plan.num_bytes, f"kv_cache_memory_bytes: {show_bytes(plan.num_bytes)}, {rule}"))


_RULES = {
    "cpu": f"{CPU_KV_SHARE:.0%} of the memory that is free after the weights, at most {CPU_KV_MOST >> 30} GiB",
    "cuda": "gpu_memory_utilization of the GPU's memory, less weights and workspace",
}


def _choose_context(config: EngineConfig, most: int, fits: int, plan: KVPlan, budget: int) -> Choice[int]:
    held = f"{show_bytes(budget)} of KV memory hold {fits}"
    shared = config.device == "cuda" and config.kv_cache_memory_bytes is None
    remedy = "raise gpu_memory_utilization" if shared else "raise kv_cache_memory_bytes"
    if fits < min(config.block_size, config.max_model_len or most):
        raise CapacityError(
            f"there is no room for keys and values: {show_bytes(budget)}, but {config.block_size} tokens take "
            f"{show_bytes(plan.bytes_of(config.block_size))}; {remedy}",
            param="kv_cache_memory_bytes",
        )
    if config.max_model_len is None:
        if fits == most:
            return Choice(most, f"max_model_len: {most}, the model's own")
        notice = f"the context is {fits} tokens instead of the model's {most}: {held}; {remedy} for more"
        return Choice(fits, f"max_model_len: {fits}, because {held}", notice)
    if fits < config.max_model_len:
        raise CapacityError(
            f"a context of {config.max_model_len} tokens takes {show_bytes(plan.bytes_of(config.max_model_len))} of KV memory, "
            f"but {held}; ask for a max_model_len of {fits} or less, or {remedy}",
            param="max_model_len",
        )
    return Choice(config.max_model_len)


def _kv_budget(config: EngineConfig, hardware: Hardware, fixed: tuple[Part, ...]) -> int:
    """Bytes that keys and values may take beside the parts whose size is fixed."""
    gpu = hardware.gpus[0] if config.device == "cuda" else None
    free = gpu.memory_free if gpu else hardware.memory_available
    place = "GPU memory" if gpu else "memory"
    weight_bytes = next(part.num_bytes for part in fixed if part.name == "weights")
    if weight_bytes >= free:
        raise CapacityError(
            f"the weights take {show_bytes(weight_bytes)}, but only {show_bytes(free)} of {place} are free; "
            "close other programs, raise the limit of this container, or take a smaller model"
        )
    # On a CPU what a step needs comes out of the memory that is left alone.
    held = sum(part.num_bytes for part in fixed) if gpu else weight_bytes
    if config.kv_cache_memory_bytes is not None:
        left = max(0, free - held)
        if config.kv_cache_memory_bytes > left:
            step = f" and what a step needs ({show_bytes(held - weight_bytes)})" if gpu else ""
            raise CapacityError(
                f"kv_cache_memory_bytes asks for {show_bytes(config.kv_cache_memory_bytes)}, but {show_bytes(left)} of {place} "
                f"are free beside the weights ({show_bytes(weight_bytes)}){step}; ask for less",
                param="kv_cache_memory_bytes",
            )
        return config.kv_cache_memory_bytes
    if gpu is None:
        return min(int(CPU_KV_SHARE * (free - held)), CPU_KV_MOST)
    return _gpu_budget(config, gpu, weight_bytes, held)


def _gpu_budget(config: EngineConfig, gpu: Gpu, weight_bytes: int, held: int) -> int:
    """gpu_memory_utilization x total, less what other programs and the fixed parts hold."""
    allowed = int(config.gpu_memory_utilization * gpu.memory_total)
    taken = gpu.memory_total - gpu.memory_free
    budget = allowed - taken - held
    if budget <= 0:
        raise CapacityError(
            f"gpu_memory_utilization {config.gpu_memory_utilization:g} allows {show_bytes(allowed)}, which other programs "
            f"({show_bytes(taken)}), weights ({show_bytes(weight_bytes)}) and what a step needs "
            f"({show_bytes(held - weight_bytes)}) use up; raise it, free the GPU, or lower max_num_seqs or "
            "max_num_batched_tokens",
            param="gpu_memory_utilization",
        )
    return budget
