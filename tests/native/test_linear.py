"""Linears against the formula on dequantised weights, for every format, instruction set and number of rows."""

import numpy as np
import pytest

from kvant.config.formats import StoredTensor
from kvant.native.packing import pack
from tests.native import small

FORMATS = (*small.BLOCK_FORMATS, *small.PLAIN_FORMATS)
TILE_ROWS = 16  # from here on tiles may be used


def reference(x, weight, tiles):
    """x W^T with the roundings that the kernels make on purpose."""
    w = small.values_of(weight)
    dense = weight.format in small.PLAIN_FORMATS
    if tiles:
        return small.to_bf16(x) @ small.to_bf16(w).T, np.abs(small.to_bf16(x)) @ np.abs(w).T
    rounded = np.asarray(x, np.float64) if dense else small.to_int8_groups(x)
    return rounded @ (small.to_bf16(w) if dense else w).T, np.abs(rounded) @ np.abs(w).T


def check(actual, x, weight, tiles):
    expected, size = reference(x, weight, tiles)
    # Scales that are products (super-blocks) are rounded to halves. Tiles round single weights to bf16 after an fp32
    # multiply-add: where that falls between two neighbours, now and then the other one than fp64 would take.
    product = weight.format in small.SUPER_FORMATS
    tolerance = 2e-3 if tiles and product else 5e-4 if tiles or product else 2e-5
    np.testing.assert_array_less(np.abs(actual - expected), tolerance * size + 1e-6)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 33, 70])
def test_every_format_and_row_count(library, format, rows):
    rng = np.random.default_rng(rows)
    columns = 768 if format in small.SUPER_FORMATS else 736
    weight = small.random_weight(format, 80, columns, rng)
    x = rng.normal(size=(rows, columns)).astype(np.float32)
    x[0, ::5] *= 50
    x = small.between_no_steps(x)
    actual = small.apply(library, x, lambda program, v: program.linear(v, [weight]))
    check(actual, x, weight, tiles=library.has_tiles and rows >= TILE_ROWS)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("shape", [(1, 32), (5, 33), (17, 40), (31, 1), (50, 1030)])
def test_odd_shapes(library, shape, rows):
    rng = np.random.default_rng(0)
    weight = small.random_weight("F32", *shape, rng)
    x = rng.normal(size=(rows, shape[1])).astype(np.float32)
    actual = small.apply(library, x, lambda program, v: program.linear(v, [weight]))
    check(actual, x, weight, tiles=library.has_tiles and rows >= TILE_ROWS)


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_stacked_matrices_of_different_formats(library, rows):
    rng = np.random.default_rng(1)
    weights = [small.random_weight(f, n, 256, rng) for f, n in (("Q5_0", 48), ("Q8_0", 7), ("Q6_K", 33), ("BF16", 20))]
    x = rng.normal(size=(rows, 256)).astype(np.float32)
    actual = small.apply(library, x, lambda program, v: program.linear(v, weights))
    start = 0
    for weight in weights:
        end = start + weight.shape[0]
        check(actual[:, start:end], x, weight, tiles=library.has_tiles and rows >= TILE_ROWS)
        start = end


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_any_number_of_threads_gives_the_same_bits(native, threads):
    rng = np.random.default_rng(2)
    weight = small.random_weight("Q4_1", 112, 320, rng)
    for rows in (1, 3, 37):
        x = rng.normal(size=(rows, 320)).astype(np.float32)
        one = small.apply(native, x, lambda program, v: program.linear(v, [weight]), threads=1)
        many = small.apply(native, x, lambda program, v: program.linear(v, [weight]), threads=threads)
        np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize("format", FORMATS)
def test_R35_deterministic_rows_do_not_depend_on_their_company(library, format):
    rng = np.random.default_rng(3)
    weight = small.random_weight(format, 40, 256, rng)
    x = rng.normal(size=(70, 256)).astype(np.float32)
    body = lambda program, v: program.linear(v, [weight])  # noqa: E731
    together = small.apply(library, x, body, deterministic=True)
    for first, last in ((0, 1), (1, 3), (3, 11), (11, 28), (28, 70)):
        np.testing.assert_array_equal(small.apply(library, x[first:last], body, deterministic=True), together[first:last])


@pytest.mark.parametrize("format", small.BLOCK_FORMATS)
def test_portable_kernels_equal_the_fast_ones(native, portable, format):
    rng = np.random.default_rng(4)
    weight = small.random_weight(format, 48, 512, rng)
    x = rng.normal(size=(8, 512)).astype(np.float32)
    body = lambda program, v: program.linear(v, [weight])  # noqa: E731
    fast, slow = (small.apply(each, x, body, deterministic=True) for each in (native, portable))
    np.testing.assert_allclose(fast, slow, rtol=1e-5, atol=1e-5 * np.abs(slow).max())


@pytest.mark.parametrize("format", FORMATS)
def test_vnni_in_short_registers_gives_the_bits_of_avx2(avx2, avxvnni, format):
    rng = np.random.default_rng(11)
    weight = small.random_weight(format, 40, 256, rng)
    x = rng.normal(size=(7, 256)).astype(np.float32) * 30
    body = lambda program, v: program.linear(v, [weight])  # noqa: E731
    np.testing.assert_array_equal(small.apply(avx2, x, body), small.apply(avxvnni, x, body))


@pytest.mark.parametrize("format", FORMATS)
def test_R43_rows_of_the_embedding_equal_the_scalar_reference(library, format):
    weight = small.random_weight(format, 9, 512, np.random.default_rng(5))
    values = np.empty(512, np.float32)
    expected = small.values_of(weight)
    from kvant.native import abi

    for row in range(9):
        library.functions.kvant_decode_row(abi.FORMATS[format], abi.address(weight.raw[row]), 512, abi.address(values))
        np.testing.assert_allclose(values, expected[row], rtol=3e-7, atol=0)


def test_packed_bytes_are_the_files_own(native):
    rng = np.random.default_rng(6)
    expected = {"Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5, "IQ4_NL": 4.5, "F32": 16, "BF16": 16}
    expected |= {"Q2_K": 4, "Q3_K": 4, "Q4_K": 5, "Q5_K": 6, "Q6_K": 7}
    for format, bits in expected.items():
        weight = small.random_weight(format, 64, 512, rng)
        (packed,) = pack(native, [weight], threads=1)
        assert packed.data.nbytes * 8 / (64 * 512) == bits, format


@pytest.mark.parametrize("rows", [1, 20])
def test_scales_beyond_half_precision_are_kept_as_plain_values(library, rows):
    """Q4_K multiplies two numbers into one scale: 60000 * 63 is no half, but a fine bf16."""
    weight = small.random_weight("Q4_K", 16, 256, np.random.default_rng(7))
    raw = weight.raw.copy()
    raw[3, 0:2] = np.array([60000.0], np.float16).view(np.uint8)
    weight = StoredTensor(weight.name, weight.format, weight.shape, raw)
    x = np.random.default_rng(8).normal(size=(rows, 256)).astype(np.float32)
    actual = small.apply(library, x, lambda program, v: program.linear(v, [weight]))
    expected = x.astype(np.float64) @ small.values_of(weight).T
    size = np.abs(x).astype(np.float64) @ np.abs(small.values_of(weight)).T
    np.testing.assert_array_less(np.abs(actual - expected), 6e-3 * size)


@pytest.mark.parametrize("rows", [1, 9, 33])
def test_extreme_activations(library, rows):
    """Zeros, huge and tiny rows, rows with a single spike."""
    rng = np.random.default_rng(9)
    weight = small.random_weight("Q4_1", 32, 128, rng)
    x = rng.normal(size=(rows, 128)).astype(np.float32)
    x[0] = 0
    if rows > 3:
        x[1] *= 1e15
        x[2] *= 1e-20
        x[3] = 0
        x[3, 77] = 3
    actual = small.apply(library, x, lambda program, v: program.linear(v, [weight]))
    assert np.isfinite(actual).all()
    assert (actual[0] == 0).all()
    check(actual[3:] if rows > 3 else actual, x[3:] if rows > 3 else x, weight, library.has_tiles and rows >= TILE_ROWS)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_R19_a_broken_row_stays_broken_and_alone(library, rows, poison):
    rng = np.random.default_rng(10)
    x = rng.normal(size=(rows, 128)).astype(np.float32)
    clean = x.copy()
    x[1, 5] = poison
    for format in ("Q4_1", "Q8_0", "F32"):
        weight = small.random_weight(format, 32, 128, rng)
        body = lambda program, v, w=weight: program.linear(v, [w])  # noqa: E731
        actual, expected = small.apply(library, x, body), small.apply(library, clean, body)
        others = np.arange(rows) != 1
        np.testing.assert_array_equal(actual[others], expected[others])
        assert not np.isfinite(actual[1]).all()
