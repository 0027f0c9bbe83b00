"""Triton where it is installed, and what stands in its place where it is not.

Every kernel file says `from kvant.kernels.language import tl, triton`. Without Triton (a machine without a GPU) the torch
references work as ever; a kernel can be defined, and refuses to be launched.

With `TRITON_INTERPRET=1` Triton runs kernels on the CPU, slowly, for tests. Its interpreter computes bf16 arithmetic and
bf16 products wrongly, without a word, so kernels raise operands to fp32 first when `INTERPRETED` is true.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvant.errors import UnsupportedError


class _Refusal:
    """A kernel that cannot be launched."""

    def __init__(self, name: str):
        self.name = name

    def __getitem__(self, grid: Any) -> Any:
        raise UnsupportedError(f"the kernel {self.name} needs Triton; install kvant[gpu]")


class _Absent:
    """Triton's two names that are needed while a module is read."""

    constexpr = object

    @staticmethod
    def jit(function: Any = None, **options: Any) -> Any:
        return _Absent.jit if function is None else _Refusal(function.__name__)


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _Absent
    PRESENT = INTERPRETED = False
else:
    PRESENT = True
    INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def wait_for_inputs(EARLY: tl.constexpr):
    """Before the first read of what the kernel before this one wrote. A kernel that may begin early (`begins_early`) calls
    this in every program, whatever else it does: the kernel after it may rely on everything before it being finished."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """The next kernel may take its place on the multiprocessors, and read its weights, from here on."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


SIMULATED = False  # a test sets it: kernels run on a CPU too, in the interpreter


def on_gpu(x: Tensor) -> bool:
    """Whether kernels run where `x` lies. A GPU without Triton is refused: its user would get the slow path unasked."""
    if x.is_cuda and not PRESENT:
        raise UnsupportedError("there is a GPU but no Triton, which the kernels are written in; install kvant[gpu]")
    return x.is_cuda or SIMULATED


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`: what the sides of a Triton tile must be."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few where the interpreter plays one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def begins_early(device: torch.device) -> bool:
    """Whether kernels are launched while the one before still runs (programmatic dependent launch, from Hopper on)."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)
