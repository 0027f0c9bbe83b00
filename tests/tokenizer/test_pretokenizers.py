"""Every pre-tokeniser cuts as llama.cpp does, and the ids are those of the pieces."""

import json
import re
import unicodedata

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from kvant.checkpoint.gguf import read_gguf
from kvant.errors import UnsupportedError
from kvant.tokenizer.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from kvant.tokenizer.tokenizer import Tokenizer as KvantTokenizer
from tests.tokenizer import llama_cpp
from tests.tokenizer.conftest import byte_level, gguf_metadata

FACTS = json.loads(llama_cpp.PIECES.read_text())


def cut(name: str, text: str) -> list[str]:
    """The pieces of `text`, by our patterns."""
    pre = PRE_TOKENIZERS[name]
    splits = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns])
    return [piece for piece, _ in splits.pre_tokenize_str(text)]


def pieces(text: str, lengths: list[int]) -> list[str]:
    ends = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    return [text[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def simplified(name: str, text: str) -> bool:
    """Whether llama.cpp's cut of `text` is known to be simpler than the model's own tokenizer.json.

    tekken, gpt-4o: marks are no letters, and letters beyond ASCII have both cases. deepseek: spaces beyond ASCII become
    one below it.
    """
    if name in ("tekken", "gpt-4o", "llama4"):
        kinds = {unicodedata.category(character) for character in text if not character.isascii()}
        return bool(kinds & {"Lu", "Ll", "Lt", "Mn", "Mc", "Me"})
    return name.startswith("deepseek") and any(c.isspace() and not c.isascii() for c in text)


def test_every_name_has_facts():
    assert sorted(FACTS["lengths"]) == sorted(PRE_TOKENIZERS)
    assert FACTS["texts"] == llama_cpp.TEXTS


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_R06_pieces_are_llama_cpps(name):
    compared = 0
    for text, lengths in zip(FACTS["texts"], FACTS["lengths"][name], strict=True):
        if not simplified(name, text):
            assert cut(name, text) == pieces(text, lengths), text
            compared += 1
    assert compared >= 25


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tekken", "caf\u0065\u0301 naïveTÉ HTTPServer", ["cafe\u0301", " naïve", "TÉ", " HTTPServer"]),
        ("gpt-4o", "ÉCOLEs d'été it's 12345", ["ÉCOLEs", " d", "'été", " it's", " ", "123", "45"]),
        ("deepseek-llm", "\u3000x", ["\u3000", "x"]),
    ],
)
def test_where_llama_cpp_simplifies_the_models_own_pattern_counts(name, text, expected):
    assert cut(name, text) == expected


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_R06_ids_are_those_of_the_pieces(name):
    """A tiny BPE: encoding a text is encoding its pieces one by one, with nothing that could cut them again."""
    trained = byte_level("gpt-2")
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    plain = Tokenizer(models.BPE(model["vocab"], merges, ignore_merges=PRE_TOKENIZERS[name].ignore_merges))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ours = KvantTokenizer.from_gguf(gguf_metadata(trained, name))
    for text in FACTS["texts"]:
        normal = normalizers.NFC().normalize_str(text) if PRE_TOKENIZERS[name].nfc else text
        expected = [number for piece in cut(name, normal) for number in plain.encode(piece).ids]
        assert ours.encode(text, add_bos=False) == expected, text


def test_R06_an_unknown_name_is_refused_with_the_list_and_the_page():
    with pytest.raises(UnsupportedError, match=r"'kimi-k2'.*deepseek-v3.*tekken.*docs/models\.md"):
        pre_tokenizer("kimi-k2")
    with pytest.raises(UnsupportedError, match=r"\['x'\]"):
        pre_tokenizer(["x"])  # a file may hold anything


# --- llama.cpp's own vocabularies ---------------------------------------------------------------------------------------

VOCABULARIES = ("llama-bpe", "llama-spm", "qwen2", "qwen35", "gpt-2", "mpt", "starcoder", "refact", "deepseek-llm",
                "deepseek-coder", "phi-3", "command-r", "falcon", "gemma-4")  # fmt: skip
REFUSED = {"bert-bge": "'bert'", "nomic-bert-moe": "'t5'", "gpt-neox": "does not name", "aquila": "does not name"}


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_R06_ids_of_llama_cpps_vocabularies(name):
    """Every text of llama.cpp's own tests has llama.cpp's ids."""
    path = llama_cpp.fetch() / "models" / f"ggml-vocab-{name}.gguf"
    tokenizer = KvantTokenizer.from_gguf(read_gguf(path).metadata)
    for text, ids in llama_cpp.pairs(path):
        assert tokenizer.encode(text, add_bos=False) == ids, text


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_R06_vocabularies_that_cannot_be_right_are_refused(name):
    path = llama_cpp.fetch() / "models" / f"ggml-vocab-{name}.gguf"
    with pytest.raises(UnsupportedError, match=re.escape(REFUSED[name])):
        KvantTokenizer.from_gguf(read_gguf(path).metadata)


@pytest.mark.slow
@pytest.mark.parametrize("name", VOCABULARIES)
def test_text_comes_back_from_llama_cpps_vocabularies(name):
    path = llama_cpp.fetch() / "models" / f"ggml-vocab-{name}.gguf"
    tokenizer = KvantTokenizer.from_gguf(read_gguf(path).metadata)
    for text in llama_cpp.TEXTS:
        normal = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        if "▁" not in text or name not in ("llama-spm", "phi-3", "gemma-4"):  # for them "▁" is how a space is spelled
            assert tokenizer.decode(tokenizer.encode(text, add_bos=False), skip_special_tokens=False) == normal
