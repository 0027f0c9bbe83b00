"""Kvant against llama.cpp on this machine's CPU: same model file, threads and lengths, in the same minutes.

    equality    Kvant's log-probabilities against the committed reference; llama.cpp's first words
    rounds      each measures every engine once per row, in alternating order:  K L | L K | K L | ...
    rows        medians over the rounds with their range, and the ratio of each round: the machine's speed moves by a factor
                of two within minutes, the ratio of neighbours much less

llama.cpp runs with and without flash attention in every round; a row keeps the setting with the better median. Kvant runs
in this process with its defaults, through its engine and its text output. How the rows are measured and how far they are
to be trusted: docs/benchmarks.md.

    python -m benchmarks.cpu --output benchmarks/cpu.json             about 25 minutes; replaces every row
    python -m benchmarks.cpu --rows one_short streams_8 --rounds 5    about 1 minute; with --output, replaces these two
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ours import Kvant, fresh_clone
from benchmarks.peers import build_llama_cpp
from benchmarks.peers.llama_cpp import SETTINGS, LlamaCpp
from benchmarks.peers.machine import QUIET, Machine
from benchmarks.peers.scenario import Load, Pace
from benchmarks.results import ROOT, merge, origin
from benchmarks.results import Row as Result
from kvant import SamplingParams
from kvant.checkpoint.store import resolve_model

START_TOKENS, START_CONTEXT = 8, 2048
MEAN_GATE, TAIL_GATE = 0.15, 0.5  # of |log-probability - fp32's|: mean and 99th percentile; 8-bit activations cost 0.06-0.1
NEAR_TIE = 0.5  # two first tokens whose log-probabilities differ less are both right for an engine that rounds
SMOLLM, GEMMA = "smollm2-135m", "gemma3-270m"


class Row(NamedTuple):
    """One line of the table. `part` is the field of `Pace` that counts; `third`: whether transformers can be measured too."""

    scenario: str
    load: Load
    part: str
    model: str = SMOLLM
    third: bool = False


ROWS = (
    Row("one_short", Load(1, 0, 128), "decode", third=True),
    Row("one_512", Load(1, 512, 64), "decode"),
    Row("one_4k", Load(1, 4096, 64), "decode"),
    Row("streams_8", Load(8, 128, 64), "decode", third=True),
    Row("streams_8_with_prompts", Load(8, 128, 64), "whole", third=True),
    Row("streams_32", Load(32, 128, 64), "decode"),
    Row("streams_32_with_prompts", Load(32, 128, 64), "whole"),
    Row("prompt_512", Load(1, 512, 1), "prompt", third=True),
    Row("prompt_4k", Load(1, 4096, 1), "prompt"),
    Row("gemma_one_short", Load(1, 0, 128), "decode", GEMMA),
    Row("gemma_streams_8", Load(8, 128, 64), "decode", GEMMA),
    Row("gemma_streams_8_with_prompts", Load(8, 128, 64), "whole", GEMMA),
)
START_ROWS = {"start": "s", "peak_memory": "MB"}
FRESH_CLONE, FRESH_ROUNDS = "fresh_clone", 2  # at most: each fetches 150 MB
UNITS = {**START_ROWS, FRESH_CLONE: "s"}  # of rows where less is better; all others are tok/s
NAMES = [FRESH_CLONE, *(row.scenario for row in ROWS), *START_ROWS]
Samples = dict[str, list[dict[str, float]]]  # scenario -> per round: engine -> value


def reference(model: str) -> list[dict[str, Any]]:
    """What transformers gives in fp32 on the same file: prompts, greedy ids, top-5 log-probabilities per step."""
    return list(json.loads((ROOT / "tests" / "data" / f"{model}.transformers.json").read_text())["items"])


def check_equal(kvant: Kvant, peer: LlamaCpp, items: list[dict[str, Any]]) -> dict[str, Any]:
    """Along the reference's own texts: how far Kvant's log-probabilities are from fp32. Raises where it is too far."""
    prompts = [item["prompt_ids"] + item["out_ids"] for item in items]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=30)
    away = []
    for item, output in zip(items, kvant.llm.generate(prompts, params), strict=True):
        assert output.prompt_logprobs is not None
        for ours, theirs in zip(output.prompt_logprobs[len(item["prompt_ids"]) :], item["top5"], strict=True):
            away += [abs(ours[token].logprob - value) for token, value in theirs if ours and token in ours]
    mean, tail = statistics.mean(away), sorted(away)[int(0.99 * len(away))]
    assert mean < MEAN_GATE and tail < TAIL_GATE, f"log-probabilities are {mean:.3f} away from fp32, 99 %: {tail:.3f}"
    answer = peer.start(items[0]["text_in"], START_TOKENS, START_CONTEXT).text
    best = items[0]["top5"][0]
    fitting = [kvant.llm.tokenizer.decode([token]).strip() for token, value in best if value > best[0][1] - NEAR_TIE]
    assert answer.startswith(tuple(fitting)), f"llama.cpp answers {answer!r}, fp32 begins with one of {fitting}"
    return {"kvant_mean": round(mean, 4), "kvant_p99": round(tail, 4), "count": len(away), "llama.cpp": answer}


def measure(arguments: argparse.Namespace) -> list[Result]:
    """All rounds of the wanted rows."""
    programs = build_llama_cpp.programs()
    if programs is None:
        sys.exit("error: llama.cpp has not been built; run: python -m benchmarks.peers.build_llama_cpp (12 minutes)")
    samples: Samples = {name: [] for name in arguments.rows}
    if FRESH_CLONE in samples:  # first: whoever has no package index should not learn it after twenty minutes
        for number in range(min(arguments.rounds, FRESH_ROUNDS)):
            record(number, samples, {FRESH_CLONE: {"kvant": fresh_clone(reference(SMOLLM)[0]["prompt"]).seconds}})
    rows = [row for row in ROWS if row.scenario in samples]
    starts = samples.keys() & START_ROWS.keys()
    models = dict.fromkeys([row.model for row in rows] + [SMOLLM] * bool(starts))
    benches = {model: bench(model, programs, arguments) for model in models}
    for number in range(arguments.rounds):
        for model, load in dict.fromkeys((row.model, row.load) for row in rows):
            wanted = [row for row in rows if (row.model, row.load) == (model, load)]
            record(number, samples, benches[model].paces(load, wanted, number))
        if starts:
            measured = benches[SMOLLM].starts(reference(SMOLLM)[0], number)
            record(number, samples, {scenario: measured[scenario] for scenario in starts})
    of = {row.scenario: row.model for row in ROWS}
    found = [summary(name, of.get(name, SMOLLM), samples[name]) for name in samples]
    return [row | {"equality": benches[row["model"]].equality} if row["peer"] else row for row in found]


def bench(model: str, programs: dict[str, Path], arguments: argparse.Namespace) -> "Bench":
    """The engines for `model`, after they were found to compute the same function."""
    file = Path(str(resolve_model(model)))
    kvant, peer = Kvant(model, arguments.threads), LlamaCpp(programs, file, arguments.threads)
    equality = check_equal(kvant, peer, reference(model))
    print(f"equality, {model}: {equality}", flush=True)
    third = None
    if arguments.transformers and model == SMOLLM:
        from benchmarks.peers.hf import Transformers

        third = Transformers(file, arguments.threads)
    return Bench(kvant, peer, third, Machine(), arguments.patience, equality)


class Bench(NamedTuple):
    """The engines of one benchmark, and the machine that they share with others."""

    kvant: Kvant
    peer: LlamaCpp
    third: Any  # Transformers, whose import costs seconds; or None
    machine: Machine
    patience: float
    equality: dict[str, Any]

    def paces(self, load: Load, wanted: list[Row], number: int) -> dict[str, dict[str, float]]:
        """One run of every engine: per wanted row, its part of each."""
        engines: dict[str, Callable[[], Pace]] = {"kvant": lambda: self.kvant.pace(load)}
        for setting in SETTINGS:
            engines[f"llama.cpp {setting}"] = partial(self.peer.pace, load, setting)
        if self.third is not None and any(row.third for row in wanted):
            engines["transformers"] = lambda: self.third.pace(load, self.kvant.prompts(load))
        paces, others = self._in_turn(engines, number)
        return {
            row.scenario: {name: getattr(pace, row.part) for name, pace in paces.items()} | {"others": others} for row in wanted
        }

    def starts(self, item: dict[str, Any], number: int) -> dict[str, dict[str, float]]:
        """Both programs from the command line to the first byte of an answer to the same prompt."""
        engines = {
            "kvant": lambda: self.kvant.start(item["prompt"], START_TOKENS, START_CONTEXT),
            "llama.cpp": lambda: self.peer.start(item["text_in"], START_TOKENS, START_CONTEXT),
        }
        runs, others = self._in_turn(engines, number)
        return {
            "start": {name: run.first_byte for name, run in runs.items()} | {"others": others},
            "peak_memory": {name: run.peak_bytes / 1e6 for name, run in runs.items()} | {"others": others},
        }

    def _in_turn(self, engines: dict[str, Callable[[], Any]], number: int) -> tuple[dict[str, Any], float]:
        """What each engine gives, measured in alternating order; and the cores that others used meanwhile, at the worst.

        While patience lasts, a measurement that others disturbed is begun again: chosen by their work, not by its result.
        """
        end = time.monotonic() + self.patience
        while True:
            self.machine.settle(end)
            results, others = {}, 0.0
            for name in alternate(list(engines), number):
                results[name] = engines[name]()
                others = max(others, self.machine.lap())
                if others >= QUIET and time.monotonic() < end:
                    break
            else:
                return results, others


def alternate(names: list[str], number: int) -> list[str]:
    return names[::-1] if number % 2 else names


def record(number: int, samples: Samples, measured: dict[str, dict[str, float]]) -> None:
    for scenario, values in measured.items():
        samples[scenario].append(values)
        print(
            f"round {number} {scenario:30s}" + "".join(f"{name} {value:.4g}   " for name, value in values.items()), flush=True
        )


def summary(scenario: str, model: str, rounds: list[dict[str, float]]) -> Result:
    """Medians, ranges and ratios. A ratio above 1 is in Kvant's favour, whether more is better or less."""
    sign = -1 if scenario in UNITS else 1
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    peers = [name for name in medians if name.startswith("llama.cpp")]
    best = max(peers, key=lambda name: sign * medians[name], default=None)
    result: Result = {"scenario": scenario, "model": model, "value": rounded(medians["kvant"])}
    result["unit"] = UNITS.get(scenario, "tok/s")
    spread = {"value": spread_of([r["kvant"] for r in rounds])}
    beside = against(rounds, best, sign) if best else {"peer_value": None, "ratio": None, "spread": {}}
    result |= {"peer": "llama.cpp" if best else None, "peer_value": beside["peer_value"], "ratio": beside["ratio"]}
    result |= {"spread": spread | beside["spread"], "rounds": len(rounds)}
    if best and best != "llama.cpp":
        result["flash_attention"] = best.split()[1]
    if "transformers" in medians:
        result["transformers"] = against(rounds, "transformers", sign)
    if "others" in medians:
        result["others_cores"] = {"median": rounded(medians["others"]), "most": rounded(max(r["others"] for r in rounds))}
    return result


def against(rounds: list[dict[str, float]], peer: str, sign: int) -> Result:
    """One peer's median, the median of the rounds' ratios, and the range of both."""
    values, ratios = [r[peer] for r in rounds], [(r["kvant"] / r[peer]) ** sign for r in rounds]
    ranges = {"peer_value": spread_of(values), "ratio": spread_of(ratios)}
    return {"peer_value": rounded(statistics.median(values)), "ratio": rounded(statistics.median(ratios)), "spread": ranges}


def spread_of(values: list[float]) -> list[float]:
    return [rounded(min(values)), rounded(max(values))]


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def table(rows: list[Result]) -> str:
    lines = [f"{'':38s}{'Kvant':>8s}{'llama.cpp':>12s}   ratio (range)        cores that others used, at most"]
    for row in rows:
        name = f"{row['scenario']} [{row['unit']}]"
        text = f"{name:38s}{row['value']:>8.4g}"
        if row["peer"]:
            ratio = "{:.2f} ({:.2f}-{:.2f})".format(row["ratio"], *row["spread"]["ratio"])
            text += f"{row['peer_value']:>12.4g}   {ratio:18s}   {row['others_cores']['most']:.2f}"
        if "flash_attention" in row:
            text += f"   flash attention {row['flash_attention']}"
        if "transformers" in row:
            text += f"   transformers {row['transformers']['peer_value']:.4g}, ratio {row['transformers']['ratio']:.2f}"
        lines.append(text)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=NAMES, default=NAMES, metavar="ROW", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--patience", type=float, default=0, metavar="S", help="per measurement, wait and repeat for quiet")
    parser.add_argument("--transformers", action="store_true", help="measure transformers (bf16) as well, in some rows")
    parser.add_argument("--output", type=Path, help="a JSON file, whose other rows are kept")
    arguments = parser.parse_args()
    measured = measure(arguments)
    print(table(measured))
    names = ("kvant", "numpy", *(("torch", "transformers") if arguments.transformers else ()))
    versions = {name: version(name) for name in names} | build_llama_cpp.versions()
    if arguments.output:
        merge(arguments.output, [row | origin(arguments.threads, versions) for row in measured], NAMES)


if __name__ == "__main__":
    main()
