"""Gated units against torch in fp64."""

import pytest
import torch
import torch.nn.functional as F

from kvant.errors import UnsupportedError
from kvant.kernels.gated import ACTIVATIONS, gated_reference, gated_triton
from tests.kernels.compare import DTYPES, assert_close, rand

FORMULA = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2 * 1100), (3, 2 * 7)])
def test_gated(shape, dtype, activation):
    gate_up = rand(*shape, dtype=dtype, scale=3.0)
    gate, up = gate_up.double().chunk(2, -1)
    expected = FORMULA[activation](gate) * up
    assert_close(gated_triton(gate_up, activation), expected)
    assert_close(gated_reference(gate_up, activation), expected, slack=2)


def test_an_unknown_activation_is_refused():
    with pytest.raises(UnsupportedError, match="relu"):
        gated_triton(torch.zeros(1, 8), "relu")
