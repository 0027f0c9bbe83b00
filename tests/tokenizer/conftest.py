"""Small vocabularies, trained here on a nasty text, and the two real ones where the store has them."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kvant.checkpoint.gguf import read_gguf
from kvant.checkpoint.store import find_model
from kvant.tokenizer.tokenizer import Tokenizer as KvantTokenizer

# What tokenizers get wrong: digits, contractions, CJK, white space, emoji with joiners, diacritics composed and not, code.
# fmt: off
NASTY = [
    "Hello world", " leading", "trailing ", "", " ", "   ", "a  b   c    d", "\n", "\n\n\n a\n \n\tb\t\tc\r\n",
    "\u00a0nbsp\u3000x",
    "12345 3.14159 1,000,000 ٣٤٥ ½ ²", "I'm you're HE'S we'Ll it'd they've don't 'tis O'Neill",
    "我爱北京天安门。今天天气不错！", "日本語のテスト　です",
    "한국어 시험", "Příliš žluťoučký kůň úpěl ďábelské ódy", "e\u0301 n\u0303 Z\u0336\u0324a\u0353lgo", "caf\u00e9 cafe\u0301",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 😀😀", "a\u200db\u200c\u200bc\ufeff", "def f(x):\n    if x > 0:\n\t\treturn x**2  # ok\n",
    "x=[1,2];y={'a':\"b\"}",
    "https://example.org/?q=a%20b&c=d#e", "العربية עברית हिन्दी ไทย", "\x00\x01\x7f",
    "$$$ €5 £3 <html><b>x</b></html> >> </p>", "AAAAAaaaaAAAA",
    "snake_case CamelCase kebab-case", "…—–“quoted”‘x’", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 🂡 𐍈", "a" * 300, "=" * 70, " \n \n ", "!?!?...",
]
# fmt: on

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTRACTIONS_RE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3_RE = (
    CONTRACTIONS_RE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # as published in Llama 3's tokenizer.json
QWEN2_RE = (
    CONTRACTIONS_RE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # as published in Qwen2's

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def public_pre_tokenizer(name: str):
    """(normalizer, pre-tokenizer) as the models' own tokenizer.json have them, from the library's ready parts."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return None, gpt2
    if name == "smollm":
        return None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    pattern = {"llama-bpe": LLAMA3_RE, "qwen2": QWEN2_RE}[name]
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])
    return (normalizers.NFC() if name == "qwen2" else None), split


def byte_level(name: str, vocab=None, merges=None) -> Tokenizer:
    """A byte-level BPE as a tokenizer.json would describe it; trained on NASTY unless a vocabulary is given."""
    backend = Tokenizer(models.BPE(vocab, merges) if vocab else models.BPE())
    normalizer, backend.pre_tokenizer = public_pre_tokenizer(name)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.decoder = decoders.ByteLevel()
    if vocab is None:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        backend.train_from_iterator(
            NASTY * 2,
            trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
        )
    return backend


def gguf_metadata(backend: Tokenizer, pre: str, **more) -> dict:
    """The same vocabulary as a GGUF file's metadata."""
    model = json.loads(backend.to_str())["model"]
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1 if t not in added else 3 if added[t].special else 4 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.unknown_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
        **more,
    }


def save(backend: Tokenizer, folder: Path, **config) -> Path:
    """A folder in Hugging Face layout."""
    backend.save(str(folder / "tokenizer.json"))
    values = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config))
    return folder


def spm_like() -> tuple[Tokenizer, dict]:
    """A SentencePiece vocabulary twice: for the library, with merges; as GGUF metadata, with scores and bytes."""
    control, whole = ["<pad>", "<eos>", "<bos>", "<unk>"], ["\n", "\n\n", "  ", "   ", "<b>"]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        [text.replace("\n", "") for text in NASTY[:26]] * 2,
        trainers.BpeTrainer(vocab_size=620, limit_alphabet=200, show_progress=False),
    )
    learnt = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = [token for token in learnt if len(token) == 1]
    words = [token for token in learnt if len(token) > 1 and "▁▁" not in token and token not in whole]
    tokens = [*control, *whole, *bytes_, *letters, *words]
    scores = [0.0] * (len(tokens) - len(words)) + [float(-rank) for rank in range(len(words))]
    kinds = [3, 3, 3, 2] + [4] * len(whole) + [6] * 256 + [1] * (len(letters) + len(words))
    merged = {*letters, *words}
    splits = ((word[:at], word[at:]) for word in words for at in range(1, len(word)))
    pairs = [(left, right) for left, right in splits if left in merged and right in merged]
    backend = Tokenizer(models.BPE({t: n for n, t in enumerate(tokens)}, pairs, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(t, normalized=False) for t in whole])
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return backend, metadata


def real_metadata(alias: str) -> dict:
    path = find_model(alias)
    if path is None:
        pytest.fail(f"{alias} is not in the model store; run `kvant pull {alias}` or leave tests marked `model` out")
    return read_gguf(path).metadata


@pytest.fixture(scope="session")
def small() -> KvantTokenizer:
    """A byte-level tokenizer with ChatML's control tokens and template."""
    return KvantTokenizer.from_gguf(gguf_metadata(byte_level("smollm"), "smollm"))


@pytest.fixture(scope="session")
def spm() -> KvantTokenizer:
    """A SentencePiece tokenizer with byte fallback and a BOS."""
    return KvantTokenizer.from_gguf(spm_like()[1])


@pytest.fixture(scope="session")
def smollm2() -> KvantTokenizer:
    return KvantTokenizer.from_gguf(real_metadata("smollm2-135m"))


@pytest.fixture(scope="session")
def gemma3() -> KvantTokenizer:
    return KvantTokenizer.from_gguf(real_metadata("gemma3-270m"))
