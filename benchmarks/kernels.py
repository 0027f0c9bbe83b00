"""Every kernel against its reference, the machine's limits and torch, in one run on one NVIDIA GPU.

    python -m benchmarks.kernels --output benchmarks/kernels.h200.json      all
    python -m benchmarks.kernels decode prefill                             some

Each line: how far the result is from fp64 (or fp32 where that is the formula's reference), our time, the time that the bytes
or operations take at the ceilings measured in the same run, the fraction of it that is reached, and torch's time.

Times are medians over replays of a CUDA graph that holds many launches. Inputs are random; consecutive launches use
different copies, together larger than four times the L2 cache, so that nothing is read from there by accident.
"""

import argparse
import datetime
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton

from kvant.kernels import gated, gathered_prefill, linear, paged_decode, paged_prefill, rms_norm, rotary
from kvant.kernels.paged_attention import Paged, Scores, paged_attention_reference

BF16 = torch.bfloat16
COLD = 256 << 20  # bytes that consecutive launches touch before one of them is repeated; the L2 cache of an H200 has 60 MB


class Ceilings(NamedTuple):
    """What this card reaches at best: bytes read and written by a copy, operations of a bf16 product, per second."""

    bandwidth: float
    compute: float


class Line(NamedTuple):
    """One measurement. Times in microseconds."""

    name: str
    error: float | None  # None: the sum of others
    ours: float
    floor: float
    torch: float | None
    bound: str

    @property
    def fraction(self) -> float:
        return self.floor / self.ours


def timed(launches: list[Callable[[], object]], replays: int = 15, at_least: int = 24) -> float:
    """Microseconds per launch: the median over replays of one graph of all `launches`, repeated to `at_least`."""
    launches = launches * max(1, -(-at_least // len(launches)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for launch in launches[:3]:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times)


def copies(num_bytes: int) -> int:
    """How many copies of inputs of this size keep the cache cold."""
    return max(1, min(64, -(-COLD // num_bytes)))


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def measure_ceilings() -> Ceilings:
    source = random(1 << 30)
    target = torch.empty_like(source)
    # A kernel, since a graph would hand `copy_` to the copy engine, which is slower.
    seconds = timed([partial(torch.neg, source, out=target)], 10) * 1e-6
    a, b = random(8192, 8192), random(8192, 8192)
    product = timed([partial(torch.mm, a, b)], 10) * 1e-6
    return Ceilings(4 * source.numel() / seconds, 2 * 8192**3 / product)


# --- norms, gated units, rotary -----------------------------------------------------------------------------------------


def norm_lines(top: Ceilings) -> Iterator[Line]:
    for tokens, size in ((1, 4096), (64, 4096), (256, 1024), (8192, 4096)):
        moved = tokens * size * 12
        sets = [
            (random(tokens, size, dtype=torch.float32), random(tokens, size), random(size, dtype=torch.float32))
            for _ in range(copies(moved))
        ]
        x, delta, weight = sets[0]
        summed, out = rms_norm.add_rms_norm(x, delta, weight, 1e-6, BF16)
        exact = x.double() + delta.double()
        expected = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
        ours = timed([partial(rms_norm.add_rms_norm, *s, 1e-6, BF16) for s in sets])
        peer = timed([partial(rms_norm.add_rms_norm_reference, *s, 1e-6, BF16) for s in sets])
        wrong = max(error(out, expected), error(summed, exact))
        yield Line(f"add_rms_norm/{tokens}x{size}", wrong, ours, moved / top.bandwidth * 1e6, peer, "bytes")


def gated_lines(top: Ceilings) -> Iterator[Line]:
    for tokens, size in ((1, 14336), (64, 14336), (8192, 14336)):
        moved = tokens * size * 6
        sets = [random(tokens, 2 * size) for _ in range(copies(moved))]
        gate, up = sets[0].double().chunk(2, -1)
        wrong = error(gated.gated(sets[0], "silu"), F.silu(gate) * up)
        ours = timed([partial(gated.gated, s, "silu") for s in sets])
        peer = timed([partial(gated.gated_reference, s, "silu") for s in sets])
        yield Line(f"gated/{tokens}x{size}", wrong, ours, moved / top.bandwidth * 1e6, peer, "bytes")


def rotary_lines(top: Ceilings) -> Iterator[Line]:
    for tokens, heads, kv_heads, normed in ((1, 32, 8, False), (64, 32, 8, False), (256, 16, 8, True), (8192, 32, 8, False)):
        size = 128
        width = (heads + 2 * kv_heads) * size
        moved = tokens * width * 4
        positions = torch.randint(0, 100_000, (tokens,), device="cuda")
        inv_freq = 500_000.0 ** (-torch.arange(64, device="cuda") / 64)
        norms = rotary.HeadNorms(*random(2, size, dtype=torch.float32), 1e-6) if normed else None
        sets = []
        for _ in range(copies(moved)):
            parts = random(tokens, width).split((heads * size, kv_heads * size, kv_heads * size), -1)
            q, k, v = (part.reshape(tokens, -1, size) for part in parts)
            cache = torch.zeros(2, tokens + 16, kv_heads, size, device="cuda", dtype=BF16)
            sets.append(
                (
                    q,
                    k,
                    v,
                    positions,
                    rotary.Rotation(inv_freq),
                    torch.randperm(tokens, device="cuda"),
                    cache[0],
                    cache[1],
                    norms,
                )
            )
        first = sets[0]
        expected = rotary.rotary_and_store_reference(
            *(x.double() if x.dtype == BF16 else x for x in first[:6]), *(c.double() for c in first[6:8]), norms
        )
        wrong = error(rotary.rotary_and_store(*first), expected)
        ours = timed([partial(rotary.rotary_and_store, *s) for s in sets])
        peer = timed([partial(rotary.rotary_and_store_reference, *s) for s in sets])
        name = f"rotary_and_store{'_normed' if normed else ''}/{tokens}x{heads}+{kv_heads}x{size}"
        yield Line(name, wrong, ours, moved / top.bandwidth * 1e6, peer, "bytes")


# --- products with few rows ---------------------------------------------------------------------------------------------

MATRICES = {
    "8b gate+up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b qkv": (6144, 4096),
    "8b out": (4096, 4096),
    "8b head": (128256, 4096),
    "0.6b gate+up": (6144, 1024),
    "0.6b down": (1024, 3072),
}


def linear_lines(top: Ceilings) -> Iterator[Line]:
    for name, (outs, size) in MATRICES.items():
        for rows in (1, 2, 8, 16, 32, 64):
            moved = 2 * (outs * size + rows * (outs + size))
            sets = [(random(rows, size), random(outs, size)) for _ in range(copies(moved))]
            x, weight = sets[0]
            wrong = error(linear.linear(x, weight), x.double() @ weight.double().T)
            ours = timed([partial(linear.linear, *s) for s in sets])
            peer = timed([partial(F.linear, *s) for s in sets])
            yield Line(f"linear/{name}/{rows}", wrong, ours, moved / top.bandwidth * 1e6, peer, "bytes")


# --- attention ----------------------------------------------------------------------------------------------------------


def paged(lengths: list[tuple[int, int]], heads: int, kv_heads: int, size: int, block_size: int = 16) -> Paged:
    """`lengths`: (queries, keys) of every sequence; blocks in a random order."""
    blocks = [-(-kv_len // block_size) for _, kv_len in lengths]
    order = torch.randperm(sum(blocks), device="cuda").to(torch.int32) + 1
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device="cuda")
    first = 0
    for row, count in enumerate(blocks):
        table[row, :count] = order[first : first + count]
        first += count
    slots = (sum(blocks) + 1) * block_size
    starts = torch.tensor([0] + [queries for queries, _ in lengths]).cumsum(0)
    kv_lens = torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32, device="cuda")
    return Paged(
        q=random(int(starts[-1]), heads, size),
        keys=random(slots, kv_heads, size),
        values=random(slots, kv_heads, size),
        block_table=table,
        block_size=block_size,
        query_start=starts.to("cuda", torch.int32),
        kv_lens=kv_lens,
    )


def contiguous(case: Paged, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one sequence, [1, K, L, H]."""
    position = torch.arange(int(case.kv_lens[row]), device="cuda")
    slots = case.block_table[row, position // case.block_size].long() * case.block_size + position % case.block_size
    return case.keys[slots].transpose(0, 1)[None].contiguous(), case.values[slots].transpose(0, 1)[None].contiguous()


def nano_lengths(count: int) -> list[tuple[int, int]]:
    """Decode rows of many different lengths."""
    generator = torch.Generator().manual_seed(0)
    return [(1, int(n)) for n in torch.randint(100, 2048, (count,), generator=generator)]


DECODES = {
    "64x8k": ([(1, 8192)] * 64, 32, 8, 128, None),
    "256x1k": ([(1, 1024)] * 256, 32, 8, 128, None),
    "1x128k": ([(1, 131072)], 32, 8, 128, None),
    "1x32k": ([(1, 32768)], 32, 8, 128, None),
    "256 mixed, 16+8 heads": (nano_lengths(256), 16, 8, 128, None),
    "64 mixed, one of 64k": ([*nano_lengths(63), (1, 65536)], 32, 8, 128, None),
    "64x2k, h64": ([(1, 2048)] * 64, 32, 8, 64, None),
    "64x4k, h256, 8+4 heads": ([(1, 4096)] * 64, 8, 4, 256, None),
    "64x8k, window 1024": ([(1, 8192)] * 64, 32, 8, 128, 1024),
    "1x4k": ([(1, 4096)], 32, 8, 128, None),
    "1x1k": ([(1, 1024)], 32, 8, 128, None),
    "1x200": ([(1, 200)], 32, 8, 128, None),
    "1x200, 16+8 heads": ([(1, 200)], 16, 8, 128, None),
}


def decode_lines(top: Ceilings) -> Iterator[Line]:
    for name, (lengths, heads, kv_heads, size, window) in DECODES.items():
        scores = Scores(size**-0.5, window)
        case = paged(lengths, heads, kv_heads, size)
        seen = sum(min(kv_len, window or kv_len) for _, kv_len in lengths)
        moved = 4 * seen * kv_heads * size
        cases = [case] + [
            case._replace(keys=case.keys.clone(), values=case.values.clone()) for _ in range(min(4, copies(moved)) - 1)
        ]
        out = torch.full_like(case.q, float("nan"))
        plan = paged_decode.plan(case, window, paged_decode.choose_cut(case))
        paged_decode.paged_decode(case, scores, plan, out)
        wrong = error(out, paged_attention_reference(case, scores))
        ours = timed([partial(paged_decode.paged_decode, c, scores, plan, out) for c in cases])
        peer = None
        if len({kv_len for _, kv_len in lengths}) == 1 and window is None:
            k, v = (torch.cat(parts) for parts in zip(*(contiguous(case, row) for row in range(len(lengths))), strict=True))
            q = case.q.view(len(lengths), heads, 1, size)
            peer = timed([partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True)], 5)
        yield Line(f"decode/{name}", wrong, ours, moved / top.bandwidth * 1e6, peer, "bytes")


PREFILLS = {
    "1x4k": ([(4096, 4096)], 32, 8, 128, None),
    "1x8k": ([(8192, 8192)], 32, 8, 128, None),
    "1x16k": ([(16384, 16384)], 32, 8, 128, None),
    "16x2k": ([(2048, 2048)] * 16, 32, 8, 128, None),
    "16x64 after 1k": ([(64, 1088)] * 16, 32, 8, 128, None),
    "2k after 14k": ([(2048, 16384)], 32, 8, 128, None),
    "1x8k, h64": ([(8192, 8192)], 32, 8, 64, None),
    "1x8k, h256": ([(8192, 8192)], 16, 4, 256, None),
    "1x8k, window 1024": ([(8192, 8192)], 32, 8, 128, 1024),
}


def prefill_lines(top: Ceilings) -> Iterator[Line]:
    for name, (lengths, heads, kv_heads, size, window) in PREFILLS.items():
        scores = Scores(size**-0.5, window)
        case = paged(lengths, heads, kv_heads, size)
        out = torch.full_like(case.q, float("nan"))
        starts, kv_lens = case.query_start.cpu().numpy(), case.kv_lens.cpu().numpy()
        places = gathered_prefill.places(starts, kv_lens, window, gathered_prefill.choose_tile(size).keys, case.q.device)
        attend = partial(gathered_prefill.gathered_prefill, case, scores, places, out)
        attend()
        wrong = prefill_error(case, scores, out)
        pairs = sum(min(p + 1, window or p + 1) for queries, keys in lengths for p in range(keys - queries, keys))
        ours = timed([attend], 7)
        peer = None
        if window is None and all(queries == keys for queries, keys in lengths):
            k, v = (torch.cat(parts) for parts in zip(*(contiguous(case, row) for row in range(len(lengths))), strict=True))
            q = case.q.view(len(lengths), -1, heads, size).transpose(1, 2)
            k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
            with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION]):
                peer = timed([partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)], 7)
        floor = 4 * pairs * heads * size / top.compute * 1e6
        yield Line(f"prefill/{name}", wrong, ours, floor, peer, "operations")
        if size == 128 and window is None:
            out.fill_(float("nan"))
            paged_prefill.paged_prefill(case, scores, out)
            wrong = prefill_error(case, scores, out)
            ours = timed([partial(paged_prefill.paged_prefill, case, scores, out)], 7)
            yield Line(f"prefill from blocks/{name}", wrong, ours, floor, peer, "operations")


def prefill_error(case: Paged, scores: Scores, out: torch.Tensor) -> float:
    """Against the reference, for the first and the last 64 queries of the first and the last sequence."""
    worst = 0.0
    for row in {0, len(case.kv_lens) - 1}:
        start, end = int(case.query_start[row]), int(case.query_start[row + 1])
        for first, last in ((start, start + 64), (end - 64, end)):
            kv_len = int(case.kv_lens[row]) - (end - last)
            part = case._replace(
                q=case.q[first:last],
                block_table=case.block_table[row : row + 1],
                query_start=torch.tensor([0, last - first]),
                kv_lens=torch.tensor([kv_len]),
            )
            worst = max(worst, error(out[first:last], paged_attention_reference(part, scores)))
    return worst


# --- a whole step -------------------------------------------------------------------------------------------------------


class Stack(NamedTuple):
    """The shape of a model, without embedding and head."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


STACKS = {"llama-3-8b": Stack(32, 4096, 14336, 32, 8), "qwen3-0.6b": Stack(28, 1024, 3072, 16, 8)}


def step_lines(top: Ceilings) -> Iterator[Line]:
    """All layers of one decode step at context 200: nine launches a layer. "torch" has cuBLAS for the products only."""
    for name, stack in STACKS.items():
        for rows in (1, 8, 64):
            case = paged([(1, 200)] * rows, stack.heads, stack.kv_heads, 128)
            widths = ((stack.heads + 2 * stack.kv_heads) * 128, stack.hidden, 2 * stack.intermediate, stack.hidden)
            sizes = (stack.hidden, stack.heads * 128, stack.hidden, stack.intermediate)
            weights = [
                [random(outs, size) * size**-0.5 for outs, size in zip(widths, sizes, strict=True)] for _ in range(stack.layers)
            ]
            moved = stack.layers * 2 * sum(outs * size for outs, size in zip(widths, sizes, strict=True))
            ours = timed([partial(one_step, stack, case, weights, linear.linear)], 10, 2)
            peer = timed([partial(one_step, stack, case, weights, F.linear)], 10, 2)
            yield Line(f"step/{name}/{rows}", None, ours, moved / top.bandwidth * 1e6, peer, "bytes")
            if rows == 1:
                ours = timed([partial(one_step_fused, stack, case, weights)], 10, 2)
                yield Line(f"step fused/{name}/1", None, ours, moved / top.bandwidth * 1e6, peer, "bytes")
            del weights


def one_step(stack: Stack, case: Paged, weights: list[list[torch.Tensor]], multiply: Callable) -> torch.Tensor:
    """One decode step over `case`; every layer uses the same cache."""
    rows, ones = case.q.shape[0], torch.ones(stack.hidden, device="cuda")
    x, delta = torch.zeros(rows, stack.hidden, device="cuda"), torch.ones(rows, stack.hidden, device="cuda", dtype=BF16)
    split = [stack.heads * 128, stack.kv_heads * 128, stack.kv_heads * 128]
    rotation = rotary.Rotation(torch.ones(64, device="cuda"))
    slots = torch.arange(rows, device="cuda")
    plan = paged_decode.plan(case, None, paged_decode.choose_cut(case))
    out = torch.empty_like(case.q)
    for qkv, o, gate_up, down in weights:
        x, normed = rms_norm.add_rms_norm(x, delta, ones, 1e-6, BF16)
        q, k, v = (part.view(rows, -1, 128) for part in multiply(normed, qkv).split(split, -1))
        q = rotary.rotary_and_store(q, k, v, slots, rotation, slots, case.keys, case.values)
        paged_decode.paged_decode(case._replace(q=q), Scores(128**-0.5), plan, out)
        delta = multiply(out.view(rows, -1), o)
        x, normed = rms_norm.add_rms_norm(x, delta, ones, 1e-6, BF16)
        delta = multiply(gated.gated(multiply(normed, gate_up), "silu"), down)
    return x + delta


def one_step_fused(stack: Stack, case: Paged, weights: list[list[torch.Tensor]]) -> torch.Tensor:
    """The same for one row, with norms, gate and additions inside the products: six launches a layer."""
    ones, x = torch.ones(stack.hidden, device="cuda"), torch.ones(1, stack.hidden, device="cuda")
    split = [stack.heads * 128, stack.kv_heads * 128, stack.kv_heads * 128]
    rotation, slots = rotary.Rotation(torch.ones(64, device="cuda")), torch.zeros(1, dtype=torch.int64, device="cuda")
    plan = paged_decode.plan(case, None, paged_decode.choose_cut(case))
    out = torch.empty_like(case.q)
    for qkv, o, gate_up, down in weights:
        q, k, v = (part.view(1, -1, 128) for part in linear.norm_linear(x, ones, 1e-6, qkv).split(split, -1))
        q = rotary.rotary_and_store(q, k, v, slots, rotation, slots, case.keys, case.values)
        paged_decode.paged_decode(case._replace(q=q), Scores(128**-0.5), plan, out)
        x = linear.linear_add(out.view(1, -1), o, x)
        x = linear.linear_add(linear.norm_gated_linear(x, ones, 1e-6, gate_up, "silu"), down, x)
    return x


SECTIONS = {
    "step": step_lines,
    "norm": norm_lines,
    "gated": gated_lines,
    "rotary": rotary_lines,
    "linear": linear_lines,
    "decode": decode_lines,
    "prefill": prefill_lines,
}


def show(line: Line, top: Ceilings) -> str:
    rate = line.fraction * (top.bandwidth / 1e12 if line.bound == "bytes" else top.compute / 1e12)
    peer = f"{line.torch:10.1f} {line.torch / line.ours:6.2f}x" if line.torch else ""
    unit = "TB/s" if line.bound == "bytes" else "TFLOP/s"
    times = f"{line.ours:10.1f} {line.floor:10.1f} {line.fraction:6.2f} {rate:7.2f} {unit:8s}"
    wrong = "" if line.error is None else f"{line.error:.1e}"
    return f"{line.name:42s} {wrong:>8s} {times}{peer}"


def record(line: Line, about: dict) -> dict:
    measured = {
        "scenario": line.name,
        "value": round(line.ours, 2),
        "unit": "us",
        "floor": round(line.floor, 2),
        "fraction": round(line.fraction, 3),
        "torch": line.torch and round(line.torch, 2),
        "relative_error": None if line.error is None else float(f"{line.error:.2e}"),
    }
    return measured | about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    top = measure_ceilings()
    commit = options.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    about = {
        "card": torch.cuda.get_device_name(0),
        "versions": f"torch {torch.__version__}, triton {triton.__version__}",
        "commit": commit.strip(),
        "date": datetime.date.today().isoformat(),
    }
    print(f"{about['card']}, {about['versions']}: {top.bandwidth / 1e12:.2f} TB/s, {top.compute / 1e12:.0f} TFLOP/s")
    print(f"{'':42s} {'error':>8s} {'us':>10s} {'floor':>10s} {'part':>6s} {'':16s}{'torch':>10s}")
    rows = []
    for section in options.sections:
        for line in SECTIONS[section](top):
            print(show(line, top), flush=True)
            rows.append(record(line, about))
        torch.cuda.empty_cache()
    if options.output:
        ceilings = {"bandwidth": top.bandwidth, "compute": top.compute}
        options.output.write_text(json.dumps({"ceilings": ceilings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
