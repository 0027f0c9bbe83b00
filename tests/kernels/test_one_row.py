"""Products with one row, and what is fused with them, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from kvant.kernels import one_row as op
from kvant.kernels.gated import ACTIVATIONS
from tests.kernels.compare import DTYPES, assert_close, rand

EPS = 1e-6
SHAPES = [(5, 33), (19, 5000)]


def norm(x, weight):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "size"), SHAPES)
def test_linear(outs, size, dtype):
    x, weight = rand(1, size, dtype=dtype), rand(outs, size, dtype=dtype)
    assert_close(op.linear_triton(x, weight), x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "size"), SHAPES)
def test_norm_linear(outs, size, dtype):
    x, scale, weight = rand(1, size, scale=3.0), rand(size), rand(outs, size, dtype=dtype)
    for bias in (None, rand(outs, dtype=dtype, scale=9.0)):
        expected = norm(x, scale) @ weight.double().T + (0 if bias is None else bias.double())
        assert_close(op.norm_linear_triton(x, scale, EPS, weight, bias), expected, dtype)
        assert_close(op.norm_linear_reference(x, scale, EPS, weight, bias), expected, dtype, slack=2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "size"), [(5, 33)])
def test_norm_gated_linear(outs, size, dtype, activation):
    x, scale, weight = rand(1, size), rand(size), rand(2 * outs, size, dtype=dtype, scale=0.2)
    gate, up = (norm(x, scale) @ weight.double().T).chunk(2, -1)
    act = {"silu": F.silu, "gelu": F.gelu}.get(activation, lambda x: F.gelu(x, approximate="tanh"))
    out = op.norm_gated_linear_triton(x, scale, EPS, weight, activation)
    assert_close(out, act(gate) * up, dtype)
    assert_close(op.norm_gated_linear_reference(x, scale, EPS, weight, activation), act(gate) * up, dtype, slack=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outs", "size"), SHAPES)
def test_linear_add(outs, size, dtype):
    x, weight, residual = rand(1, size, dtype=dtype), rand(outs, size, dtype=dtype), rand(1, outs)
    expected = residual.double() + x.double() @ weight.double().T
    assert_close(op.linear_add_triton(x, weight, residual), expected, torch.float32)
    assert_close(op.linear_add_reference(x, weight, residual), expected, dtype)
