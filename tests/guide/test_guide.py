"""The guide runs: its listings stand in its files, and every chapter's engine writes what Kvant writes in float32."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvant import LLM, SamplingParams
from kvant.checkpoint.open import open_checkpoint
from kvant.checkpoint.store import resolve_model
from kvant.tokenizer.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guide"
CODE = GUIDE / "code"
TINY = f"dummy:{CODE / 'tiny.json'}"
REAL = "smollm2-135m"
CHAPTERS = (1, 2, 3, 4, 5)
LISTING = re.compile(r"^```python *(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TEXTS = ["The capital of France is", "Water boils at", "def fibonacci(n):", "Once upon a time, in a small village by the sea,"]

sys.path.insert(0, str(CODE))  # chapters import each other as the scripts they are


def chapter(number: int):
    return importlib.import_module(f"chapter{number}")


def kvant_answers(model: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    llm = LLM(model, dtype="float32", device="cpu", max_model_len=256)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def tiny():
    """The tiny network, prompts that share beginnings, and what Kvant answers to them."""
    model, tokenizer = chapter(1).load(TINY)
    prompts = [tokenizer.encode(text) for text in [*TEXTS, TEXTS[3] + " there lived", TEXTS[0]]]
    return model, prompts, kvant_answers(TINY, prompts, 40)


# --- listings ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", CHAPTERS)
def test_listings_stand_in_the_files(number: int):
    listings = LISTING.findall((GUIDE / f"chapter{number}.md").read_text())
    assert len(listings) >= 3
    for path, listing in listings:
        file = ROOT / path if path else CODE / f"chapter{number}.py"
        assert f"\n{listing}" in f"\n{file.read_text()}", f"{file.name} does not contain:\n{listing}"


def test_the_first_engine_is_small():
    assert len((CODE / "chapter1.py").read_text().splitlines()) <= 225


# --- engines ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", CHAPTERS)
def test_engines_agree_with_kvant(number: int, tiny):
    model, prompts, expected = tiny
    assert len({tuple(answer) for answer in expected}) == len(TEXTS) + 1, "different prompts must have different answers"
    assert chapter(number).Engine(model).generate(prompts, 40) == expected


@pytest.mark.parametrize("number", (1, 3, 4, 5))
def test_chapters_run_on_random_weights(number: int):
    run = subprocess.run([sys.executable, CODE / f"chapter{number}.py", TINY, "Hello"], capture_output=True, check=True)
    assert run.stdout.startswith(b"Hello")


@pytest.mark.parametrize("num_blocks", (7, 9, 200))
@pytest.mark.parametrize("step_tokens", (1, 5, 7, 1000))
def test_chunks_and_preemption_change_no_token(num_blocks: int, step_tokens: int, tiny):
    model, prompts, expected = tiny
    limits = chapter(5).Limits(num_seqs=4, step_tokens=step_tokens)
    engine = chapter(5).Engine(model, num_blocks=num_blocks, limits=limits)
    assert engine.generate(prompts, 40) == expected
    assert num_blocks > 9 or step_tokens == 1 or engine.num_preemptions > 0
    assert len(engine.pool.free) == num_blocks, "a block was lost"


def test_a_cached_prefix_changes_no_token_and_is_used(tiny):
    model, prompts, expected = tiny
    engine = chapter(4).Engine(model)
    engine.generate(prompts[3:4], 40)
    later = engine.add(prompts[4], 40)
    assert [row.start for row in engine.schedule()] == [len(prompts[3]) // 16 * 16]
    while not later.finished:
        engine.step()
    assert later.answer == expected[4]


@pytest.mark.parametrize("number", (4, 5))
def test_a_fork_copies_the_block_it_writes(number: int, tiny):
    model, prompts, expected = tiny
    engine = chapter(number).Engine(model)
    parent = engine.add(prompts[3], 40)
    engine.step()
    child = engine.fork(parent, 65)
    assert child.table == parent.table
    while engine.has_work():
        engine.step()
    (alone,) = chapter(1).Engine(model).generate([[*prompts[3], 65]], 39)
    assert parent.answer == expected[3]
    assert child.answer == [65, *alone]


def test_an_end_token_ends(tiny):
    model, prompts, expected = tiny
    end = expected[0][5]
    wanted = expected[0][: expected[0].index(end) + 1]
    for number in CHAPTERS:
        assert chapter(number).Engine(model, frozenset({end})).generate(prompts[:1], 40) == [wanted]


# --- the real model ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real():
    model, tokenizer = chapter(1).load(REAL)
    prompts = [tokenizer.encode(text) for text in TEXTS[:3]]
    return model, prompts, kvant_answers(REAL, prompts, 12)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)  # fp32 on one thread: a minute when the machine is idle, many when it is not
@pytest.mark.parametrize("number", CHAPTERS)
def test_engines_agree_with_kvant_on_a_real_model(number: int, real):
    model, prompts, expected = real
    assert chapter(number).Engine(model).generate(prompts, 12) == expected


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("number", CHAPTERS)
def test_chapters_run(number: int):
    run = subprocess.run([sys.executable, CODE / f"chapter{number}.py"], capture_output=True, text=True, check=True)
    assert "Paris" in run.stdout


@pytest.mark.slow
@pytest.mark.model
def test_tokens_agree_with_kvant():
    source = open_checkpoint(resolve_model(REAL)).tokenizer_source
    ours, kvant = chapter(2).Tokenizer(source.metadata), Tokenizer.from_source(source)
    text = (
        Path(__file__).read_text()
        + "Größe ½ x² Ⅻ 12345 你好，世界 😀 👩‍👩‍👧 नमस्ते\t\t\n\n it's  don't <|im_end|> _a__b  e\u0301 \xa0 x\u3000y"
    )
    ids = ours.encode(text)
    assert ids == kvant.encode(text)
    chat = [{"role": "user", "content": "Hi <|im_end|>\n<|im_start|>system"}, {"role": "assistant", "content": "x"}]
    assert ours.encode_chat(chat) == kvant.encode_chat(chat)
    stream = chapter(2).TextStream(ours)
    assert "".join(stream.add([token]) for token in ids) + stream.finish() == kvant.decode(ids)


@pytest.mark.slow
@pytest.mark.model
def test_sentencepiece_agrees_with_kvant():
    source = open_checkpoint(resolve_model("gemma3-270m")).tokenizer_source
    metadata, kvant = source.metadata, Tokenizer.from_source(source)
    ours = chapter(2).SentencePiece(list(metadata["tokenizer.ggml.tokens"]), metadata["tokenizer.ggml.scores"])
    for text in ("Hello world, this is a test.", "Grüße 你好 😀 12345", "an unbelievably long word: Donaudampfschiff"):
        assert ours.encode(text) == kvant.encode(text, add_bos=False)
