import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.tokenizer.detokenizer import Detokenizer
from kvant.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.conftest import NASTY, spm_like


def deltas(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.add([token]) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("which", ["small", "spm"])
def test_R01_joined_deltas_equal_one_decode_and_no_delta_is_broken(which, request):
    tokenizer = request.getfixturevalue(which)
    for text in NASTY:
        pieces = deltas(Detokenizer(tokenizer), tokenizer.encode(text))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("which", ["small", "spm"])
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_R01_any_ids_at_all(which, skip, request, data):
    """Also ids that are no text: halves of characters, lone bytes, control tokens, padding rows."""
    tokenizer = request.getfixturevalue(which)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(deltas(Detokenizer(tokenizer, skip), ids)) == whole
    assert Detokenizer(tokenizer, skip).add(ids) == whole.rstrip("\ufffd") or "\ufffd" in whole


@pytest.mark.parametrize("continues", [True, False])
def test_R01_a_leading_space_that_decode_takes_off(continues):
    metadata = spm_like()[1]
    del metadata["tokenizer.ggml.add_space_prefix"]
    tokenizer = Tokenizer.from_gguf(metadata)
    for text in NASTY:
        ids = tokenizer.encode(text)
        pieces = deltas(Detokenizer(tokenizer, continues=continues), ids)
        assert "".join(pieces) == tokenizer.decode(ids, continues=continues)


def test_characters_leave_as_soon_as_they_are_complete(spm):
    ids = [spm.token_to_id(f"<0x{byte:02X}>") for byte in "a😀b".encode()]
    assert deltas(Detokenizer(spm), ids) == ["a", "", "", "", "😀", "b", ""]


def test_an_incomplete_end_is_shown_once(spm):
    half = [spm.token_to_id("<0xF0>"), spm.token_to_id("<0x9F>")]
    detokenizer = Detokenizer(spm)
    assert detokenizer.add(half) == ""
    assert detokenizer.finish() == "\ufffd" == spm.decode(half)


def test_forks_go_on_by_themselves(spm):
    first = Detokenizer(spm)
    ids = [spm.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode()]
    first.add(ids[:1])
    second = first.fork()
    assert first.add(ids[1:]) == "é"
    assert second.add(spm.encode("x", add_bos=False)) == "\ufffdx"


@pytest.mark.model
@pytest.mark.parametrize("which", ["smollm2", "gemma3"])
def test_R01_real_vocabularies(which, request):
    tokenizer = request.getfixturevalue(which)
    generator = random.Random(5)
    for _ in range(300):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(30)]
        for skip in (True, False):
            pieces = deltas(Detokenizer(tokenizer, skip), ids)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)
    for text in NASTY:
        assert "\ufffd" not in "".join(deltas(Detokenizer(tokenizer), tokenizer.encode(text)))
