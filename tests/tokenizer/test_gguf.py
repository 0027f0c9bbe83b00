import pytest

from kvant.errors import CheckpointError, UnsupportedError
from kvant.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.conftest import byte_level, gguf_metadata, spm_like


@pytest.fixture(scope="module")
def metadata():
    return gguf_metadata(byte_level("smollm"), "smollm")


def test_R06_an_unknown_pre_tokeniser_is_refused_by_name(metadata):
    with pytest.raises(UnsupportedError, match=r"'from-the-future'.*smollm"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "from-the-future"})


def test_R06_a_missing_pre_tokeniser_is_refused(metadata):
    without = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.pre"}
    with pytest.raises(UnsupportedError, match=r"tokenizer\.ggml\.pre"):
        Tokenizer.from_gguf(without)


@pytest.mark.parametrize("model", ["bert", "t5", None])
def test_an_unknown_model_is_refused_by_name(metadata, model):
    with pytest.raises(UnsupportedError, match=repr(model)):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.model": model})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", []),
        ("tokens", "text"),
        ("token_type", [1, 2]),
        ("merges", ["x y", "never seen"]),
        ("bos_token_id", 10**6),
        ("eos_token_id", -1),
        ("eos_token_id", "2"),
    ],
)
def test_malformed_metadata_is_a_checkpoint_error(metadata, key, value):
    with pytest.raises(CheckpointError):
        Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{key}": value})


def test_malformed_scores_and_bytes_are_checkpoint_errors():
    metadata = spm_like()[1]
    with pytest.raises(CheckpointError, match="scores"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.scores": [0.0]})
    kinds = list(metadata["tokenizer.ggml.token_type"])
    kinds[-1] = 6
    with pytest.raises(CheckpointError, match="<0xNN>"):
        Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": kinds})


def test_begin_and_end_are_control_tokens_whatever_the_file_says(metadata):
    size = len(metadata["tokenizer.ggml.tokens"])
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.token_type": [1] * size})
    assert {tokenizer.bos_id, *tokenizer.eos_ids} <= tokenizer.special_ids
    assert tokenizer.encode("<|im_end|>") == [metadata["tokenizer.ggml.eos_token_id"]]


def test_the_template_for_tools_is_taken_with_tools(metadata):
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template.tool_use": "{{ tools[0].name }}!"})
    message = [{"role": "user", "content": "Hi"}]
    assert tokenizer.decode(tokenizer.encode_chat(message, tools=[{"name": "clock"}])) == "clock!"
    assert "Hi" in tokenizer.decode(tokenizer.encode_chat(message))


def test_R18_padding_at_the_vocabularys_end_is_never_drawn(metadata):
    tokens, kinds = list(metadata["tokenizer.ggml.tokens"]), list(metadata["tokenizer.ggml.token_type"])
    padded = Tokenizer.from_gguf(
        metadata | {"tokenizer.ggml.tokens": [*tokens, "[PAD1]", "[PAD2]"], "tokenizer.ggml.token_type": [*kinds, 5, 5]}
    )
    assert (padded.num_drawable, padded.vocab_size) == (len(tokens), len(tokens) + 2)
    assert Tokenizer.from_gguf(metadata).num_drawable == len(tokens)
