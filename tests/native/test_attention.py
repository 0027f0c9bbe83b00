"""Attention over the paged cache against the formula: decode, prompts, chunks, windows, shared heads, poisoned memory."""

import numpy as np
import pytest

from kvant.batch import Batch, GroupBatch
from kvant.config.model import CacheGroup
from kvant.errors import ConfigError
from kvant.native.cache import NativeCache
from kvant.native.program import Program
from tests.native import small

POISON = 0x7E00  # a half-precision NaN: whoever reads a slot that nobody wrote shows it


class Pages:
    """Sequences whose queries, keys and values are known numbers, and the cache they are written to."""

    def __init__(
        self, library, *, heads=3, kv_heads=1, size=64, window=None, cap=None, block=16, deterministic=False, length=600
    ):
        rng = np.random.default_rng(heads * size)
        self.heads, self.kv_heads, self.size, self.window, self.cap, self.block = heads, kv_heads, size, window, cap, block
        self.table_values = rng.normal(size=(length, (heads + 2 * kv_heads) * size)).astype(np.float32)
        group = CacheGroup(name="g", layers=(0,), window=window, num_kv_heads=kv_heads, head_dim=size, block_size=block)
        program = Program((group,))
        x = program.embedding(small.plain("x", self.table_values))
        q, k, v = x.split((heads * size, kv_heads * size, kv_heads * size))
        program.store_kv(k, v, 0)
        program.output(program.attention(q, 0, size**-0.5, window, cap))
        program.logits([small.plain("head", np.zeros((16, heads * size)))])
        self.model = program.finish(library, threads=2, deterministic=deterministic)
        self.cache = self.model.new_cache([400])
        self.cache.arrays[0][2 * block * kv_heads * size :] = POISON
        self.free = list(rng.permutation(np.arange(1, 400)))
        self.tables, self.tokens = {}, {}

    def step(self, rows):
        """`rows`: (sequence, token ids). Returns the attention's output [T, N, H]."""
        starts, slots, positions, tables, lens = [0], [], [], [], []
        for name, ids in rows:
            known = self.tokens.setdefault(name, [])
            first = len(known)
            known += list(ids)
            blocks = self.tables.setdefault(name, [])
            while len(blocks) * self.block < len(known):
                blocks.append(int(self.free.pop()))
            where = np.arange(first, len(known))
            positions += list(where)
            slots += [blocks[p // self.block] * self.block + p % self.block for p in where]
            starts.append(starts[-1] + len(ids))
            tables.append(blocks)
            lens.append(len(known))
        table = np.zeros((len(rows), max(map(len, tables))), np.int32)
        for row, blocks in enumerate(tables):
            table[row, : len(blocks)] = blocks
        group = GroupBatch(np.array(slots), table, np.array(lens, np.int32))
        batch = Batch(
            np.concatenate([np.array(ids) for _, ids in rows]),
            np.array(positions),
            np.array(starts, np.int32),
            np.arange(len(rows)),
            np.zeros(0, np.int64),
            (group,),
        )
        return self.model.run(batch, self.cache).hidden.reshape(starts[-1], self.heads, self.size).copy()

    def expected(self, name, last):
        """Attention of the sequence's last `last` tokens."""
        rows = self.table_values[self.tokens[name]]
        q, k, v = np.split(rows, [self.heads * self.size, (self.heads + self.kv_heads) * self.size], axis=1)
        k, v = (x.astype(np.float16).reshape(len(rows), self.kv_heads, self.size) for x in (k, v))
        positions = np.arange(len(rows))[len(rows) - last :]
        q = q.reshape(len(rows), self.heads, self.size)[len(rows) - last :]
        return small.attention(q, k, v, positions, scale=self.size**-0.5, window=self.window, cap=self.cap)

    def check(self, actual, name, last, tolerance):
        np.testing.assert_allclose(actual, self.expected(name, last), rtol=0, atol=tolerance)


ROWS, TILES = 2e-5, 2.5e-2  # tiles round queries, keys and weights to bf16


def tolerance(library, tokens, size):
    return TILES if library.has_tiles and tokens >= 16 and size % 32 == 0 else ROWS


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(3, 1, 64), (9, 3, 64), (4, 1, 256), (2, 2, 32), (8, 1, 80), (5, 1, 16), (2, 1, 36), (6, 2, 96)],
)
def test_prompt_then_decode(library, heads, kv_heads, size):
    pages = Pages(library, heads=heads, kv_heads=kv_heads, size=size)
    ids = np.random.default_rng(0).integers(0, 600, 300)
    pages.check(pages.step([("a", ids[:77])]), "a", 77, tolerance(library, 77, size))
    for token in ids[77:82]:
        pages.check(pages.step([("a", [token])]), "a", 1, ROWS)
    pages.check(pages.step([("a", ids[82:])]), "a", 218, tolerance(library, 218, size))
    pages.check(pages.step([("a", [5])]), "a", 1, ROWS)  # 301 positions: more than one span


@pytest.mark.parametrize("window", [1, 7, 16, 33, 100, 256])
def test_R47_a_query_sees_exactly_its_window(library, window):
    pages = Pages(library, window=window)
    ids = np.random.default_rng(1).integers(0, 600, 560)
    for first, last in ((0, 5), (5, 60), (60, 61), (61, 300), (300, 303), (303, 540), (540, 541)):
        actual = pages.step([("a", ids[first:last])])
        pages.check(actual, "a", last - first, tolerance(library, last - first, 64))


@pytest.mark.parametrize("window", [None, 50])
def test_soft_cap(library, window):
    pages = Pages(library, heads=2, cap=0.5, window=window)
    ids = np.random.default_rng(2).integers(0, 600, 90)
    pages.check(pages.step([("a", ids[:80])]), "a", 80, tolerance(library, 80, 64))
    pages.check(pages.step([("a", ids[80:81])]), "a", 1, ROWS)


@pytest.mark.parametrize("block", [16, 32, 64])
def test_a_mixed_batch(library, block):
    """Prompts, chunks, decode and a verification of drafts in one step, with blocks in a scrambled order."""
    pages = Pages(library, heads=4, kv_heads=2, size=32, block=block)
    rng = np.random.default_rng(3)
    pages.step([("a", rng.integers(0, 600, 40)), ("b", rng.integers(0, 600, 3)), ("c", rng.integers(0, 600, 270))])
    lengths = {"a": 1, "b": 31, "d": 64, "c": 4, "e": 1}
    actual = pages.step([(name, rng.integers(0, 600, n)) for name, n in lengths.items()])
    start = 0
    for name, n in lengths.items():
        pages.check(actual[start : start + n], name, n, tolerance(library, n, 32))
        start += n


def test_R35_deterministic_attention_does_not_depend_on_company_or_chunks(library):
    ids = np.random.default_rng(4).integers(0, 600, 330)
    whole = Pages(library, deterministic=True)
    together = whole.step([("a", ids)])
    pages = Pages(library, deterministic=True)
    parts = []
    for first, last in ((0, 1), (1, 20), (20, 290), (290, 330)):
        out = pages.step([("x", ids[:9]), ("a", ids[first:last]), ("y", ids[5:40])])
        parts.append(out[9 : 9 + last - first])
    np.testing.assert_array_equal(np.concatenate(parts), together)


def test_blocks_are_copied_before_anything_is_written(library):
    pages = Pages(library)
    ids = np.random.default_rng(5).integers(0, 600, 20)
    pages.step([("a", ids)])
    source, target = pages.tables["a"][1], int(pages.free.pop())
    pages.tables["b"], pages.tokens["b"] = [pages.tables["a"][0], target], list(ids)
    copies = np.array([[source, target]])
    step = pages.model.run
    pages.model.run = lambda batch, cache: step(
        Batch(
            *[getattr(batch, n) for n in ("input_ids", "positions", "query_start", "seats", "logit_rows")],
            (GroupBatch(batch.groups[0].slot_mapping, batch.groups[0].block_table, batch.groups[0].kv_lens, copies),),
        ),
        cache,
    )
    actual = pages.step([("b", [7]), ("a", [8])])
    pages.check(actual[:1], "b", 1, ROWS)
    pages.check(actual[1:], "a", 1, ROWS)


@pytest.mark.parametrize("deterministic", [False, True])
def test_R19_poison_in_one_sequence_stays_there(library, deterministic):
    pages = Pages(library, deterministic=deterministic)
    rng = np.random.default_rng(6)
    pages.table_values[599] = np.nan  # the program reads these very numbers
    ids = rng.integers(0, 598, 64)
    bad = ids.copy()
    bad[20] = 599
    actual = pages.step([("good", ids), ("bad", bad)])
    assert np.isfinite(actual[:64]).all()
    assert np.isnan(actual[84:]).all()
    # The blocks go to somebody else, who must not see what is left there.
    pages.free += pages.tables.pop("bad")
    pages.tokens.pop("bad")
    pages.check(pages.step([("next", ids)]), "next", 64, tolerance(library, 64, 64))


def test_only_whole_units_of_positions():
    group = CacheGroup(name="g", layers=(0,), window=None, num_kv_heads=1, head_dim=32, block_size=8)
    with pytest.raises(ConfigError, match="multiple of 16"):
        NativeCache((group,), [4])
