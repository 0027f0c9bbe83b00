"""`kvant run` for -p and pipes: what is printed where, how it samples, and what every mistake says."""

import io
import json
import os
import subprocess
import sys

import pytest

from kvant.cli.main import run_command
from kvant.cli.run import MAX_ANSWER_TOKENS, MAX_COMPLETION_TOKENS, sampling_for
from tests.cli.fake import MODEL, FakeLLM, doors
from tests.cli.terminal import CTRL_C, ROOT, Terminal


@pytest.fixture
def kvant(capsys, monkeypatch, tmp_path):
    """Runs a command; gives (exit code, stdout, stderr)."""
    llm = FakeLLM()

    def run(*arguments: str, stdin: str = "", **changes):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        for name, value in changes.items():
            setattr(llm, name, value)
        code = run_command(list(arguments), doors(llm, tmp_path))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    run.llm = llm
    return run


# --- one answer ---------------------------------------------------------------------------------------------------------


def test_prompt_is_answered_once(kvant):
    assert kvant("run", MODEL, "-p", "hello there") == (0, "You said: hello there\n", "")
    assert kvant.llm.prompts == [[{"role": "user", "content": "hello there"}]]


def test_piped_text_is_the_prompt(kvant):
    assert kvant("run", MODEL, stdin="hi\n") == (0, "You said: hi\n", "")


def test_prompt_wins_over_a_pipe(kvant):
    assert kvant("run", MODEL, "-p", "this", stdin="that")[1] == "You said: this\n"


def test_system_and_raw(kvant):
    kvant("run", MODEL, "--system", "be kind", "-p", "x")
    kvant("run", MODEL, "--raw", "-p", "once upon")
    assert kvant.llm.prompts == [[{"role": "system", "content": "be kind"}, {"role": "user", "content": "x"}], "once upon"]


def test_stats_go_to_stderr(kvant):
    code, out, err = kvant("run", MODEL, "-p", "x", "--stats")
    assert (code, out) == (0, "You said: x\n")
    assert err == "3 tokens · 31.0 tok/s · first token 0.25 s\n"


def test_notices_go_to_stderr(kvant):
    assert kvant("run", MODEL, "-p", "x", notices=("the context is reduced",))[1:] == (
        "You said: x\n",
        "notice: the context is reduced\n",
    )


def test_a_pipe_gets_the_text_as_it_is_and_a_terminal_gets_no_escapes(kvant, tmp_path):
    assert kvant("run", MODEL, "-p", "x", replies=["a\x1b[31mb\tc"])[1] == "a\x1b[31mb\tc\n"
    with Terminal(tmp_path, "run", MODEL, "-p", "x", replies=["a\x1b]0;title\x07b \x9b31mc"]) as terminal:
        assert terminal.exit_code() == 0
        assert "a]0;titleb 31mc\n" in terminal.shown
        assert "first token 0.25 s" in terminal.shown  # numbers on a terminal


def test_without_a_template(kvant):
    code, out, err = kvant("run", MODEL, "-p", "once upon", template=None)
    assert (code, out) == (0, "You said: once upon\n")
    assert "no chat template" in err
    assert kvant.llm.prompts == ["once upon"]
    assert kvant.llm.params[0].max_tokens == 98  # the default of 256, cut to a context of 100
    kvant("run", MODEL, "-p", "once upon", "--max-tokens", "7")
    assert kvant.llm.params[1].max_tokens == 7


def test_engine_options_arrive(kvant):
    kvant("run", MODEL, "-p", "x", "--max-model-len", "50", "--dtype", "float32", "--no-enable-prefix-caching")
    config = kvant.llm.config
    assert (config.model, config.max_model_len, config.dtype, config.enable_prefix_caching) == (MODEL, 50, "float32", False)


RECOMMENDED = {"temperature": 0.2, "top_k": 50}


@pytest.mark.parametrize(
    "given, recommended, chat, expected",
    [
        ({}, {}, False, {"temperature": 0}),
        ({}, RECOMMENDED, False, {"temperature": 0}),
        ({"max_tokens": 5, "stop": ["x"]}, RECOMMENDED, False, {"temperature": 0, "max_tokens": 5, "stop": ("x",)}),
        ({"temperature": 0.9}, {}, False, {"temperature": 0.9}),
        ({"top_p": 0.9}, {}, False, {"temperature": 1, "top_p": 0.9}),
        ({"top_p": 0.9}, RECOMMENDED, False, {"temperature": 0.2, "top_k": 50, "top_p": 0.9}),
        ({"seed": 4}, RECOMMENDED, False, {"temperature": 0.2, "seed": 4}),
        ({}, RECOMMENDED, True, {"temperature": 0.2, "top_k": 50, "top_p": 1.0}),
        ({}, {}, True, {"temperature": 0.7, "top_p": 0.95}),
        ({"temperature": 0.0}, RECOMMENDED, True, {"temperature": 0, "top_k": 50}),
    ],
)
def test_sampling(given, recommended, chat, expected):
    params = sampling_for(given, recommended, chat=chat, templated=True)
    assert {name: getattr(params, name) for name in expected} == expected


def test_R10_a_chat_may_fill_the_context_and_one_answer_is_cut_with_a_notice():
    assert sampling_for({}, {}, chat=True, templated=True).max_tokens is None
    assert sampling_for({}, {}, chat=False, templated=True).max_tokens == MAX_ANSWER_TOKENS
    assert sampling_for({}, {}, chat=False, templated=False).max_tokens == MAX_COMPLETION_TOKENS
    assert sampling_for({"min_tokens": 300}, {}, chat=False, templated=False).max_tokens == 300


# --- mistakes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "--top-kk", "3", "-p", "x"], "No such option '--top-kk'"),
        (["run", MODEL, "extra", "-p", "x"], "Got unexpected extra argument"),
        (["rnu"], "No such command 'rnu'. Did you mean 'run'?"),
        (["serve"], "No such command 'serve'"),
        (["run", "-p"], "Option '-p' requires an argument"),
        (["run", MODEL, "-p", "x", "--top-k", "many"], "Invalid value for '--top-k'"),
        (["run", MODEL, "-p", "x", "--temperature", "-1"], "--temperature must be between 0 and 100, not -1"),
        (["run", MODEL, "-p", "x", "--temperature", "nan"], "--temperature must be a finite number"),
        (["run", MODEL, "-p", "x", "--top-p", "1.5"], "--top-p must be between 0 and 1, not 1.5"),
        (["run", MODEL, "-p", "x", "--max-tokens", "0"], "--max-tokens must be between 1 and"),
        (["run", MODEL, "-p", "x", "--stop", ""], "stop strings must be non-empty"),
        (
            ["run", MODEL, "-p", "x", "--min-tokens", "9", "--max-tokens", "3"],
            "--min-tokens (9) is larger than --max",
        ),
        (["run", MODEL, "-p", "x", "--dtype", "int3"], "--dtype must be one of auto, float32, bfloat16, float16, not 'int3'"),
        (["run", MODEL, "-p", "x", "--device", "tpu"], "--device must be one of"),
        (["run", MODEL, "-p", "x", "--max-model-len", "0"], "--max-model-len must be between 1 and"),
        (["run", MODEL, "-p", "x", "--block-size", "5"], "--block-size must be 8, 16, 32, 64 or 128, not 5"),
        (["run", MODEL, "-p", "x", "--gpu-memory-utilization", "2"], "--gpu-memory-utilization must be above 0"),
        (["run", MODEL, "-p", "x", "--threads", "-2"], "--threads must be between 1 and 1024"),
        (["run", MODEL, "-p", "x", "--kv-cache-memory-bytes", "1"], "raise --kv-cache-memory-bytes"),
        (["run", "", "-p", "x"], "there is no model ''"),
        (["run", MODEL, "-p", ""], "the prompt is empty"),
        (["run", MODEL, "-p", " \n"], "the prompt is empty"),
        (["run", MODEL], "the prompt is empty"),  # an empty pipe
        (["run", MODEL, "-p", "x", "--raw", "--system", "y"], "--system needs the chat template"),
        (["run", MODEL, "-p", "word " * 200], "201 prompt tokens do not fit into a context of 100"),
        (["run", MODEL, "-p", "x", "--max-tokens", "100"], "do not fit into a context of 100"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(kvant, arguments, message):
    code, out, err = kvant(*arguments, stdin="")
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize("arguments", [["--temperature", "-1"], ["--dtype", "x"], ["--raw", "--system", "y"], ["-p", ""]])
def test_options_are_checked_before_the_model_is_opened(capsys, tmp_path, arguments):
    def open_llm(config):
        raise AssertionError("the model was opened")

    assert run_command(["run", MODEL, "-p", "x", *arguments], doors(FakeLLM(), tmp_path, open_llm=open_llm)) == 2


def test_system_without_a_template_is_refused(kvant):
    code, _, err = kvant("run", MODEL, "-p", "x", "--system", "y", template=None)
    assert code == 2 and "--system needs a chat template" in err


def test_a_failing_request(kvant):
    code, _, err = kvant("run", MODEL, "-p", "x", error="the logits are not finite")
    assert (code, err) == (2, "error: the logits are not finite\n")


# --- as a process -------------------------------------------------------------------------------------------------------


def program(tmp_path, *arguments: str, **fake) -> list:
    environment = {**os.environ, "KVANT_CACHE": str(tmp_path), "FAKE": json.dumps(fake)}
    return [[sys.executable, "-m", "tests.cli.fake", *arguments], {"cwd": ROOT, "env": environment}]


def test_a_pipe_into_a_pipe(tmp_path):
    command, options = program(tmp_path, "run", MODEL)
    done = subprocess.run(command, **options, input="Čau 🙂".encode(), capture_output=True)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "You said: Čau 🙂\n", b"")


def test_bytes_that_are_no_text(tmp_path):
    command, options = program(tmp_path, "run", MODEL)
    done = subprocess.run(command, **options, input=b"a \xff b", capture_output=True)
    assert (done.returncode, done.stdout.decode()) == (0, "You said: a \ufffd b\n")


def test_an_output_without_unicode(tmp_path):
    command, options = program(tmp_path, "run", MODEL, "-p", "🙂")
    options["env"]["PYTHONIOENCODING"] = "ascii"
    done = subprocess.run(command, **options, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"You said: ?\n")


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    command, options = program(tmp_path, "run", MODEL, "-p", "x", replies=["word " * 5000], max_model_len=100_000)
    process = subprocess.Popen(command, **options, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(4)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(20) == 1


def test_interrupting_an_answer_ends_the_program(tmp_path):
    arguments = ("run", MODEL, "-p", "x")
    with Terminal(tmp_path, *arguments, replies=["word " * 500], delay=0.02, max_model_len=1000) as terminal:
        terminal.expect("word word")
        terminal.type(CTRL_C)
        assert terminal.exit_code() == 130
        assert "Traceback" not in terminal.shown and "error" not in terminal.shown


def test_a_chat_needs_a_terminal_to_write_to(tmp_path):
    with Terminal(tmp_path, "run", MODEL) as terminal:
        terminal.expect("> ")
    master, slave = os.openpty()
    command, options = program(tmp_path, "run", MODEL)
    done = subprocess.run(command, **options, stdin=slave, capture_output=True)
    os.close(master), os.close(slave)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"a chat needs a terminal" in done.stderr
