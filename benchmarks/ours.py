"""Kvant as the benchmarks run it: with its defaults, through its engine and its text output, and as a program."""

import sysconfig
import tempfile
import time
from pathlib import Path

from benchmarks.peers.scenario import Launch, Load, Pace, launch, run
from benchmarks.results import ROOT
from kvant import LLM, SamplingParams
from kvant.config.environment import child_environment
from kvant.engine.outputs import RequestText
from kvant.types import StepInput

MAX_LEN = 4608


class Kvant:
    """The engine in this process; prompts are computed anew each time, as the peer does."""

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


def fresh_clone(prompt: str) -> Launch:
    """`make run` in a new clone of the last commit, where nothing is cached: no packages, no model, no compiled code."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "kvant"
        run(["git", "clone", "--quiet", str(ROOT), str(clone)])
        bare = child_environment(KVANT_CACHE=str(Path(folder) / "cache"), PIP_NO_CACHE_DIR="1")
        return launch(["make", "--silent", "-C", str(clone), "run", f"PROMPT={prompt}"], bare)
