import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from kvant.errors import RequestError, TemplateError
from kvant.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.conftest import NASTY, byte_level, gguf_metadata, real_metadata, save, spm_like

DATA = Path(__file__).parent.parent / "data"
PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def reference(name: str) -> list[dict]:
    return json.loads((DATA / f"{name}.transformers.json").read_text())["items"]


# --- the same ids as the public tokenizers -------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_R06_same_ids_from_gguf_and_tokenizer_json(pre, tmp_path):
    public = byte_level(pre)
    ours = Tokenizer.from_gguf(gguf_metadata(public, pre))
    folder = Tokenizer.from_directory(save(public, tmp_path))
    for text in NASTY:
        expected = public.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, text
        assert folder.encode(text) == expected, text
    assert ours.vocab_size == folder.vocab_size == public.get_vocab_size()
    assert (ours.bos_id, ours.eos_ids, ours.unk_id, ours.add_bos) == (
        folder.bos_id,
        folder.eos_ids,
        folder.unk_id,
        folder.add_bos,
    )


def test_R06_same_ids_from_scores_and_from_merges(tmp_path):
    public, metadata = spm_like()
    ours = Tokenizer.from_gguf(metadata)
    folder = Tokenizer.from_directory(save(public, tmp_path, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"))
    for text in [*NASTY, *(a + b for a, b in zip(NASTY, NASTY[7:], strict=False))]:
        expected = public.encode(text).ids
        assert ours.encode(text) == expected, text
        assert folder.encode(text) == expected, text
    assert ours.add_bos and folder.add_bos


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_any_text_has_the_publics_ids_and_comes_back(small, spm, public_small, public_spm, text):
    assert small.encode(text) == public_small.encode(text, add_special_tokens=False).ids
    assert spm.encode(text) == public_spm.encode(text).ids
    assert small.decode(small.encode(text), skip_special_tokens=False) == text
    assert spm.decode(spm.encode(text, add_bos=False), skip_special_tokens=False) == text.replace("▁", " ")


@pytest.fixture(scope="session")
def public_small():
    return byte_level("smollm")


@pytest.fixture(scope="session")
def public_spm():
    return spm_like()[0]


def test_transformers_builds_the_same_tokenizer(tmp_path):
    from transformers import PreTrainedTokenizerFast

    folder = save(byte_level("smollm"), tmp_path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = Tokenizer.from_directory(folder)
    for text in [*NASTY, "a<|im_end|>b", "<|im_start|>user\nHi<|im_end|>"]:
        ids = theirs(text).input_ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_prompt_ids_and_texts_of_the_reference(name):
    tokenizer = Tokenizer.from_gguf(real_metadata(name))
    for item in reference(name):
        assert tokenizer.encode(item["text_in"]) == item["prompt_ids"]
        if item["kind"] == "chat":
            assert tokenizer.encode_chat([{"role": "user", "content": item["prompt"]}]) == item["prompt_ids"]
        assert tokenizer.decode(item["out_ids"], skip_special_tokens=False) == item["text"]


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_R06_ids_of_a_corpus(name):
    """Digits, contractions, CJK, white space, emoji, scripts, code: the ids that transformers gives."""
    tokenizer = Tokenizer.from_gguf(real_metadata(name))
    facts = json.loads((DATA / "corpus_ids.json").read_text())
    assert len(facts["texts"]) > 70
    for text, ids in zip(facts["texts"], facts[name], strict=True):
        assert tokenizer.encode(text, add_bos=False) == ids, text


@pytest.mark.model
def test_R06_smollm2_from_gguf_and_from_tokenizer_json(smollm2, tmp_path):
    metadata = real_metadata("smollm2-135m")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    public = byte_level("smollm", {token: number for number, token in enumerate(tokens)}, merges)
    public.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    folder = Tokenizer.from_directory(save(public, tmp_path))
    for text in [*NASTY, "<|im_start|>user\n<|im_end|>", Path(__file__).read_text()]:
        expected = public.encode(text, add_special_tokens=False).ids
        assert smollm2.encode(text) == expected, text
        assert folder.encode(text) == expected, text


@pytest.mark.model
def test_gemmas_vocabulary_on_the_nasty_text(gemma3):
    for text in NASTY:
        ids = gemma3.encode(text)
        assert ids[0] == gemma3.bos_id
        assert gemma3.decode(ids) == text
    assert gemma3.encode("a  b", add_bos=False) == [236746, 138, 236763]  # two spaces are a token of their own
    assert gemma3.encode("ꙮ", add_bos=False) == [gemma3.token_to_id(f"<0x{byte:02X}>") for byte in "ꙮ".encode()]


# --- roles ---------------------------------------------------------------------------------------------------------------


def test_R02_exactly_one_bos(spm):
    bos = spm.bos_id
    assert spm.encode("Hello")[:2].count(bos) == 1
    assert spm.encode("<bos>Hello") == spm.encode("Hello")
    assert spm.encode("Hello", add_bos=False) == spm.encode("Hello")[1:]
    assert spm.encode("<bos>Hello", parse_special=False).count(bos) == 1  # typed, not meant
    assert spm.encode("") == [bos]


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_R02_a_template_that_prints_bos_and_one_that_does_not(template):
    tokenizer = Tokenizer.from_gguf(spm_like()[1] | {"tokenizer.chat_template": template})
    for content in ("Hello", "<bos>Hello"):
        ids = tokenizer.encode_chat([{"role": "user", "content": content}])
        assert ids.count(tokenizer.bos_id) == 1
        assert ids == [tokenizer.bos_id, *tokenizer.encode(content, parse_special=False, add_bos=False)]


def test_R09_every_end_token_a_vocabulary_declares():
    metadata = gguf_metadata(byte_level("smollm"), "smollm")
    tokens = [*metadata["tokenizer.ggml.tokens"], "<turn>", "<message>", "<|eot_id|>", "</s>"]
    kinds = [*metadata["tokenizer.ggml.token_type"], 1, 1, 3, 1]
    last = len(tokens) - 1
    more = {"tokens": tokens, "token_type": kinds, "eot_token_id": last - 3, "eom_token_id": last - 2}
    tokenizer = Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()})
    named = {tokens.index(name) for name in ("<|im_end|>", "<|endoftext|>", "<turn>", "<message>", "<|eot_id|>")}
    assert tokenizer.eos_ids == named  # "</s>" is an ordinary token here
    assert named <= tokenizer.special_ids


def test_R12_an_empty_prompt_is_zero_tokens_without_bos(small):
    assert small.encode("") == []


def test_raw_prompts_parse_control_tokens_unless_told_not_to(small):
    text = "<|im_start|>user"
    assert small.encode(text)[0] == small.bos_id
    ids = small.encode(text, parse_special=False)
    assert not set(ids) & small.special_ids
    assert small.decode(ids) == text


def test_special_tokens_are_shown_only_when_asked_for(small):
    ids = small.encode("<|im_start|>user<|im_end|>")
    assert small.decode(ids) == "user"
    assert small.decode(ids, skip_special_tokens=False) == "<|im_start|>user<|im_end|>"
    assert small.token_bytes(small.bos_id) == b"<|im_start|>"
    assert small.shown_bytes(small.bos_id) == b""


def test_names_and_ids(small):
    assert small.id_to_token(small.token_to_id("<|im_end|>")) == "<|im_end|>"
    assert small.id_to_token(small.vocab_size) is None
    assert small.token_to_id("no such token") is None
    assert small.token_bytes(small.vocab_size + 5) == b""


def test_half_a_surrogate_is_a_request_error(small):
    with pytest.raises(RequestError, match="surrogate"):
        small.encode("a\ud800")


def test_a_model_without_template_says_so(spm):
    with pytest.raises(TemplateError, match="no chat template"):
        spm.encode_chat([{"role": "user", "content": "Hi"}])


def test_a_leading_space_spelled_by_the_vocabulary():
    """Llama 2: a space is put before the first word, and taken off again by decode, but not within a continued text."""
    metadata = spm_like()[1]
    del metadata["tokenizer.ggml.add_space_prefix"]
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("Hello world", add_bos=False)
    assert tokenizer.id_to_token(ids[0]).startswith("▁")
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.decode(ids, continues=True) == " Hello world"


def test_random_weights_get_bytes_for_tokens():
    class NoSource:
        kind, metadata, folder = "none", {}, None

    tokenizer = Tokenizer.from_source(NoSource())
    assert tokenizer.encode("aé") == list("aé".encode())
    assert tokenizer.decode(tokenizer.encode("žluťoučký kůň 👩‍👧")) == "žluťoučký kůň 👩‍👧"
    assert tokenizer.vocab_size == 256
    with pytest.raises(RequestError, match="BOS"):
        tokenizer.encode("a", add_bos=True)


def test_importing_and_encoding_loads_no_jinja():
    script = """
import sys
import time
import kvant.tokenizer.tokenizer, kvant.tokenizer.detokenizer, kvant.tokenizer.stops, kvant.tokenizer.chat_template
assert not {"jinja2", "tokenizers", "torch", "numpy", "transformers"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent.parent.parent)


@pytest.mark.model
def test_building_a_tokenizer_is_quick():
    """Some 0.05 s and 0.2 s on a quiet core; the bounds leave room for a busy machine."""
    for alias, seconds in (("smollm2-135m", 1.0), ("gemma3-270m", 2.0)):
        metadata = real_metadata(alias)
        started = time.perf_counter()
        Tokenizer.from_gguf(metadata)
        assert time.perf_counter() - started < seconds
