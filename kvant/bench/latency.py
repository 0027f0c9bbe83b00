"""Latency: how long a prompt takes, and how long each token after it.

    best time of `long` tokens - best time of `short` tokens
    --------------------------------------------------------      what prompts, start and end cost is in both, and cancels
                         long - short

Each of the two at its best: the best of many differences would be the one whose shorter run was disturbed.
"""

from kvant.bench.report import Row, rate, timed
from kvant.bench.running import prompt_steps, seconds
from kvant.bench.target import Say, Target
from kvant.bench.workload import Workload
from kvant.errors import ConfigError
from kvant.planning.work import Row as Part

SHORT_SHARE = 9  # 288 and 32 tokens, 128 and 14


def latency(target: Target, workload: Workload, num_iters: int, say: Say) -> list[Row]:
    """Prompts and steps of a uniform workload, all of whose sequences run at the same time; the best of `num_iters`."""
    prompts, long = [len(prompt) for prompt in workload.prompts], max(workload.output_lens)
    # All streams must run before the shorter answers end, or the difference would not be of whole steps.
    short = max(1, long // SHORT_SHARE, prompt_steps(target, workload))
    if short >= long:
        raise ConfigError(
            f"latency is a difference of two lengths, and computing the prompts takes {short} steps; "
            f"--output-len must be at least {short + 1}"
        )
    running = len(prompts)
    if running > target.config.max_num_seqs:
        raise ConfigError(f"{running} streams do not run at once with a max_num_seqs of {target.config.max_num_seqs}")
    first, brief, whole = (workload.with_output_len(length) for length in (1, short, long))
    say("warming up")
    seconds(target, brief)
    to_first, shorts, longs = [], [], []
    for number in range(num_iters):
        say(f"round {number + 1} of {num_iters}")
        to_first.append(seconds(target, first))
        shorts.append(seconds(target, brief))
        longs.append(seconds(target, whole))
    per_step = [(took - min(shorts)) / (long - short) for took in longs]
    prompt_floor = target.network.seconds([Part(0, length) for length in prompts], running, target.ceilings)
    floors = [
        target.network.seconds([Part(length + drawn - 1, 1) for length in prompts], running, target.ceilings)
        for drawn in range(short, long)
    ]
    step_floor = sum(floors) / len(floors)
    name = f"{running} x {prompts[0]} tokens"
    streams = "1 stream" if running == 1 else f"{running} streams"
    return [
        timed(f"prompts, {name}", to_first, prompt_floor, "ms", "to the first token"),
        rate(f"prompts, {name}", sum(prompts), to_first, prompt_floor, "tok/s"),
        timed(f"decode, {streams}", per_step, step_floor, "ms", f"per step, tokens {short + 1} to {long}"),
        rate(f"decode, {streams}", running, per_step, step_floor, "tok/s"),
    ]
