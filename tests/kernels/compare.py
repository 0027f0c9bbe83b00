"""What the kernel tests share: where they run, fresh random inputs, and how close is close."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative to the norm of the expected tensor. bf16 rounds to 2^-9 of a value; the interpreter's cast may be off by one more.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 6e-3}


def rand(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||, in fp64."""
    out, expected = out.double(), expected.double()
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))


def assert_close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None, slack: float = 1.0) -> None:
    assert out.shape == expected.shape
    assert torch.isfinite(out).all(), "an element was never written, or is not finite"
    found, allowed = error(out, expected), TOLERANCE[dtype or out.dtype] * slack
    assert found <= allowed, f"relative error {found:.2e}, allowed {allowed:.2e}"
