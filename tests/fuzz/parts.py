"""Parts of a tokenizer.json that exist, but were not made for the tokenizer they are put into."""

PARTS = {
    "normalizer": [
        {"type": "NFC"},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
        {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 99},
        {"type": "Sequence", "normalizers": []},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": ""}, "behavior": "MergedWithPrevious", "invert": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        {"type": "Metaspace", "replacement": "xx", "prepend_scheme": "first"},
        {"type": "WhitespaceSplit"},
        {"type": "Digits"},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {"type": "FixedLength", "length": 0},
        {"type": "CharDelimiterSplit", "delimiter": "a"},
        {"type": "UnicodeScripts"},
    ],
    "model": [
        {"type": "Unigram", "unk_id": 9, "vocab": [["<unk>", 0.0], ["a", -1.0]], "byte_fallback": True},
        {"type": "Unigram", "unk_id": None, "vocab": [], "byte_fallback": False},
        {"type": "Unigram", "unk_id": 0, "vocab": [["", 0.0], ["a", 1e999]], "byte_fallback": True},
        {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 0,
            "vocab": {"a": 0},
        },
        {"type": "WordLevel", "unk_token": "x", "vocab": {"a": 4294967295}},
        {"type": "BPE", "vocab": {"a": 0, "b": 4294967295}, "merges": [], "unk_token": "zzz", "byte_fallback": True},
        {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": [["a", "a"]] * 300, "dropout": 2.0},
        {"type": "BPE", "vocab": {}, "merges": []},
    ],
    "decoder": [
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        {"type": "Fuse"},
        {"type": "BPEDecoder", "suffix": ""},
        {"type": "Sequence", "decoders": []},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    ],
    "post_processor": [
        {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
        {"type": "BertProcessing", "sep": ["a", 99999], "cls": ["b", 4294967295]},
        {"type": "Sequence", "processors": []},
    ],
    "truncation": [{"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}],
    "padding": [{"strategy": {"Fixed": 4000000000}, "direction": "Left", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}],
    "added_tokens": [
        [
            {
                "id": 4000000000,
                "content": "<x>",
                "special": True,
                "single_word": False,
                "lstrip": True,
                "rstrip": True,
                "normalized": False,
            }
        ],
        [{"id": 0, "content": "", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True}],
        [{"id": 1, "content": " ", "special": False, "single_word": True, "lstrip": True, "rstrip": True, "normalized": True}],
    ],
}
