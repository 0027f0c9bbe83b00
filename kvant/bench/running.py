"""Running a workload: one call of `generate`, timed, its answers checked for their lengths."""

import time
from typing import Any

from kvant.bench.target import Target
from kvant.bench.workload import Workload
from kvant.errors import GenerationError


def seconds(target: Target, workload: Workload) -> float:
    """The wall time of all requests together, from the first to the last."""
    took, _ = run(target.llm, workload)
    return took


def run(llm: Any, workload: Workload) -> tuple[float, list[list[int]]]:
    """The wall time, and the tokens of every answer. Raises `GenerationError` where an answer has another length."""
    prompts = [list(prompt) for prompt in workload.prompts]
    params = workload.params()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    took = time.perf_counter() - start
    answers = [output.outputs[0].token_ids for output in outputs]
    for output, answer, length in zip(outputs, answers, workload.output_lens, strict=True):
        if len(answer) != length:
            problem = output.outputs[0].error or f"{len(answer)} tokens instead of {length}"
            raise GenerationError(f"a measurement failed: request {output.request_id} ended with {problem}")
    return took, answers


def prompt_steps(target: Target, workload: Workload) -> int:
    """How many steps the prompts take, a little rather too many: until then not all streams run."""
    budget = target.config.max_num_batched_tokens
    assert budget is not None
    # Streams that decode already take a token each of every step's budget.
    return -(-workload.num_prompt_tokens // max(1, budget - len(workload.prompts)))
