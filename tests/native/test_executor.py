"""What a caller may get wrong is named before anything runs; views, heads and repeated calls."""

from dataclasses import replace

import numpy as np
import pytest

from kvant.errors import UnsupportedError
from kvant.native.program import Program
from tests.native import small
from tests.native.test_operations import llama_layer


@pytest.fixture(scope="module")
def model(native):
    return llama_layer().finish(native, threads=2)


def changed(batch, **fields):
    group_fields = {k: v for k, v in fields.items() if hasattr(batch.groups[0], k)}
    group = replace(batch.groups[0], **group_fields)
    return replace(batch, groups=(group,), **{k: v for k, v in fields.items() if k not in group_fields})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": np.array([0, 8, 1])}, "input_ids"),
        ({"input_ids": np.array([0, -1, 1])}, "input_ids"),
        ({"positions": np.array([0, 1])}, "positions has shape"),
        ({"positions": np.array([0, 1, 3])}, "positions"),
        ({"positions": np.array([0, 1, -1])}, "positions"),
        ({"slot_mapping": np.array([16, 17, 1 << 40])}, "slot_mapping"),
        ({"slot_mapping": np.array([-1, 17, 18])}, "slot_mapping"),
        ({"block_table": np.array([[99]], np.int32)}, "block_table"),
        ({"block_table": np.array([[-1]], np.int32)}, "block_table"),
        ({"kv_lens": np.array([17], np.int32)}, "lengths"),
        ({"query_start": np.array([0, 2], np.int32)}, "lengths"),
        ({"logit_rows": np.array([3])}, "logit_rows"),
        ({"kv_copies": np.array([[1, 4]])}, "kv_copies"),
    ],
)
def test_a_batch_that_would_read_or_write_elsewhere_is_refused(model, fields, words):
    batch = changed(small.rows_batch(3), **fields)
    with pytest.raises(ValueError, match=words):
        model.run(batch, model.new_cache([4]))


def test_trees_media_and_adapters_are_refused(model):
    with pytest.raises(UnsupportedError):
        model.run(replace(small.rows_batch(3), ancestors=np.zeros((3, 1))), model.new_cache([4]))


@pytest.mark.parametrize("count", [1, 3, 40])
def test_logits_of_any_rows(library, count):
    rng = np.random.default_rng(0)
    x, head = rng.normal(size=(count, 64)).astype(np.float32), rng.normal(size=(50, 64)).astype(np.float32)
    program = Program((small.GROUP,))
    program.output(program.embedding(small.plain("x", x)))
    program.logits([small.plain("head", head)], soft_cap=5.0)
    model = program.finish(library, threads=2)
    step = model.run(small.rows_batch(count), model.new_cache([4]))
    expected = 5 * np.tanh(x.astype(np.float64) @ small.to_bf16(head).T / 5)
    np.testing.assert_allclose(step.logits, expected[-1:], atol=1e-4)
    np.testing.assert_array_equal(step.hidden, x)
    rows = np.array([0, count - 1, 0, count // 2])
    np.testing.assert_allclose(model.logits(rows), expected[rows], atol=1e-4)
    many = rng.integers(0, count, 33)
    np.testing.assert_allclose(model.logits(many), expected[many], atol=0.05)  # tiles: bf16


def test_no_logits_wanted(model):
    step = model.run(replace(small.rows_batch(3), logit_rows=np.zeros(0, np.int64)), model.new_cache([4]))
    assert step.logits is not None and step.logits.shape == (0, 8)
    assert model.run(small.rows_batch(3), model.new_cache([4]), logits=False).logits is None


def test_growing_and_shrinking_batches_give_the_same_numbers(native):
    model = llama_layer().finish(native, threads=2, deterministic=True)
    cache = model.new_cache([12])
    first = model.run(small_ids(5), cache).hidden.copy()
    for count in (1, 150, 2, 33):
        model.run(small_ids(count), cache)
    np.testing.assert_array_equal(model.run(small_ids(5), cache).hidden, first)


def small_ids(count):
    batch = small.rows_batch(count)
    return replace(batch, input_ids=batch.input_ids % 8)


def test_many_short_steps_do_not_lose_a_barrier(native):
    """A stress of the pool: steps back to back, and steps after pauses long enough for the threads to sleep."""
    import time

    model = llama_layer().finish(native, threads=3)
    cache = model.new_cache([12])
    expected = model.run(small_ids(4), cache).hidden.copy()
    for n in range(600):
        np.testing.assert_array_equal(model.run(small_ids(4), cache).hidden, expected)
        if n % 100 == 99:
            time.sleep(0.01)


@pytest.mark.parametrize("vocabulary", [1, 15, 16, 50, 700])
@pytest.mark.parametrize("count", [1, 3, 11, 20])
def test_the_greedy_choice_comes_with_the_logits(library, vocabulary, count):
    model = head_model(library, vocabulary, count)
    batch = replace(small.rows_batch(count), logit_rows=np.arange(count))
    for drawable in {1, max(1, vocabulary // 2), vocabulary}:
        step = model.run(batch, model.new_cache([4]), drawable=drawable)
        np.testing.assert_array_equal(step.best, step.logits[:, :drawable].argmax(-1))  # equal rows of the head: the lower id
        assert step.finite.all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 20, 49])
def test_R19_what_is_not_finite_is_noticed_where_it_can_be_drawn(library, poison, place):
    model = head_model(library, 50, 3, poison=(place, poison))
    batch = replace(small.rows_batch(3), logit_rows=np.arange(3))
    assert not model.run(batch, model.new_cache([4])).finite.any()
    step = model.run(batch, model.new_cache([4]), drawable=max(1, place))
    assert step.finite.all() == (place > 0)


def test_a_scan_of_no_columns_is_refused(native):
    model = head_model(native, 50, 3)
    with pytest.raises(ValueError, match="logit_rows"):
        model.run(small.rows_batch(3), model.new_cache([4]), drawable=0)


def head_model(library, vocabulary, count, poison=None):
    """Embedding and a plain head in which some rows occur twice."""
    rng = np.random.default_rng(vocabulary)
    head = rng.normal(size=(vocabulary, 32)).astype(np.float32)
    head[vocabulary // 2 :] = head[: vocabulary - vocabulary // 2]
    if poison:
        head[poison[0], 3] = poison[1]
    program = Program((small.GROUP,))
    program.output(program.embedding(small.plain("x", rng.normal(size=(count, 32)))))
    program.logits([small.plain("head", head)])
    return program.finish(library, threads=3)


@pytest.mark.parametrize("count", [1, 15, 16, 50, 49152])
def test_top_k_equals_numpy(library, count):
    model = llama_layer().finish(library, threads=2)
    logits = (np.random.default_rng(0).normal(size=(5, count + 3)) * 4).astype(np.float32)[:, :count]
    logits[1, -1] = logits[1, 0] = logits[1].max() + 1  # a tie: the lower id
    for k in {1, min(7, count), min(64, count)}:
        ids, values = model.top_k(logits, k)
        expected = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(logits, expected, -1))
