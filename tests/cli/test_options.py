"""Options made from declarations: every field appears once, under its vLLM spelling, and only what was given arrives."""

from dataclasses import fields

import click
import pytest

from kvant.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, generated, parse, spelled
from kvant.config.engine import EngineConfig
from kvant.config.sampling import SamplingParams
from kvant.errors import RequestError


@pytest.fixture
def call():
    seen = {}

    @click.command()
    @click.option("--name", default="x")
    @generated(engine=ENGINE_OPTIONS, sampling=SAMPLING_OPTIONS)
    def command(name: str, *, engine: dict, sampling: dict) -> None:
        """Help of the command."""
        seen.update(name=name, engine=engine, sampling=sampling)

    def run(*arguments: str):
        seen.clear()
        command.main(list(arguments), standalone_mode=False)
        return seen

    return run


def test_only_what_was_given_arrives(call):
    assert call() == {"name": "x", "engine": {}, "sampling": {}}
    assert call("--name", "y", "--max-num-seqs", "3", "--temperature", "0") == {
        "name": "y",
        "engine": {"max_num_seqs": 3},
        "sampling": {"temperature": 0.0},
    }


def test_types(call):
    given = call(
        "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.5", "--dtype", "float32", "--stop", "a", "--stop", "b"
    )
    assert given["engine"] == {"enable_prefix_caching": False, "gpu_memory_utilization": 0.5, "dtype": "float32"}
    assert given["sampling"] == {"stop": ("a", "b")}
    assert call("--stop-token-ids", "1", "--ignore-eos")["sampling"] == {"stop_token_ids": (1,), "ignore_eos": True}


def test_every_option_of_the_engine_is_there():
    assert {f.name for f in ENGINE_OPTIONS} | {"model", "seed"} == {f.name for f in fields(EngineConfig)}


def test_help_says_default_unit_and_choices(call, capsys):
    call("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-num-seqs N The most sequences computed in one step [default: 64]" in text
    assert "--dtype auto|float32|bfloat16|float16" in text
    assert "--max-model-len TOKENS" in text
    assert "None:" not in text
    assert "Help of the command." in text


SAMPLING = {f.name: f for f in fields(SamplingParams)}


@pytest.mark.parametrize(
    "name, words, value",
    [
        ("temperature", ["0.7"], 0.7),
        ("top_k", ["40"], 40),
        ("seed", ["none"], None),
        ("seed", ["-5"], -5),
        ("stop", ["a b", "c"], ("a b", "c")),
        ("stop", ["none"], ()),
        ("ignore_eos", ["on"], True),
        ("ignore_eos", ["False"], False),
        ("stop_token_ids", ["1", "2"], (1, 2)),
    ],
)
def test_parse(name, words, value):
    assert parse(SAMPLING[name], words) == value
    SamplingParams().with_changes(**{name: value})


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("temperature", ["warm"], "temperature must be a number, not 'warm'"),
        ("top_k", ["1.5"], "top_k must be a whole number, not '1.5'"),
        ("top_k", ["1", "2"], "top_k takes one value, not 2"),
        ("ignore_eos", ["maybe"], "ignore_eos must be true or false, not 'maybe'"),
    ],
)
def test_parse_refuses(name, words, message):
    with pytest.raises(RequestError) as caught:
        parse(SAMPLING[name], words)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "message, param, expected",
    [
        ("max_model_len 9 is too much", "max_model_len", "--max-model-len 9 is too much"),
        ("raise kv_cache_memory_bytes or more", None, "raise --kv-cache-memory-bytes or more"),
        ("temperature must be more", "temperature", "--temperature must be more"),
        ("no such model or seed", "model", "no such model or seed"),
        ("unknown_word", None, "unknown_word"),
    ],
)
def test_errors_spell_options_as_they_are_typed(message, param, expected):
    assert spelled(message, param) == expected
