"""The chat, scripted through a pseudo-terminal, as a user sees it; details of its commands without one."""

import time

import pytest

from kvant.cli.chat import Chat, describe
from kvant.cli.screen import Screen
from kvant.config.sampling import SamplingParams
from tests.cli.fake import MODEL, FakeLLM
from tests.cli.terminal import CTRL_C, CTRL_D, Terminal

# --- in a terminal ------------------------------------------------------------------------------------------------------


def test_a_conversation(tmp_path):
    with Terminal(tmp_path, "run", MODEL, default_sampling={"temperature": 0.2}, notices=["something is reduced"]) as terminal:
        terminal.expect("notice: ")
        terminal.expect("something is reduced")
        terminal.expect("temperature 0.2 (recommended by the model)")
        terminal.expect("> ")
        terminal.ask("hello")
        terminal.expect("You said: hello\n")
        assert "\x1b[2m" in terminal.expect("3 tokens")  # dim
        terminal.expect("31.0 tok/s · first token 0.25 s")
        terminal.expect("> ")
        terminal.ask("/stats")
        terminal.expect("1 turn, 6 of 100 tokens of context")
        terminal.ask("/exit")
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.shown


def test_no_color(tmp_path):
    with Terminal(tmp_path, "run", MODEL, environment={"NO_COLOR": "1", "TERM": "dumb"}) as terminal:
        terminal.expect("> ")
        terminal.ask("hello")
        terminal.expect("first token")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
        assert "\x1b[" not in terminal.shown.replace("\x1b[?2004h", "").replace("\x1b[?2004l", "")


def test_interrupting_an_answer_keeps_what_is_there(tmp_path):
    story = "once upon a time " * 50
    with Terminal(tmp_path, "run", MODEL, replies=[story, "fine"], delay=0.05, max_model_len=1000) as terminal:
        terminal.expect("> ")
        terminal.ask("a story")
        terminal.expect("upon")
        terminal.type(CTRL_C)
        terminal.expect("stopped")
        terminal.expect("> ")
        terminal.ask("go on")
        terminal.expect("fine\n")
        terminal.expect("> ")
        terminal.ask("/stats")
        terminal.expect("2 turns, ")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
        assert "Traceback" not in terminal.shown


def test_interrupt_twice_at_the_prompt_leaves(tmp_path):
    with Terminal(tmp_path, "run", MODEL) as terminal:
        terminal.expect("> ")
        terminal.interrupt_at_prompt()
        terminal.expect("Ctrl-C again")
        terminal.expect("> ")
        terminal.ask("hello")  # anything between starts the count anew
        terminal.expect("You said: hello")
        terminal.expect("> ")
        terminal.interrupt_at_prompt()
        terminal.expect("Ctrl-C again")
        terminal.expect("> ")
        terminal.interrupt_at_prompt()
        assert terminal.exit_code() == 130
        assert "Traceback" not in terminal.shown


def test_several_lines(tmp_path):
    with Terminal(tmp_path, "run", MODEL) as terminal:
        terminal.expect("> ")
        terminal.ask('"""first')
        terminal.expect(". ")
        terminal.ask("second")
        terminal.expect(". ")
        terminal.ask('"""')
        terminal.expect("You said: first\nsecond\n")


def test_without_a_template_every_line_is_continued_alone(tmp_path):
    with Terminal(tmp_path, "run", MODEL, template=None) as terminal:
        terminal.expect("no chat template")
        terminal.expect("> ")
        terminal.ask("hello")
        terminal.expect("You said: hello")
        terminal.expect("> ")
        terminal.ask("/system be kind")
        terminal.expect("error: ")
        terminal.ask("/exit")
        assert terminal.exit_code() == 0


def test_markdown_is_rendered_and_can_be_copied_as_it_was_written(tmp_path):
    reply = "# Title\n**bold** `code`\n- point"
    with Terminal(tmp_path, "run", MODEL, replies=[reply]) as terminal:
        terminal.expect("> ")
        terminal.ask("hello")
        shown = terminal.expect("31.0 tok/s")
        assert "**" not in shown and "\x1b[1mbold\x1b[0m" in shown and "• \x1b[0mpoint" in shown
        assert "\x1b[2K" not in shown and "\x1b[1A" not in shown  # nothing is erased or drawn again
        terminal.expect("> ")
        terminal.ask("/raw")
        terminal.expect(reply)


@pytest.mark.parametrize("arguments, environment", [(["--plain"], {}), ([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"})])
def test_markdown_stays_as_it_is(tmp_path, arguments, environment):
    with Terminal(tmp_path, "run", MODEL, *arguments, environment=environment, replies=["**bold** `code`"]) as terminal:
        terminal.expect("> ")
        terminal.ask("hello")
        terminal.expect("**bold** `code`\n")


def test_history_comes_back_with_the_arrow_key(tmp_path):
    for number, keys in enumerate(["first question\n", "\x1b[A\x1b[A\n"]):
        with Terminal(tmp_path, "run", MODEL) as terminal:
            terminal.expect("> ")
            time.sleep(0.1)
            terminal.type(keys)
            terminal.expect("You said: first question")
            terminal.expect("> ")
            terminal.ask("/exit")
            assert terminal.exit_code() == 0
        lines = (tmp_path / "chat_history").read_text().splitlines()
        assert lines[:2] == ["first question", "/exit"] and len(lines) == 2 + 2 * number


def test_no_history(tmp_path):
    with Terminal(tmp_path, "run", MODEL, "--no-history") as terminal:
        terminal.expect("> ")
        terminal.ask("a \\")
        terminal.expect(". ")
        terminal.ask("b")
        terminal.expect("You said: a\nb")
        terminal.expect("> ")
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
    assert not (tmp_path / "chat_history").exists()


# --- without one --------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(capsys):
    """A chat whose replies to lines are returned as what it printed."""

    class Scripted(Chat):
        def says(self, *lines: str) -> str:
            for line in lines:
                self._take(line)
            captured = capsys.readouterr()
            return captured.out + captured.err

    def build(llm: FakeLLM | None = None, system: str = "", **sampling):
        return Scripted(llm or FakeLLM(), Screen(), SamplingParams(**{"max_tokens": None, **sampling}), system=system)

    return build


def test_the_model_sees_the_conversation(make):
    llm = FakeLLM(replies=["one", "two"])
    make(llm, system="be kind").says("first", "second")
    assert llm.prompts[1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "second"},
    ]


def test_the_oldest_turns_are_dropped_with_a_notice(make):
    llm = FakeLLM(replies=["a b c d e f g h i"], max_model_len=100)
    chat = make(llm, system="be kind", max_tokens=20)
    shown = chat.says(*["one two three four five six seven eight nine"] * 4)
    assert "oldest" not in shown
    shown = chat.says("one two three four five six seven eight nine")
    assert "notice: the context of 100 tokens is full: the oldest turn was dropped" in shown
    assert [message["role"] for message in llm.prompts[-1]] == ["system"] + ["user", "assistant"] * 3 + ["user"]
    assert all(llm.count_tokens(prompt) + 20 <= 100 for prompt in llm.prompts)


def test_max_tokens_is_cut_to_what_the_context_leaves(make):
    llm = FakeLLM(replies=["ok"], max_model_len=50)
    make(llm, max_tokens=40, min_tokens=3).says("a " * 20)
    assert (llm.params[0].max_tokens, llm.params[0].min_tokens) == (29, 3)


def test_a_message_that_is_too_long_is_refused_and_forgotten(make):
    llm = FakeLLM(replies=["ok"], max_model_len=50)
    chat = make(llm)
    assert "error: this message takes 61 tokens and the context holds 50" in chat.says("a " * 60)
    assert chat.turns == []
    assert "ok" in chat.says("short")


def test_a_failing_request_leaves_the_conversation_as_it_was(make):
    llm = FakeLLM(replies=["some words"])
    chat = make(llm)
    chat.says("first")
    before = list(chat.turns)
    llm.error = "the logits are not finite"
    assert "error: the logits are not finite" in chat.says("second")
    assert chat.turns == before
    llm.error = None
    assert "some words" in chat.says("third")


def test_an_empty_answer_is_not_remembered(make):
    chat = make(FakeLLM(replies=[""]))
    chat.says("hello")
    assert chat.turns == []


def test_set(make):
    llm = FakeLLM(replies=["ok"])
    chat = make(llm)
    assert "temperature is 0.5" in chat.says("/set temperature 0.5")
    assert "top_k is 3" in chat.says("/set --top-k 3")
    assert "stop is 'a b' 'c'" in chat.says("/set stop 'a b' c")
    chat.says("hello")
    assert (llm.params[0].temperature, llm.params[0].top_k, llm.params[0].stop) == (0.5, 3, ("a b", "c"))
    listed = chat.says("/set")
    assert "temperature                 0.5" in listed and "seed                        none" in listed
    assert "max_tokens is 5" in chat.says("/set max_tokens 5")
    assert "max_tokens is none" in chat.says("/set max_tokens none")


@pytest.mark.parametrize(
    "line, message",
    [
        ("/set warmth 1", "there is no sampling parameter 'warmth'; /set lists them"),
        ("/set temperature", "/set temperature needs a value"),
        ("/set temperature warm", "temperature must be a number, not 'warm'"),
        ("/set temperature -1", "temperature must be between 0 and 100, not -1"),
        ("/set top_p 2", "top_p must be between 0 and 1, not 2"),
        ("/set n 2", "there is no sampling parameter 'n'"),
        ("/set temperature none", "temperature must be a finite number, not None"),
        ("/set stop 'a", "cannot read"),
        ("/sett temperature 1", "there is no command /sett; /help lists them"),
        ("/", "there is no command /"),
    ],
)
def test_commands_refuse_with_one_line(make, line, message):
    chat = make()
    before = chat.sampling
    shown = chat.says(line)
    assert shown.startswith("error: ") and message in shown and shown.count("\n") == 1
    assert chat.sampling is before


def test_system_and_clear(make):
    llm = FakeLLM(replies=["ok"])
    chat = make(llm)
    chat.says("/system be brief", "one", "/clear", "two", "/system", "three")
    assert [[message["content"] for message in prompt] for prompt in llm.prompts] == [
        ["be brief", "one"],
        ["be brief", "two"],
        ["two", "ok", "three"],
    ]


def test_regen_and_undo(make):
    llm = FakeLLM(replies=["one", "two", "three", "four"])
    chat = make(llm)
    assert "there is no answer yet" in chat.says("/regen")
    assert "there is no question to forget" in chat.says("/undo")
    chat.says("first", "second")
    assert "three" in chat.says("/regen")
    assert [message["content"] for message in chat.turns] == ["first", "one", "second", "three"]
    assert llm.prompts[2] == llm.prompts[1]
    assert "forgotten: second" in chat.says("/undo")
    assert [message["content"] for message in chat.turns] == ["first", "one"]
    assert "four" in chat.says("/regen")
    assert [message["content"] for message in chat.turns] == ["first", "four"]


def test_a_failing_regen_keeps_the_answer(make):
    llm = FakeLLM(replies=["same"])
    chat = make(llm)
    chat.says("more", "more")  # the same question twice
    before = list(chat.turns)
    llm.error = "no luck"
    assert "error: no luck" in chat.says("/regen")
    llm.error, llm.replies = None, [""]
    chat.says("/regen")
    assert chat.turns == before


def test_regen_without_chance_says_so(make):
    chat = make(FakeLLM(), temperature=0.0)
    assert "stays the same" in chat.says("hello", "/regen")
    assert "stays the same" not in make(FakeLLM()).says("hello", "/regen")


def test_save_and_load(make, tmp_path):
    chat = make(FakeLLM(replies=["one"]), system="be kind")
    chat.says("first")
    path = tmp_path / "my chat.json"
    assert f"1 turn saved to {path}" in chat.says(f"/save {path}")
    llm = FakeLLM(replies=["two"])
    other = make(llm)
    assert "1 turn loaded; there is a system prompt" in other.says(f"/load {path}")
    other.says("/regen", "second")
    assert [message["content"] for message in llm.prompts[-1]] == ["be kind", "first", "two", "second"]
    assert "error: cannot read" in other.says(f"/load {tmp_path}/none.json")
    assert "error: /load needs the file" in other.says("/load")


def test_saving_without_a_name(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chat = make(FakeLLM())
    chat.says("first", "/save")
    (path,) = tmp_path.glob("chat-*.json")
    assert "1 turn loaded" in chat.says(f"/load {path.name}")


def test_raw(make):
    chat = make(FakeLLM(replies=["**x**"]))
    assert "there is no answer yet" in chat.says("/raw")
    chat.says("hello")
    assert chat.says("/raw") == "**x**\n"


def test_help_and_empty_lines(make):
    chat = make()
    assert "/set NAME VALUE" in chat.says("/help")
    assert chat.says("", "   ") == ""


@pytest.mark.parametrize(
    "sampling, expected",
    [
        ({"temperature": 0.7, "top_p": 0.9}, "temperature 0.7, top_p 0.9"),
        ({}, "temperature 1"),
        ({"temperature": 0.0, "max_tokens": 7}, "temperature 0.0"),
        ({"stop": ["x"]}, "stop 'x'"),
    ],
)
def test_describe(sampling, expected):
    assert describe(SamplingParams(**sampling)) == expected
