"""Products with few rows against fp64: odd shapes, every way to cut them, and a result that does not depend on the run."""

import pytest
import torch

from kvant.kernels import linear as op
from kvant.kernels import one_row
from kvant.kernels.language import cdiv
from tests.kernels.compare import DTYPES, assert_close, rand


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outs", "size"), [(2, 17, 96), (17, 40, 100)])
def test_few_rows(rows, outs, size, dtype, parts):
    x, weight = rand(rows, size, dtype=dtype), rand(outs, size, dtype=dtype)
    bias = rand(outs, dtype=dtype, scale=5.0) if parts == 3 or rows == 17 else None
    shape = op.Shape(tile=32, step=32, parts=parts, warps=4, stages=2)
    out = op.skinny_triton(x, weight, bias, shape=shape)
    assert_close(out, x.double() @ weight.double().T + (0 if bias is None else bias.double()))
    assert torch.equal(out, op.skinny_triton(x, weight, bias, shape=shape)), "the counters did not return to zero"


def test_rows_of_a_wider_tensor():
    x, weight = rand(3, 64)[:, :48], rand(16, 48)
    assert_close(op.skinny_triton(x, weight, shape=op.Shape(16, 16, 1, 4, 2)), x.double() @ weight.double().T)


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize(("outs", "size"), [(576, 576), (49152, 576), (28672, 4096), (4096, 14336)])
def test_every_shape_covers_the_matrix(rows, outs, size):
    """The chosen cut, without running it: parts of K that are not empty, counters that suffice."""
    shape = op.skinny_shape(rows, outs, size, 132)
    part = cdiv(cdiv(size, shape.parts), shape.step) * shape.step
    assert part * (shape.parts - 1) < size <= part * shape.parts
    assert shape.parts == 1 or cdiv(outs, shape.tile) <= 4096


@pytest.mark.parametrize("rows", [1, 3])
def test_logits_are_not_rounded(rows):
    """fp32 out of 16-bit factors, as exact as their sum."""
    x, weight = rand(rows, 96, dtype=torch.float16), rand(20, 96, dtype=torch.float16)
    expected = x.double() @ weight.double().T
    run = one_row.linear_triton if rows == 1 else op.skinny_triton
    out = run(x, weight, dtype=torch.float32)
    assert out.dtype == torch.float32
    assert_close(out, expected)
