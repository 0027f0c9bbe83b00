"""How byte-level BPE cuts text before merging: one entry per name that a GGUF file gives in `tokenizer.ggml.pre`.

The patterns are applied one after the other, each to the pieces the one before left; what a pattern does not match is a
piece too. A wrong pattern gives plausible text with wrong ids, so an unknown name is an error and never a default. The
ids were compared with those of llama.cpp's test vocabularies (gpt-2, mpt, starcoder, refact, command-r, llama-bpe, qwen2,
qwen35, deepseek-coder, falcon): digits, contractions, white space, CJK, emoji, combining marks.
"""

from typing import NamedTuple

from kvant.errors import UnsupportedError


class PreTokenizer(NamedTuple):
    patterns: tuple[str, ...]
    nfc: bool = False  # Unicode composition before anything else
    ignore_merges: bool = False  # a piece that is a token is taken whole, even if no merges lead to it


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_WORDS = f"{CONTRACTIONS}|{TAIL % '1,3'}"
QWEN2_WORDS = f"{CONTRACTIONS}|{TAIL % '1'}"
QWEN35_WORDS = f"{CONTRACTIONS}|{TAIL % '1'}".replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer((GPT2_WORDS,)),
    "smollm": PreTokenizer((r"\p{N}", GPT2_WORDS)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "llama-bpe": PreTokenizer((LLAMA3_WORDS,), ignore_merges=True),
    "qwen2": PreTokenizer((QWEN2_WORDS,), nfc=True),
    "qwen35": PreTokenizer((QWEN35_WORDS,)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]")),
}
# Other names of the same thing.
PRE_TOKENIZERS |= dict.fromkeys(("llama3", "llama-v3"), PRE_TOKENIZERS["llama-bpe"])
PRE_TOKENIZERS |= dict.fromkeys(("starcoder", "refact", "command-r"), PRE_TOKENIZERS["smollm"])
PRE_TOKENIZERS |= dict.fromkeys(("mpt", "olmo"), PRE_TOKENIZERS["gpt-2"])
PRE_TOKENIZERS["deepseek-r1-qwen"] = PRE_TOKENIZERS["qwen2"]


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """The entry for a file's `tokenizer.ggml.pre`; raises UnsupportedError for an unknown or missing name."""
    known = ", ".join(sorted(PRE_TOKENIZERS))
    if name is None:
        raise UnsupportedError(
            f"the file does not name its pre-tokeniser (tokenizer.ggml.pre), so its token ids would be a guess; convert the "
            f"model again with a current converter. Supported: {known}"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(f"pre-tokeniser {name!r} (tokenizer.ggml.pre) is not built here; supported: {known}")
    return PRE_TOKENIZERS[name]
