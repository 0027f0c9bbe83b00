import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvant.errors import CheckpointError, ModelNotFoundError, UnsupportedError
from kvant.tokenizer.tokenizer import Tokenizer as KvantTokenizer
from tests.tokenizer.conftest import NASTY, byte_level, save


def metaspace(scheme: str) -> Tokenizer:
    """Llama 2's tokenizer.json since 2024."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)
    backend.train_from_iterator(NASTY, trainer)
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    backend = Tokenizer.from_str(json.dumps(state))
    strip = [decoders.Strip(" ", 1, 0)] if scheme != "never" else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_spaces_before_words_as_the_library_puts_them(scheme, tmp_path):
    public = metaspace(scheme)
    ours = KvantTokenizer.from_directory(save(public, tmp_path, bos_token="<s>", eos_token="</s>", unk_token="<unk>"))
    for text in [*NASTY, "<s>Hello", "a</s>b</s> c", "</s></s>x"]:
        ids = public.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == public.decode(ids), text


def test_added_tokens_that_swallow_white_space_and_need_word_borders(tmp_path):
    public = byte_level("gpt-2")
    public.add_special_tokens(
        [AddedToken("<|user|>", rstrip=True, special=True), AddedToken("<|l|>", lstrip=True, special=True)]
    )
    public.add_tokens([AddedToken("word", single_word=True, normalized=False), AddedToken("<tool>", normalized=False)])
    ours = KvantTokenizer.from_directory(save(public, tmp_path))
    for text in ["<|user|>  \n hi", "a \n<|l|> b", "word sword words word", "x<tool> y", "a  <|l|><|user|>  b", "<|l|", "word"]:
        assert ours.encode(text) == public.encode(text).ids, text


def test_bos_is_what_the_post_processor_does_or_the_config_says(tmp_path):
    public = byte_level("gpt-2")
    assert not KvantTokenizer.from_directory(save(public, tmp_path)).add_bos
    assert KvantTokenizer.from_directory(save(public, tmp_path, add_bos_token=True)).add_bos
    public.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", public.token_to_id("<|im_start|>"))]
    )
    ours = KvantTokenizer.from_directory(save(public, tmp_path))
    assert ours.add_bos and ours.encode("a") == public.encode("a").ids
    assert not KvantTokenizer.from_directory(save(public, tmp_path, add_bos_token=False)).add_bos


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    public = byte_level("gpt-2")
    public.enable_truncation(4)
    public.enable_padding(length=64)
    ours = KvantTokenizer.from_directory(save(public, tmp_path))
    assert ours.decode(ours.encode("one two three four five six")) == "one two three four five six"


def test_templates_from_config_list_and_file(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    ours = KvantTokenizer.from_directory(save(byte_level("gpt-2"), tmp_path, chat_template=named))
    message = [{"role": "user", "content": "Hi"}]
    assert ours.decode(ours.encode_chat(message)) == "d"
    assert ours.decode(ours.encode_chat(message, tools=[{"name": "x"}])) == "t"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    ours = KvantTokenizer.from_directory(tmp_path)
    assert ours.decode(ours.encode_chat(message)) == "from the file"


def test_what_is_missing_broken_or_unknown_is_named(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"tokenizer\.json"):
        KvantTokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        KvantTokenizer.from_directory(tmp_path)
    public = byte_level("gpt-2")
    with pytest.raises(CheckpointError, match="eos_token"):
        KvantTokenizer.from_directory(save(public, tmp_path, eos_token="<nowhere>"))
    public.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="WordPiece"):
        KvantTokenizer.from_directory(save(public, tmp_path))
    save(byte_level("gpt-2"), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("not json")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        KvantTokenizer.from_directory(tmp_path)
