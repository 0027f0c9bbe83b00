"""How byte-level BPE cuts text before merging: one entry per name that a GGUF file gives in `tokenizer.ggml.pre`.

The patterns are applied one after the other, each to the pieces the one before left; what a pattern does not match is a
piece too. A wrong pattern gives plausible text with wrong ids, so an unknown name is an error and never a default.

Proof of each entry: the ids of llama.cpp's test vocabularies (`tests/tokenizer/test_llama_cpp.py`), or, where there is no
vocabulary, llama.cpp's pieces on the same text and more (`tests/data/pieces.json`). Where llama.cpp simplifies what a model's
tokenizer.json says (tekken and gpt-4o: letters by case, without combining marks), the tokenizer.json counts here.
"""

from typing import NamedTuple

from kvant.errors import UnsupportedError


class PreTokenizer(NamedTuple):
    patterns: tuple[str, ...]
    nfc: bool = False  # Unicode composition before anything else
    ignore_merges: bool = False  # a piece that is a token is taken whole, even if no merges lead to it
    add_bos: bool = False  # where the file does not say


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = f"{CONTRACTIONS}|{TAIL % '1,3'}"
QWEN2_WORDS = f"{CONTRACTIONS}|{TAIL % '1'}"
QWEN35_WORDS = f"{CONTRACTIONS}|{TAIL % '1'}".replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")


# Letters by case, then their contraction: o200k, and Mistral's tekken without contractions.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*%s"
CASED_TAIL = r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN_WORDS = CASED_WORDS % ("", "") + CASED_TAIL % ""
GPT4O_WORDS = CASED_WORDS % ((f"{CONTRACTIONS}?",) * 2) + CASED_TAIL % "{1,3}"

# DeepSeek LLM: the letters of scripts with case, as of one Unicode version. Escaped is what an editor would compose.
DEEPSEEK_LETTERS = (
    r"[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}"
    r"ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼ"
    r"ℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]"
)
DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿]+"
DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2_WORDS,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2_WORDS)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": PreTokenizer((LLAMA3_WORDS,), ignore_merges=True, add_bos=True),
    "dbrx": PreTokenizer((LLAMA3_WORDS,)),
    "qwen2": PreTokenizer((QWEN2_WORDS,), nfc=True),
    "qwen35": PreTokenizer((QWEN35_WORDS,)),
    "stablelm2": PreTokenizer((QWEN2_WORDS,)),
    "tekken": PreTokenizer((TEKKEN_WORDS,), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((GPT4O_WORDS,)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?{DEEPSEEK_LETTERS}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", DEEPSEEK_CJK, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3_WORDS)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]")),
}
# Other names of the same thing.
ALIASES = {
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "pixtral", "lfm2"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "gpt-2": ("mpt", "olmo", "phi-2"),
    "qwen2": ("deepseek-r1-qwen", "megrez"),
    "dbrx": ("smaug-bpe",),
    "gpt-4o": ("llama4",),
}
PRE_TOKENIZERS |= {alias: PRE_TOKENIZERS[name] for name, aliases in ALIASES.items() for alias in aliases}


def pre_tokenizer(name: object) -> PreTokenizer:
    """The entry for a file's `tokenizer.ggml.pre`; raises UnsupportedError for an unknown or missing name."""
    known = ", ".join(sorted(PRE_TOKENIZERS))
    if name is None:
        raise UnsupportedError(
            f"the file does not name its pre-tokeniser (tokenizer.ggml.pre), so its token ids would be a guess; convert the "
            f"model again with a current converter. Supported: {known} (see docs/models.md)"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"pre-tokeniser {str(name)[:40]!r} (tokenizer.ggml.pre) is not built here; supported: {known} (see docs/models.md)"
        )
    return PRE_TOKENIZERS[name]
