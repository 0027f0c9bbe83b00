"""Throughput: a workload offered all at once, timed from the first prompt to the last token.

The same workload with answers of a sixteenth of their lengths runs before, untimed: it meets the same batch sizes, so that
what is compiled or captured once is there.
"""

from kvant.bench.report import Row, rate, timed
from kvant.bench.running import seconds
from kvant.bench.target import Say, Target
from kvant.bench.workload import Workload
from kvant.planning.work import floor_seconds

WARM_UP_SHARE = 16


def throughput(target: Target, workload: Workload, num_iters: int, say: Say) -> list[Row]:
    """Seconds and tokens per second; the best of `num_iters`."""
    say("warming up")
    seconds(target, workload.shortened(WARM_UP_SHARE))
    times = []
    for number in range(num_iters):
        say(f"{workload.name}: round {number + 1} of {num_iters}")
        times.append(seconds(target, workload))
    floor = floor_seconds(target.network, workload.jobs, target.config.max_num_seqs, target.ceilings)
    total = workload.num_prompt_tokens + workload.num_output_tokens
    counts = f"{workload.num_prompt_tokens:,} prompt and {workload.num_output_tokens:,} output tokens"
    return [
        timed(f"throughput, {workload.name}", times, floor, "s", counts),
        rate(f"throughput, {workload.name}", workload.num_output_tokens, times, floor, "tok/s", "output tokens"),
        rate(f"throughput, {workload.name}", total, times, floor, "tok/s", "prompt and output tokens"),
    ]
