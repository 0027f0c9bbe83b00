"""What only a GPU can show: the chosen tiles at real sizes, launches that overlap, and graphs whose lengths change."""

import pytest
import torch

from kvant.attention.pattern import AttentionRule
from kvant.attention.storage import KVStorage
from kvant.attention.triton import TritonAttention
from kvant.batch import Batch, GroupBatch
from kvant.config.model import CacheGroup
from kvant.kernels import gated, gathered_prefill, linear, paged_decode, paged_prefill, rms_norm
from kvant.kernels.paged_attention import Scores, paged_attention_reference
from tests.kernels.compare import assert_close, rand
from tests.kernels.paged import paged

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BF16 = torch.bfloat16


@pytest.mark.parametrize("rows", [1, 2, 16, 33, 64])
@pytest.mark.parametrize(("outs", "size"), [(6144, 4096), (1024, 3072), (4096, 14336), (960, 576), (28672, 4096)])
def test_linear(outs, size, rows):
    x, weight = rand(rows, size, dtype=BF16), rand(outs, size, dtype=BF16)
    out = linear.linear(x, weight)
    assert_close(out, x.double() @ weight.double().T)
    assert all(torch.equal(out, linear.linear(x, weight)) for _ in range(5)), "depends on who arrives last"


@pytest.mark.parametrize("scores", [Scores(0.1), Scores(0.1, window=300), Scores(0.1, soft_cap=3.0)])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 128), (9, 3, 64), (4, 1, 256), (14, 2, 64), (8, 8, 96)])
def test_attention(heads, kv_heads, size, scores):
    torch.manual_seed(size)
    lengths = [(1, int(n)) for n in torch.randint(1, 3000, (37,))] + [(700, 700), (65, 900), (2, 513), (1, 9000)]
    case = paged(lengths, heads, kv_heads, size, dtype=BF16)
    expected = paged_attention_reference(case, scores)
    several = case.query_start.diff().repeat_interleave(case.query_start.diff()) > 1
    outs = []
    for _ in range(3):
        out = torch.full_like(case.q, float("nan"))
        plan = paged_decode.plan(case, scores.window, paged_decode.choose_cut(case))
        paged_decode.paged_decode(case, scores, plan, out)
        paged_prefill.paged_prefill(case, scores, out)
        outs.append(out)
    assert_close(outs[0], expected)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    if size & (size - 1) == 0:
        tile = gathered_prefill.choose_tile(size)
        starts, kv_lens = case.query_start.cpu().numpy(), case.kv_lens.cpu().numpy()
        places = gathered_prefill.places(starts, kv_lens, scores.window, tile.keys, case.q.device)
        out = torch.full_like(case.q, float("nan"))
        gathered_prefill.gathered_prefill(case, scores, places, out)
        assert_close(out[several], expected[several])


@pytest.mark.parametrize("fused", [False, True])
def test_launches_that_overlap_read_what_the_one_before_wrote(fused):
    """Forty layers in a graph, each launch beginning while the one before still runs, against one launch at a time."""
    size, hidden = 2048, 5504
    weights = [(rand(2 * hidden, size, dtype=BF16) * 0.02, rand(size, hidden, dtype=BF16) * 0.02) for _ in range(40)]
    ones = torch.ones(size, device="cuda")
    start = rand(1, size)

    def forward(pause) -> torch.Tensor:
        x, delta = start, start.to(BF16)
        for up, down in weights:
            if fused:
                narrow = linear.norm_gated_linear(x, ones, 1e-6, up, "silu")
                pause()
                x = linear.linear_add(narrow, down, x)
                pause()
                continue
            x, normed = rms_norm.add_rms_norm(x, delta, ones, 1e-6, BF16)
            pause()
            wide = linear.linear(normed, up)
            pause()
            narrow = gated.gated(wide, "silu")
            pause()
            delta = linear.linear(narrow, down)
            pause()
        return x

    expected = forward(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward(lambda: None)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_a_graph_serves_every_mix_of_lengths():
    """Captured once with padding rows; replayed with other lengths and tables."""
    group = CacheGroup(name="g", layers=(0, 1), window=None, num_kv_heads=2, head_dim=64)
    storage = KVStorage((group,), [400], BF16, "cuda")
    rows = 6
    q, k, v = (rand(rows, heads, 64, dtype=BF16) for heads in (8, 2, 2))
    arrays = dict(
        input_ids=torch.zeros(rows, dtype=torch.int64),
        positions=torch.zeros(rows, dtype=torch.int64),
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        seats=torch.arange(rows),
        logit_rows=torch.arange(rows),
    )
    lengths = dict(
        slot_mapping=torch.zeros(rows, dtype=torch.int64),
        block_table=torch.zeros(rows, 60, dtype=torch.int32),
        kv_lens=torch.ones(rows, dtype=torch.int32),
    )
    on_host = Batch(
        **{name: array.numpy() for name, array in arrays.items()},
        groups=(GroupBatch(**{name: array.numpy() for name, array in lengths.items()}),),
    )
    inputs = {name: array.cuda() for name, array in lengths.items()}
    batch = Batch(**{name: array.cuda() for name, array in arrays.items()}, groups=(GroupBatch(**inputs),))

    def forward() -> list[torch.Tensor]:
        attention = TritonAttention(on_host, batch, storage)
        return [attention.attend(q, k, v, AttentionRule(layer, 0.125, None, None)) for layer in (0, 1)]

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = forward()
    for seed in range(4):
        torch.manual_seed(seed)
        kv_lens = torch.randint(1, 960, (rows,))
        table = torch.zeros(rows, 60, dtype=torch.int32)
        order = (torch.randperm(399) + 1).to(torch.int32)
        for row, kv_len in enumerate(kv_lens.tolist()):
            count = -(-kv_len // 16)
            table[row, :count], order = order[:count], order[count:]
        last = kv_lens - 1
        inputs["kv_lens"].copy_(kv_lens)
        inputs["block_table"].copy_(table)
        inputs["slot_mapping"].copy_(table[torch.arange(rows), last // 16].long() * 16 + last % 16)
        for tensor in storage.keys[0] + storage.values[0]:
            tensor.normal_()
        graph.replay()
        replayed = [out.clone() for out in outs]
        assert all(torch.equal(a, b) for a, b in zip(replayed, forward(), strict=True))
        for layer, out in enumerate(replayed):
            keys, values = storage.of_layer(layer)
            case = paged([(1, 1)] * rows, 8, 2, 64, dtype=BF16)._replace(
                q=q, keys=keys, values=values, block_table=inputs["block_table"], kv_lens=inputs["kv_lens"]
            )
            assert_close(out, paged_attention_reference(case, Scores(0.125)))
