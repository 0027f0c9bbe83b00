"""What speed costs in quality: Kvant's distributions against fp32 of the same file, on 22,000 tokens of a novel.

    reference   Kvant's bricks on torch in fp32, held against transformers' log-probabilities before anything is measured
    variants    the native executor as users get it, and with options that change its arithmetic (`VARIANTS`)
    modes       how many tokens reach the network together (benchmarks/teacher.py): it multiplies few rows differently
    peer        llama.cpp, by its own program, on the second half of each window; Kvant's figures for those are beside it

What the figures mean: benchmarks/distance.py. The text and why it is free: benchmarks/data/README.md.

    python -m benchmarks.quality --output benchmarks/quality.json                        everything: about half an hour
    python -m benchmarks.quality --rows smollm2-135m/default/decode_8 --windows 8        a quick look, a minute
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.distance import summary
from benchmarks.peers import build_llama_cpp, llama_quality
from benchmarks.results import ROOT, Row, merge, origin
from benchmarks.teacher import MODES, Native, Reference, score, windows
from kvant.checkpoint.open import open_checkpoint
from kvant.checkpoint.store import resolve_model
from kvant.tokenizer.tokenizer import Tokenizer

TEXT = ROOT / "benchmarks" / "data" / "northanger_abbey.txt"
MODELS = ("smollm2-135m", "gemma3-270m")
VARIANTS: dict[str, dict[str, Any]] = {"default": {}, "deterministic": {"deterministic": True}}
MEASURED = {"default": tuple(MODES), "deterministic": ("prompt",)}  # few rows are the same arithmetic in both
WITH_PEER = ("prompt", "decode_8")  # of the default variant
# Windows: few where steps are slow and rows of eight are the same arithmetic; whole groups where fewer rows are another.
FEW = {"decode": 8, "decode_32": 32}
REFERENCE_GATE = 0.01  # |log-probability - transformers'|, the largest of the fixture's


class Scenario(NamedTuple):
    """One row of the table."""

    model: str
    variant: str
    mode: str

    def __str__(self) -> str:
        return "/".join(self)


SCENARIOS = {
    str(scenario): scenario
    for model in MODELS
    for variant, modes in MEASURED.items()
    for scenario in (Scenario(model, variant, mode) for mode in modes)
}


def read_text(model: str) -> tuple[list[int], int | None]:
    """The text's ids, and the token that this model expects at the beginning of every window."""
    tokenizer = Tokenizer.from_source(open_checkpoint(resolve_model(model)).tokenizer_source)
    ids = tokenizer.encode(TEXT.read_text())
    return (ids[1:], tokenizer.bos_id) if tokenizer.add_bos else (ids, None)


def check_reference(reference: Reference, model: str) -> float:
    """The largest distance of the reference's log-probabilities from transformers' in fp32. Raises where it is too large."""
    items = json.loads((ROOT / "tests" / "data" / f"{model}.transformers.json").read_text())["items"]
    away = 0.0
    for item in items:
        ids = np.array([item["prompt_ids"] + item["out_ids"]])
        reference.read(ids)
        rows = np.arange(len(item["prompt_ids"]) - 1, ids.shape[1] - 1)
        ours = reference.logits(np.zeros_like(rows), rows).log_softmax(-1)
        for row, top in zip(ours, item["top5"], strict=True):
            away = max(away, *(abs(float(row[token]) - value) for token, value in top))
    assert away < REFERENCE_GATE, f"{model}: the fp32 reference is {away:.4f} away from transformers"
    return away


def measure(wanted: list[Scenario], threads: int, most: int | None, peer: bool) -> Iterator[list[Row]]:
    """Rows of one model's scenarios, which share a reference; those of one size of window at a time."""
    model = wanted[0].model
    ids, bos = read_text(model)
    reference = Reference(model, threads)
    print(f"{model}: the reference is within {check_reference(reference, model):.1e} of transformers", flush=True)
    engines = {name: Native(model, threads, **VARIANTS[name]) for name in dict.fromkeys(s.variant for s in wanted)}
    for size in dict.fromkeys(MODES[s.mode].window for s in wanted):
        reference.read(windows(ids, size, bos)[:most])
        rows = []
        for scenario in (s for s in wanted if MODES[s.mode].window == size):
            rows.append(row(scenario, engines[scenario.variant], reference))
            print(line(rows[-1]), flush=True)
        if peer:
            add_peer([r for r in rows if "second_half" in r], reference, threads)
        yield rows


def row(scenario: Scenario, engine: Native, reference: Reference) -> Row:
    found = score(engine, reference, MODES[scenario.mode], FEW.get(scenario.mode))
    result: Row = {"scenario": str(scenario), **scenario._asdict(), **summary(found)}
    if scenario.variant == "default" and scenario.mode in WITH_PEER:
        half = llama_quality.second_half(MODES[scenario.mode].window)
        result["second_half"] = {"kvant": summary(found.at((slice(None), half)))}
    return result


def add_peer(rows: list[Row], reference: Reference, threads: int) -> None:
    """Puts llama.cpp's figures into rows that have Kvant's for the same positions."""
    if not rows:
        return
    programs = build_llama_cpp.programs()
    if programs is None:
        raise SystemExit("error: llama.cpp has not been built; run: python -m benchmarks.peers.build_llama_cpp (12 minutes)")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "reference"
        llama_quality.write_reference(base, reference, None)
        for entry in rows:
            mode = MODES[entry["mode"]]
            file = Path(str(resolve_model(entry["model"])))
            together = mode.chunk * mode.streams
            figures = llama_quality.measure(programs["llama-perplexity"], file, base, threads, mode.window, together)
            entry["second_half"]["llama.cpp"] = figures
            print(line({"scenario": f"{entry['model']}/llama.cpp/{entry['mode']}", **figures}), flush=True)
            print(line({**entry["second_half"]["kvant"], "scenario": "    Kvant, the same positions"}), flush=True)


def line(entry: Row) -> str:
    return (
        f"{entry['scenario']:44s} perplexity {entry['perplexity']:8.4f} ({entry['change_percent']:+.3f} % "
        f"± {entry['change_error']:.3f})   KL {entry['mean_kl']:.5f}   top-1 {entry['top1_percent']:.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rows", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="ROW", help=", ".join(SCENARIOS)
    )
    parser.add_argument("--windows", type=int, help="how many windows of the text; all of it by default")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-peer", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--output", type=Path, help="a JSON file, whose other rows are kept")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    versions = {name: version(name) for name in ("kvant", "numpy", "torch")} | build_llama_cpp.versions()
    for model in MODELS:
        wanted = [SCENARIOS[name] for name in arguments.rows if SCENARIOS[name].model == model]
        if not wanted:
            continue
        for rows in measure(wanted, arguments.threads, arguments.windows, not arguments.no_peer):
            if arguments.output:
                merge(arguments.output, [entry | origin(arguments.threads, versions) for entry in rows], SCENARIOS)


if __name__ == "__main__":
    main()
