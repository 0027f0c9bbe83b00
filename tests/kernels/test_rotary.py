"""The turn, the norm before it and the write to the cache against fp64, at positions up to a million."""

import pytest
import torch

from kvant.kernels import rotary as op
from tests.kernels.compare import DEVICE, DTYPES, assert_close, rand


def turn(x, angle, scale=1.0):
    """Complex multiplication by scale e^(i angle) of the pairs (i, i + P), in fp64; the rest of the head stays."""
    half = angle.shape[-1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.exp(1j * angle)[:, None, :] * scale
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "turning", "scale"),
    [(4, 2, 16, 16, 1.0), (3, 1, 20, 20, 1.3), (2, 1, 24, 18, 1.0), (4, 1, 20, 4, 1.7), (3, 3, 12, 0, 1.0)],
)
def test_rotary_and_store(heads, kv_heads, size, turning, scale, dtype, normed):
    tokens, eps = 5, 1e-6
    row = rand(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    q, k, v = row.split((heads * size, kv_heads * size, kv_heads * size), -1)
    q, k, v = q.reshape(tokens, heads, size), k.reshape(tokens, kv_heads, size), v.reshape(tokens, kv_heads, size)
    positions = torch.tensor([0, 1, 300, 8191, 131071], device=DEVICE)
    inv_freq = 10000.0 ** (-torch.arange(turning // 2, device=DEVICE) * 2 / max(turning, 1))
    slots = torch.randperm(40, device=DEVICE)[:tokens]
    norms = op.HeadNorms(rand(size), rand(size), eps) if normed else None
    rotation = op.Rotation(inv_freq, scale) if turning else None
    angle = (positions.float()[:, None] * inv_freq).double()  # the angle itself is fp32, as everywhere
    wanted_q, wanted_k = q.double(), k.double()
    if norms is not None:
        wanted_q, wanted_k = norm(wanted_q, norms.q, eps), norm(wanted_k, norms.k, eps)
    for run, slack in ((op.rotary_and_store_triton, 1), (op.rotary_and_store_reference, 2)):
        keys = torch.full((40, kv_heads, size), float("nan"), dtype=dtype, device=DEVICE)
        values = keys.clone()
        out = run(q, k, v, positions, rotation, slots, keys, values, norms)
        assert_close(out, turn(wanted_q, angle, scale), slack=slack)
        assert_close(keys[slots], turn(wanted_k, angle, scale), slack=slack)
        assert torch.equal(values[slots], v)
        untouched = torch.ones(40, dtype=torch.bool, device=DEVICE)
        untouched[slots] = False
        assert keys[untouched].isnan().all() and values[untouched].isnan().all()


@pytest.mark.parametrize("tokens", [65, 66])
def test_many_tokens_per_program(tokens):
    q, k, v = rand(tokens, 2, 16), rand(tokens, 1, 16), rand(tokens, 1, 16)
    positions, slots = torch.arange(tokens, device=DEVICE) * 999, torch.arange(tokens, device=DEVICE) + 3
    inv_freq = 10000.0 ** (-torch.arange(8, device=DEVICE) / 8)
    keys = torch.zeros(80, 1, 16, device=DEVICE)
    out = op.rotary_and_store_triton(q, k, v, positions, op.Rotation(inv_freq), slots, keys, torch.zeros_like(keys))
    angle = (positions.float()[:, None] * inv_freq).double()
    assert_close(out, turn(q.double(), angle))
    assert_close(keys[slots], turn(k.double(), angle))
