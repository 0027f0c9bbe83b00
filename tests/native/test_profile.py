"""The profile of a run: every operation has its time, and together they are the run's."""

import json
import time

from kvant import LLM, SamplingParams
from kvant.native.program import Kind
from tests.tiny_folder import LLAMA


def test_the_parts_are_the_whole(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_size": 256, "intermediate_size": 512}))
    llm = LLM(f"dummy:{tmp_path}", threads=1)
    model = llm.engine.runner.model
    kinds = [op.kind for op in model.operations]
    spent = []
    run = model.run

    def timed(*arguments, **named):
        start = time.perf_counter_ns()
        result = run(*arguments, **named)
        spent.append(time.perf_counter_ns() - start)
        return result

    model.run = timed
    with model.profiled() as times:
        assert len(times) == len(kinds) and not times.any()
        llm.generate([list(range(1, 200))], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))
    assert (times > 0).all()
    assert 0.2 * sum(spent) < times.sum() < sum(spent)  # steps this small are mostly the call itself where others compute too
    linear = sum(t for t, kind in zip(times, kinds, strict=True) if kind == Kind.LINEAR)
    assert linear > 0.3 * times.sum(), "a network multiplies most of its time"
    before = times.copy()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    assert (times == before).all(), "nobody asks any more"
