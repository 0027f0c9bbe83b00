"""Options from YAML: the surprises of the format, and words for what is wrong."""

import pytest

from kvant.config.engine import EngineConfig
from kvant.config.file import read_options
from kvant.config.option import options_of
from kvant.config.sampling import SamplingParams
from kvant.errors import ConfigError

KNOWN = {f.name: f for cls in (EngineConfig, SamplingParams) for f in options_of(cls)}


def read(tmp_path, text):
    path = tmp_path / "kvant.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_options(path, KNOWN)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", {}),
        ("# nothing\n", {}),
        ("max-model-len: 5\nmax_num_seqs: 6", {"max_model_len": 5, "max_num_seqs": 6}),
        ("min_p: 1e-3\ntop_p: .5\ntemperature: 0", {"min_p": 0.001, "top_p": 0.5, "temperature": 0}),
        ("stop: ['no', \"a\\nb\"]\ndtype: float32", {"stop": ["no", "a\nb"], "dtype": "float32"}),
        ("stop: one", {"stop": "one"}),
        ("stop_token_ids: [1, 2]\nignore_eos: yes", {"stop_token_ids": [1, 2], "ignore_eos": True}),
        ("max_model_len:\n", {"max_model_len": None}),
    ],
)
def test_values(tmp_path, text, expected):
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("temprature: 1", "unknown option 'temprature'; did you mean temperature?"),
        ("zzz: 1", "unknown option 'zzz'; known are "),
        ("1: 1", "unknown option 1"),
        ("top_p: 1\ntop-p: 1", "top_p is given twice"),
        ("top_p: 1\ntop_p: 1", "'top_p' is given twice"),
        ("stop: no", "stop must be a text, not False; put it in quotes"),
        ("stop: [a, 3]", "stop must be a text, not 3; put it in quotes"),
        ("model: 3", "model must be a text"),
        ("temperature: [1]", "temperature takes one value, not a list"),
        ("temperature: {a: 1}", "temperature takes one value, not a dict"),
        ("- a", "must hold lines of the form"),
        ("just words", "must hold lines of the form"),
        ("a: [", "is not valid YAML"),
        ("model: !!python/object/apply:os.system ['true']", "is not valid YAML"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        ("a: " + "[" * 1500, "is not valid YAML"),
        ("#" * (1 << 21), "is too large"),
    ],
)
def test_what_is_refused(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value) and "kvant.yaml" in str(caught.value) and len(str(caught.value)) < 1000


def test_aliases_cost_nothing(tmp_path):
    bomb = "a: &a [x, x]\n" + "".join(
        f"b{n}: &b{n} [*{'a' if n == 0 else f'b{n - 1}'}, *{'a' if n == 0 else f'b{n - 1}'}]\n" for n in range(60)
    )
    with pytest.raises(ConfigError, match="unknown option 'a'"):
        read(tmp_path, bomb)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the config file"):
        read_options(tmp_path / "none.yaml", KNOWN)
    with pytest.raises(ConfigError, match="cannot read the config file"):
        read_options(tmp_path, KNOWN)
