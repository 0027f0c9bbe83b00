"""Norms, rotary, gates, sums and their fused forms, against the formulas."""

import math

import numpy as np
import pytest

from kvant.errors import UnsupportedError
from kvant.native.lower import lower
from kvant.native.program import Kind, Program
from tests.native import small

ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
}


def rows(count, width, seed=0):
    return np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32) * 3


@pytest.mark.parametrize("count", [1, 2, 19])
@pytest.mark.parametrize("width", [32, 48, 50, 577])
def test_rms_norm(library, count, width):
    x, weight = rows(count, width), rows(1, width, 1)[0]
    actual = small.apply(library, x, lambda program, v: program.rms_norm(v, weight, 1e-5, offset=1.0))
    np.testing.assert_allclose(actual, small.rms_norm(x.astype(np.float64), weight + 1.0, 1e-5), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("size", [32, 40])
def test_head_norm_and_rotary_on_views(library, size):
    x, weight = rows(5, 6 * size), rows(1, size, 1)[0]
    inv_freq = 1.0 / 100.0 ** (np.arange(0, size, 2) / size)

    def body(program, v):
        q, _ = v.split((4 * size, 2 * size), -1)
        q = program.rotary(program.head_norm(q, weight, 1e-6), size, inv_freq, scale=1.5)
        return program.add(program.scale(q, 2.0), q)

    heads = small.rms_norm(x.astype(np.float64)[:, : 4 * size].reshape(5, 4, size), weight, 1e-6)
    angles = np.arange(5)[:, None, None] * inv_freq.astype(np.float32)
    first, second = np.split(heads, 2, axis=-1)
    cos, sin = 1.5 * np.cos(angles), 1.5 * np.sin(angles)
    expected = np.concatenate((first * cos - second * sin, second * cos + first * sin), -1).reshape(5, -1) * 3
    np.testing.assert_allclose(small.apply(library, x, body), expected, rtol=3e-5, atol=2e-5)


def test_partial_rotary_leaves_the_rest_of_a_head(library):
    x = rows(3, 64)
    actual = small.apply(library, x, lambda program, v: program.rotary(v, 32, [1.0, 0.5]))
    np.testing.assert_array_equal(actual.reshape(3, 2, 32)[..., 4:], x.reshape(3, 2, 32)[..., 4:])
    assert np.abs(actual.reshape(3, 2, 32)[1:, :, :4] - x.reshape(3, 2, 32)[1:, :, :4]).max() > 0.1


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [32, 50])
def test_gated(library, activation, width):
    x = rows(4, 2 * width)
    x[0, :4] = (-90, 90, -1000, 1000)
    actual = small.apply(library, x, lambda program, v: program.gated(v, activation))
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(actual, ACTIVATIONS[activation](gate) * up, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("count", [1, 6, 40])
@pytest.mark.parametrize("format", ["Q4_1", "F32"])
def test_fused_forms_equal_their_parts(library, count, format):
    """The same network twice: as written (fused), and with every value kept from fusing by a second reader."""
    rng = np.random.default_rng(0)
    x, weight = rows(count, 64), rows(1, 64, 1)[0]
    gate, up = (small.random_weight(format, 96, 64, rng) for _ in range(2))
    down = small.random_weight(format, 64, 96, rng)

    def fused(program, v):
        h = program.gated(program.linear(program.rms_norm(v, weight, 1e-5), [gate, up]), "silu")
        return v + program.linear(h, [down])

    def apart(program, v):
        h = program.rms_norm(v, weight, 1e-5)
        both = program.linear(h, [gate, up])
        h = program.add(
            program.gated(both, "silu"), program.scale(program.add(both.split((96, 96))[0], both.split((96, 96))[1]), 0.0)
        )
        y = program.linear(h, [down])
        return program.add(program.scale(y, 1.0), v)

    a, b = small.apply(library, x, fused, deterministic=True), small.apply(library, x, apart, deterministic=True)
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


@pytest.mark.parametrize("count", [1, 20])
def test_bias_residual_and_gate_in_one_operation(library, count):
    rng = np.random.default_rng(1)
    x = rows(count, 64)
    gate, up = (small.random_weight("F32", 50, 64, rng) for _ in range(2))
    bias = rng.normal(size=100).astype(np.float32)
    actual = small.apply(library, x, lambda p, v: p.gated(p.linear(v, [gate, up], bias), "silu"), deterministic=True)
    w = small.to_bf16(np.concatenate([small.values_of(gate), small.values_of(up)]))
    g, u = np.split(x.astype(np.float64) @ w.T + bias, 2, axis=-1)
    np.testing.assert_allclose(actual, ACTIVATIONS["silu"](g) * u, rtol=1e-4, atol=1e-3)


def llama_layer():
    program = Program((small.GROUP,))
    rng = np.random.default_rng(0)
    weight = {
        n: small.random_weight("Q8_0", r, 64, rng)
        for n, r in (("q", 64), ("k", 32), ("v", 32), ("o", 64), ("g", 96), ("u", 96))
    }
    ones = np.ones(64, np.float32)
    x = program.embedding(small.plain("embed", np.zeros((8, 64))))
    q, k, v = program.linear(program.rms_norm(x, ones, 1e-5), [weight["q"], weight["k"], weight["v"]]).split((64, 32, 32))
    program.store_kv(program.rotary(k, 32, np.ones(16)), v, 0)
    x = x + program.linear(program.attention(program.rotary(q, 32, np.ones(16)), 0, 1.0), [weight["o"]])
    h = program.gated(program.linear(program.rms_norm(x, ones, 1e-5), [weight["g"], weight["u"]]), "silu")
    x = x + program.linear(h, [small.random_weight("Q8_0", 64, 96, rng)])
    program.output(program.rms_norm(x, ones, 1e-5))
    program.logits([small.plain("head", np.zeros((8, 64)))])
    return program


def test_a_llama_layer_lowers_to_eight_operations():
    lowered = lower(llama_layer())
    layer = [op.kind for op in lowered.operations[1:-2]]
    assert layer == [
        Kind.LINEAR,
        Kind.ROTARY,
        Kind.STORE_KV,
        Kind.ROTARY,
        Kind.ATTENTION,
        Kind.LINEAR,
        Kind.LINEAR,
        Kind.LINEAR,
    ]
    assert lowered.operations[-2].kind == Kind.NORM  # the hidden states are an output of their own


def test_memory_is_used_again():
    lowered = lower(llama_layer())
    # embedding, qkv, attention, gate-up product; everything else lies over one of them
    assert lowered.row_floats <= 64 * 3 + 128 + 96


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (lambda p, x: p.linear(x, [small.plain("w", np.zeros((4, 5)))]), "linear w"),
        (lambda p, x: x.split((3, 4)), "split"),
        (lambda p, x: x.reshape(-1, 5, 5), "see a buffer"),
        (lambda p, x: p.gated(x, "relu"), "relu"),
        (lambda p, x: p.store_kv(x, x, 3), "layer 3"),
        (lambda p, x: p.rms_norm(x, np.ones(3), 1e-5), "rms_norm"),
    ],
)
def test_what_does_not_fit_is_refused_while_recording(record, words):
    program = Program((small.GROUP,))
    with pytest.raises(UnsupportedError, match=words):
        record(program, program.embedding(small.plain("x", np.zeros((2, 64)))))


def test_an_unsupported_format_is_named(native):
    from kvant.config.formats import StoredTensor

    strange = StoredTensor("blk.0.odd", "I8", (4, 64), np.zeros((4, 64), np.uint8))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.odd.*I8"):
        small.apply(native, np.zeros((1, 64), np.float32), lambda p, v: p.linear(v, [strange]))
