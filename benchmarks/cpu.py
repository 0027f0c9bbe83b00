"""Kvant against llama.cpp on this machine's CPU: same model file, threads and lengths, in the same minutes.

    equality    Kvant's log-probabilities against the committed reference; llama.cpp's first words
    rounds      each measures every engine once per row, in alternating order:  K L | L K | K L | ...
    rows        medians over the rounds with their range, and the ratio of each round: the machine's speed moves by a factor
                of two within minutes, the ratio of neighbours much less

llama.cpp runs with and without flash attention in every round; a row keeps the setting with the better median. Kvant runs
in this process with its defaults, through its engine and its text output. How the rows are measured and how far they are
to be trusted: docs/benchmarks.md.

    python -m benchmarks.cpu                                          about 20 minutes
    python -m benchmarks.cpu --rows one_short streams_8 --rounds 5    about 1 minute
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers import build_llama_cpp
from benchmarks.peers.llama_cpp import SETTINGS, LlamaCpp
from benchmarks.peers.machine import QUIET, Machine
from benchmarks.peers.scenario import Launch, Load, Pace, launch
from kvant import LLM, SamplingParams
from kvant.checkpoint.store import resolve_model
from kvant.engine.outputs import RequestText
from kvant.types import StepInput

ROOT = Path(__file__).parent.parent
MAX_LEN = 4608
START_TOKENS, START_CONTEXT = 8, 2048
MEAN_GATE, TAIL_GATE = 0.15, 0.5  # of |log-probability - fp32's|: mean and 99th percentile; 8-bit activations cost 0.06-0.1
NEAR_TIE = 0.5  # two first tokens whose log-probabilities differ less are both right for an engine that rounds


class Row(NamedTuple):
    """One line of the table. `part` is the field of `Pace` that counts."""

    scenario: str
    load: Load
    part: str


ROWS = (
    Row("one_short", Load(1, 0, 128), "decode"),
    Row("one_512", Load(1, 512, 64), "decode"),
    Row("one_4k", Load(1, 4096, 64), "decode"),
    Row("streams_8", Load(8, 128, 64), "decode"),
    Row("streams_8_with_prompts", Load(8, 128, 64), "whole"),
    Row("streams_32", Load(32, 128, 64), "decode"),
    Row("streams_32_with_prompts", Load(32, 128, 64), "whole"),
    Row("prompt_512", Load(1, 512, 1), "prompt"),
    Row("prompt_4k", Load(1, 4096, 1), "prompt"),
)
START_ROWS = {"start": "s", "peak_memory": "MB"}
NAMES = [row.scenario for row in ROWS] + list(START_ROWS)
Samples = dict[str, list[dict[str, float]]]  # scenario -> per round: engine -> value


class Kvant:
    """The engine in this process, with its defaults; prompts are computed anew each time, as the peer does."""

    def __init__(self, model: str, threads: int):
        self.model, self.threads = model, threads
        self.llm = LLM(model, threads=threads, max_model_len=MAX_LEN, enable_prefix_caching=False)
        self.ids = self.llm.tokenizer.encode((ROOT / "LICENSE").read_text())

    def prompts(self, load: Load) -> list[list[int]]:
        """A different part of a text for every stream, from its beginning again where it ends."""
        count = max(load.prompt, 1)  # an engine cannot go on from nothing; the peer begins at an empty cache
        return [[self.ids[(stream * 67 + i) % len(self.ids)] for i in range(count)] for stream in range(load.streams)]

    def pace(self, load: Load) -> Pace:
        """One run of `load`, after a short untimed one (a whole one where only the prompt counts, as llama-bench does)."""
        self._run(load if load.new == 1 else Load(load.streams, 1, 4))
        start = time.perf_counter()
        times = self._run(load)
        assert all(len(stream) == load.new for stream in times), "a stream ended early"
        all_began, first_end = max(stream[0] for stream in times), min(stream[-1] for stream in times)
        decoded = sum(all_began < moment <= first_end for stream in times for moment in stream)
        return Pace(
            prompt=load.streams * load.prompt / (all_began - start),
            decode=decoded / (first_end - all_began) if load.new > 1 else None,
            whole=load.streams * load.new / (max(stream[-1] for stream in times) - start),
        )

    def _run(self, load: Load) -> list[list[float]]:
        """Per stream, the moment of every token. Texts are made, as for a user."""
        engine, arrival = self.llm.engine, time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=load.new, ignore_eos=True)
        requests = [engine.request(ids, params, arrival=arrival) for ids in self.prompts(load)]
        texts = {request.request_id: RequestText(request, None, self.llm.tokenizer, arrival) for request in requests}
        times: dict[str, list[float]] = {request.request_id: [] for request in requests}
        for request in requests:
            engine.add(request)
        while engine.has_work():
            for output in engine.step(StepInput(now=time.monotonic(), messages=engine.inbox.receive())):
                texts[output.request_id].receive(output, time.monotonic())
                times[output.request_id] += [time.perf_counter()] * len(output.token_ids)
        return list(times.values())

    def start(self, prompt: str, tokens: int, context: int) -> Launch:
        """`kvant run` in a process of its own, as from a terminal."""
        program = str(Path(sysconfig.get_path("scripts")) / "kvant")
        sizes = ["--max-tokens", str(tokens), "--max-model-len", str(context), "--threads", str(self.threads)]
        return launch([program, "run", self.model, "--prompt", prompt, "--temperature", "0", *sizes])


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


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds of the wanted rows."""
    programs = build_llama_cpp.programs()
    if programs is None:
        sys.exit("error: llama.cpp has not been built; run: python -m benchmarks.peers.build_llama_cpp (12 minutes)")
    file = Path(str(resolve_model(arguments.model)))
    kvant, peer = Kvant(arguments.model, arguments.threads), LlamaCpp(programs, file, arguments.threads)
    items = reference(arguments.model)
    equality = check_equal(kvant, peer, items)
    print(f"equality: {equality}", flush=True)
    third = None
    if arguments.transformers:
        from benchmarks.peers.hf import Transformers

        third = Transformers(file, arguments.threads)
    bench = Bench(kvant, peer, third, Machine(), arguments.patience)
    samples: Samples = {name: [] for name in arguments.rows}
    for number in range(arguments.rounds):
        for load in dict.fromkeys(row.load for row in ROWS if row.scenario in samples):
            wanted = {row.scenario: row.part for row in ROWS if row.load == load and row.scenario in samples}
            record(number, samples, bench.paces(load, wanted, number))
        if wanted := samples.keys() & START_ROWS.keys():
            starts = bench.starts(items[0], number)
            record(number, samples, {scenario: starts[scenario] for scenario in wanted})
    return {"equality": equality, "rows": [summary(*entry) for entry in samples.items()]}


class Bench(NamedTuple):
    """The engines of one benchmark, and the machine that they share with others."""

    kvant: Kvant
    peer: LlamaCpp
    third: Any  # Transformers, whose import costs seconds; or None
    machine: Machine
    patience: float

    def paces(self, load: Load, wanted: dict[str, str], number: int) -> dict[str, dict[str, float]]:
        """One run of every engine: per wanted row, its part of each."""
        engines: dict[str, Callable[[], Pace]] = {"kvant": lambda: self.kvant.pace(load)}
        for setting in SETTINGS:
            engines[f"llama.cpp {setting}"] = partial(self.peer.pace, load, setting)
        if self.third is not None:
            engines["transformers"] = lambda: self.third.pace(load, self.kvant.prompts(load))
        paces, others = self._in_turn(engines, number)
        return {
            scenario: {name: getattr(pace, part) for name, pace in paces.items()} | {"others": others}
            for scenario, part in wanted.items()
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
            f"round {number} {scenario:24s}" + "".join(f"{name} {value:.4g}   " for name, value in values.items()), flush=True
        )


def summary(scenario: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, ranges and ratios. A ratio above 1 is in Kvant's favour, whether more is better or less."""
    unit = START_ROWS.get(scenario, "tok/s")
    sign = -1 if scenario in START_ROWS else 1
    medians = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    best = max((name for name in medians if name.startswith("llama.cpp")), key=lambda name: sign * medians[name])
    row = {"scenario": scenario, "unit": unit, "others_cores": spread([r["others"] for r in rounds])}
    row["value"] = spread([r["kvant"] for r in rounds])
    for name, peer in (("llama.cpp", best), ("transformers", "transformers")):
        if peer in medians:
            ratios = [(r["kvant"] / r[peer]) ** sign for r in rounds]
            row[name] = {"value": spread([r[peer] for r in rounds]), "ratio": spread(ratios)}
    if best != "llama.cpp":
        row["llama.cpp"]["flash_attention"] = best.split()[1]
    return row


def spread(values: list[float]) -> dict[str, float]:
    ordered = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in ordered.items()}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':32s}{'Kvant':>8s}{'llama.cpp':>12s}   ratio (range)        cores that others used"]
    for row in rows:
        peer = row["llama.cpp"]
        name = f"{row['scenario']} [{row['unit']}]"
        medians = f"{row['value']['median']:>8.4g}{peer['value']['median']:>12.4g}"
        ratio = "{median:.2f} ({min:.2f}-{max:.2f})".format(**peer["ratio"])
        others = "{median:.2f} ({min:.2f}-{max:.2f})".format(**row["others_cores"])
        setting = f"   flash attention {peer['flash_attention']}" if "flash_attention" in peer else ""
        lines.append(f"{name:32s}{medians}   {ratio:18s}   {others}{setting}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=NAMES, default=NAMES, metavar="ROW", help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="smollm2-135m", help="an alias with a reference in tests/data")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--patience", type=float, default=0, metavar="S", help="per measurement, wait and repeat for quiet")
    parser.add_argument("--transformers", action="store_true", help="measure transformers (bf16) as well")
    parser.add_argument("--output", type=Path, help="write a JSON file")
    arguments = parser.parse_args()
    measured = measure(arguments)
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    names = ("kvant", "numpy", *(("torch", "transformers") if arguments.transformers else ()))
    result = {
        "date": date.today().isoformat(),
        "commit": commit,
        "model": arguments.model,
        "machine": Machine.describe() | {"threads": arguments.threads},
        "versions": {name: version(name) for name in names} | json.loads((build_llama_cpp.home() / "build.json").read_text()),
        "rounds": arguments.rounds,
        **measured,
    }
    print(table(result["rows"]))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
