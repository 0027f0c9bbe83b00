"""What each chapter brought: every number of the guide comes from here.

    OPENBLAS_NUM_THREADS=1 python docs/guide/code/measure.py [CHAPTER ...]

What is compared runs in turns, and the ratio of each turn counts: a machine's speed moves, a ratio much less.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import chapter1
import chapter2
import chapter3
import chapter4
import chapter5

ROUNDS = 5
TEXT = "The history of computing is longer than the history of computers. " * 200


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare(what: str, slow: Callable[[], float], fast: Callable[[], float], rounds: int = ROUNDS) -> None:
    """Both return seconds. Prints how many times longer `slow` takes than `fast`."""
    times = [(slow(), fast()) for _ in range(rounds)]
    ratios = sorted(a / b for a, b in times)
    slow_ms, fast_ms = (median(column) * 1e3 for column in zip(*times, strict=True))
    print(
        f"{what}: {median(ratios):.1f}x ({ratios[0]:.1f} - {ratios[-1]:.1f});  {slow_ms:.1f} ms against {fast_ms:.1f} ms"
    )


def step_seconds(engine: chapter1.Engine, ids: list[int]) -> float:
    """One step for the token after `ids`, when those were computed where that is possible."""
    sequence = engine.add(ids[:-1], 3)
    if type(engine) is not chapter1.Engine:
        engine.step()
    taken = seconds(engine.step)
    engine.release(sequence)
    return taken


def measure1(model, ids) -> None:
    for length in (16, 64, 256):
        compare(
            f"step at length {length} against 16",
            lambda: step_seconds(chapter1.Engine(model), ids[:length]),
            lambda: step_seconds(chapter1.Engine(model), ids[:16]),
            3,
        )


def measure2(model, ids) -> None:
    _, tokenizer = chapter2.load("smollm2-135m")
    text = Path(__file__).read_text() + TEXT
    tokens = tokenizer.encode(text)
    print(f"{len(text)} characters, {len(tokens)} tokens, {len(text) / len(tokens):.1f} characters per token")

    def merged_again() -> None:
        for word in chapter2.words(text):
            tokenizer.bpe.merge(word)

    def remembered() -> None:
        tokenizer.bpe.known.clear()
        tokenizer.encode(text)

    compare("every word merged against once", lambda: seconds(merged_again), lambda: seconds(remembered))

    def decoded_anew(count: int) -> None:
        for stop in range(1, count + 1):
            b"".join(map(tokenizer.token_bytes, tokens[:stop])).decode("utf-8", "replace")

    def streamed(count: int) -> None:
        stream = chapter2.TextStream(tokenizer)
        for token in tokens[:count]:
            stream.add([token])

    for count in (100, 1000):
        compare(
            f"{count} tokens as text, decoded anew",
            lambda: seconds(lambda: decoded_anew(count)),
            lambda: seconds(lambda: streamed(count)),
        )


def measure3(model, ids) -> None:
    for length in (16, 64, 256):
        compare(
            f"step at length {length} without and with the cache",
            lambda: step_seconds(chapter1.Engine(model), ids[:length]),
            lambda: step_seconds(chapter3.Engine(model, max_len=512), ids[:length]),
            3,
        )
    token = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim * 4
    print(f"one token's keys and values: {token / 1024:.0f} KiB in fp32")


def measure4(model, ids) -> None:
    compare(
        "step at length 256, paged against in one piece",
        lambda: step_seconds(chapter4.Engine(model), ids[:256]),
        lambda: step_seconds(chapter3.Engine(model, max_len=512), ids[:256]),
    )
    lengths = [20 + 37 * number % 300 for number in range(16)]
    paged = sum(-(-length // 16) * 16 for length in lengths)
    print(
        f"16 answers of {min(lengths)} to {max(lengths)} tokens ({sum(lengths)} in all): room for {16 * 1024} tokens "
        f"reserved in one piece, {paged} in blocks, {16 * 1024 / paged:.1f}x; {1 - sum(lengths) / paged:.0%} unused"
    )

    engine = chapter4.Engine(model)

    def first_token(prompt: list[int]) -> float:
        sequence = engine.add(prompt, 2)
        taken = seconds(engine.step)
        engine.release(sequence)
        return taken

    salt = iter(range(1000, 2000))
    known = ids[:256]
    first_token(known)
    compare(
        "first token of 272, unknown against 256 of them cached",
        lambda: first_token([next(salt), *known, *ids[:15]]),
        lambda: first_token([*known, *ids[300:316]]),
    )


def together(engine: chapter1.Engine, prompts: list[list[int]], lengths: list[int]) -> float:
    sequences = [engine.add(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    return seconds(lambda: [engine.step() for _ in iter(lambda: all(s.finished for s in sequences), True)])


def in_groups(engine: chapter5.Engine, prompts: list[list[int]], lengths: list[int], size: int) -> float:
    groups = range(0, len(prompts), size)
    return sum(
        together(engine, prompts[first : first + size], lengths[first : first + size]) for first in groups
    )


class Counted(chapter5.Engine):
    num_steps = 0

    def step(self):
        self.num_steps += 1
        return super().step()


def longest_gap(model, ids, step_tokens: int) -> float:
    """Three answers are being written when a prompt of 400 tokens arrives: the longest wait for a step."""
    engine = chapter5.Engine(model, limits=chapter5.Limits(step_tokens=step_tokens))
    for number in range(3):
        engine.add(ids[number : number + 16], 100)
    for _ in range(3):
        engine.step()
    late = engine.add(ids[:400], 2)
    gaps = []
    while not late.answer:
        gaps.append(seconds(engine.step))
    return max(gaps)


def measure5(model, ids) -> None:
    prompts = [ids[number : number + 16] for number in range(8)]
    compare(
        "8 answers of 24 tokens, one after another against together",
        lambda: together(chapter4.Engine(model), prompts, [24] * 8),
        lambda: together(chapter5.Engine(model), prompts, [24] * 8),
        3,
    )
    lengths = [8, 8, 8, 48, 8, 8, 8, 48, 8, 8, 8, 48]
    prompts = [ids[number : number + 16] for number in range(12)]
    limits = chapter5.Limits(num_seqs=4)
    groups, always = (Counted(model, limits=limits) for _ in range(2))
    compare(
        "12 answers of 8 or 48 tokens, groups of 4 against 4 at any time",
        lambda: in_groups(groups, prompts, lengths, 4),
        lambda: together(always, prompts, lengths),
        3,
    )
    print(
        f"the same in steps: {groups.num_steps / always.num_steps:.1f}x; "
        f"{groups.num_steps // 3} against {always.num_steps // 3}"
    )
    for size in (128, 32):
        compare(
            f"longest gap, prompt of 400 in one step against chunks within {size}",
            lambda: longest_gap(model, ids, 1000),
            lambda: longest_gap(model, ids, size),
            3,
        )
    prompts = [ids[number : number + 40] for number in range(4)]
    engine, narrow = chapter5.Engine(model), chapter5.Engine(model, num_blocks=10)
    same = engine.generate(prompts, 20) == narrow.generate(prompts, 20)
    print(f"4 answers that need 16 blocks, in 10: {narrow.num_preemptions} preemption(s), same tokens: {same}")


def main(*chapters: str) -> None:
    model, tokenizer = chapter1.load("smollm2-135m")
    ids = tokenizer.encode(TEXT)
    for number in map(int, chapters or "12345"):
        print(f"chapter {number}")
        (measure1, measure2, measure3, measure4, measure5)[number - 1](model, ids)


if __name__ == "__main__":
    main(*sys.argv[1:])
