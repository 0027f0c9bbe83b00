"""RMSNorm, with and without the residual's addition, against the formula in fp64."""

import pytest
import torch

from kvant.kernels import rms_norm as op
from tests.kernels.compare import DEVICE, DTYPES, assert_close, rand

EPS = 1e-6


def formula(x, weight):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 5), (2, 3, 64), (5, 2, 7)])
def test_rms_norm(shape, dtype):
    x, weight = rand(*shape, scale=3.0), rand(shape[-1])
    for run in (op.rms_norm_triton, op.rms_norm_reference):
        out = run(x, weight, EPS, dtype)
        assert out.dtype == dtype
        assert_close(out, formula(x, weight))


def test_reads_heads_inside_wider_rows():
    """Query heads are a slice of the fused projection's output."""
    wide, weight = rand(3, 100, dtype=torch.float16), rand(16)
    heads = wide[:, 10:74].reshape(3, 4, 16)
    assert not heads.is_contiguous()
    assert_close(op.rms_norm_triton(heads, weight, EPS, torch.float16), formula(heads, weight))


@pytest.mark.parametrize("sandwich", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 33)])
def test_add_rms_norm(shape, dtype, sandwich):
    x, delta, weight = rand(*shape), rand(*shape, dtype=dtype), rand(shape[-1])
    inner = rand(shape[-1]) if sandwich else None
    expected = x.double() + (delta.double() if inner is None else formula(delta, inner))
    for run in (op.add_rms_norm_triton, op.add_rms_norm_reference):
        summed, out = run(x, delta, weight, EPS, dtype, inner)
        assert_close(summed, expected)
        assert_close(out, formula(expected, weight))


def test_no_rows():
    assert op.rms_norm_triton(torch.empty(0, 8, device=DEVICE), rand(8), EPS, torch.float32).shape == (0, 8)
