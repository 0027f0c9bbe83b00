"""Chat: questions and answers in a terminal.

    > hello                       the prompt; Ctrl-C twice, Ctrl-D or /exit leaves
    Hello! How can I help?        the answer as it is drawn; Ctrl-C stops it and keeps what is there
    9 tokens · 31.0 tok/s · first token 0.21 s

A model without a chat template has no conversation: every line is continued on its own.
How messages of several lines are typed says `message.py`; how a conversation lies in a file, `saved.py`.
"""

import shlex
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvant.cli.answer import Answer, numbers, show
from kvant.cli.history import Message, conversation, fit, within
from kvant.cli.message import read_message
from kvant.cli.options import SAMPLING_OPTIONS, parse
from kvant.cli.saved import file_named, load, save
from kvant.cli.screen import Screen
from kvant.config.sampling import SamplingParams
from kvant.errors import KvantError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvant.engine.outputs import StreamEvent
    from kvant.llm import LLM

HELP = """\
/set NAME VALUE   change a sampling parameter, e.g. /set temperature 0.7; /set alone lists them
/system TEXT      give the model a system prompt; /system alone takes it away
/regen            answer the last question again
/undo             forget the last question and its answer
/clear            forget the conversation
/save FILE        keep the conversation in a file; /load FILE takes it up again
/raw              show the last answer as the model wrote it, without rendering
/stats            how full the context is
/exit             leave (Ctrl-D too)
\\                 at the end of a line: the message goes on in the next one
\"\"\"               begins and ends a message of several lines
Ctrl-C            stops an answer"""


class Chat:
    """A conversation with `llm`. `sampling` is what every question starts from, `templated` whether there are turns.

    `plain` shows answers as they are; otherwise those of a conversation are taken for Markdown where a terminal shows it.
    """

    def __init__(
        self,
        llm: "LLM",
        screen: Screen,
        sampling: SamplingParams,
        *,
        system: str = "",
        templated: bool = True,
        plain: bool = False,
    ):
        self.llm = llm
        self.screen = screen
        self.sampling = sampling
        self.system = system
        self.templated = templated
        self.plain = plain
        self.turns: list[Message] = []
        self.question = ""  # the last one that was answered
        self.answer = ""
        self._commands = {
            "/help": lambda _: screen.line(HELP),
            "/set": self._set,
            "/system": self._system,
            "/regen": self._regen,
            "/undo": self._undo,
            "/clear": self._clear,
            "/save": self._save,
            "/load": self._load,
            "/raw": self._raw,
            "/stats": self._stats,
        }

    def loop(self) -> None:
        """Reads and answers until the user leaves. Ctrl-C twice in a row at the prompt raises KeyboardInterrupt."""
        interrupted = False
        while True:
            try:
                text = read_message()
            except EOFError:
                self.screen.line()
                return
            except KeyboardInterrupt:
                self.screen.line()
                if interrupted:
                    raise
                interrupted = True
                self.screen.aside("Ctrl-C again, Ctrl-D or /exit leaves")
                continue
            interrupted = False
            if text.strip() == "/exit":
                return
            self._take(text)

    def _take(self, text: str) -> None:
        try:
            if text.startswith("/"):
                self._command(text)
            elif text.strip():
                self._reply(text)
        except KvantError as error:
            self.screen.error(str(error))

    def _reply(self, text: str) -> Answer:
        if not self.templated:
            sampling = within(self.sampling, len(self.llm.tokenizer.encode(text)), self.llm.max_model_len)
            return self._show(text, self.llm.stream(text, sampling))
        question = {"role": "user", "content": text}
        context = self.llm.max_model_len
        fitted = fit(self.system, [*self.turns, question], self.llm.count_tokens, context, self.sampling.max_tokens)
        if fitted.num_dropped:
            turns = "turn was" if fitted.num_dropped == 1 else f"{fitted.num_dropped} turns were"
            self.screen.notice(f"the context of {context} tokens is full: the oldest {turns} dropped")
        sampling = within(self.sampling, fitted.num_tokens, context)
        answer = self._show(text, self.llm.stream(conversation(self.system, fitted.turns), sampling))
        self._remember(fitted.turns, answer)
        return answer

    def _show(self, question: str, events: "Iterator[StreamEvent]") -> Answer:
        with self.screen.rendering(self.templated and not self.plain) as write:
            answer = show(events, write)
        self.screen.aside(numbers(answer))
        self.question, self.answer = question, answer.text
        return answer

    def _remember(self, turns: list[Message], answer: Answer) -> None:
        """The turns that were sent, and the answer; a question without any answer is forgotten."""
        self.turns = [*turns, {"role": "assistant", "content": answer.text}] if answer.text else turns[:-1]

    # --- commands -------------------------------------------------------------------------------------------------------

    def _command(self, text: str) -> None:
        name, _, rest = text.strip().partition(" ")
        if name not in self._commands:
            raise RequestError(f"there is no command {name}; /help lists them")
        self._commands[name](rest.strip())

    def _set(self, rest: str) -> None:
        try:
            name, *words = shlex.split(rest) or [""]
        except ValueError as error:
            raise RequestError(f"cannot read {rest!r}: {str(error).lower()}") from None
        known = {f.name: f for f in SAMPLING_OPTIONS}
        if not name:
            for field in known:
                self.screen.line(f"{field:<28}{_shown(getattr(self.sampling, field))}")
            return
        name = name.lstrip("-").replace("-", "_")
        if name not in known:
            raise RequestError(f"there is no sampling parameter {name!r}; /set lists them")
        if not words:
            raise RequestError(f"/set {name} needs a value")
        self.sampling = self.sampling.with_changes(**{name: parse(known[name], words)})
        self.screen.aside(f"{name} is {_shown(getattr(self.sampling, name))}")

    def _system(self, rest: str) -> None:
        if not self.templated:
            raise RequestError("a system prompt needs a chat template, and this model has none")
        self.system = rest
        self.screen.aside("the system prompt is set" if rest else "there is no system prompt")

    def _regen(self, _: str) -> None:
        if not self.question or (self.templated and not self.turns):
            raise RequestError("there is no answer yet that could be made again")
        if self.sampling.greedy or self.sampling.seed is not None:
            self.screen.notice("without chance the answer stays the same; /set temperature 0.8 or /set seed none changes that")
        before, answer = self.turns, None
        if self.templated:
            self.question, self.turns = before[-2]["content"], before[:-2]
        try:
            answer = self._reply(self.question)
        finally:
            if answer is None or not answer.text:  # nothing came: the answer from before stays
                self.turns = before

    def _undo(self, _: str) -> None:
        if not self.turns:
            raise RequestError("there is no question to forget")
        question, self.turns = self.turns[-2]["content"], self.turns[:-2]
        self.screen.aside(f"forgotten: {question.splitlines()[0][:60]}")

    def _save(self, rest: str) -> None:
        path = file_named(rest, datetime.now())
        save(path, self.llm.config.model, self.system, self.turns)
        self.screen.aside(f"{self._count()} saved to {path}")

    def _load(self, rest: str) -> None:
        if not self.templated:
            raise RequestError("a conversation needs a chat template, and this model has none")
        if not rest:
            raise RequestError("/load needs the file that /save wrote")
        self.system, self.turns = load(file_named(rest, datetime.now()))
        self.answer = self.turns[-1]["content"] if self.turns else ""
        self.question = self.turns[-2]["content"] if self.turns else ""
        self.screen.aside(f"{self._count()} loaded" + ("" if not self.system else "; there is a system prompt"))

    def _raw(self, _: str) -> None:
        if not self.answer:
            raise RequestError("there is no answer yet")
        self.screen.answer(self.answer if self.answer.endswith("\n") else self.answer + "\n")

    def _clear(self, _: str) -> None:
        self.turns = []
        self.question = self.answer = ""
        self.screen.aside("the conversation is forgotten")

    def _stats(self, _: str) -> None:
        messages = conversation(self.system, self.turns)
        tokens = self.llm.count_tokens(messages) if messages else 0
        self.screen.line(f"{self._count()}, {tokens} of {self.llm.max_model_len} tokens of context")

    def _count(self) -> str:
        turns = len(self.turns) // 2
        return f"{turns} turn{'' if turns == 1 else 's'}"


def describe(sampling: SamplingParams) -> str:
    """The parameters that differ from their defaults, for the line above a chat."""
    changed = {f.name: getattr(sampling, f.name) for f in fields(SamplingParams) if getattr(sampling, f.name) != f.default}
    changed.pop("max_tokens", None)
    return ", ".join(f"{name} {_shown(value)}" for name, value in changed.items()) or f"temperature {sampling.temperature:g}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(repr(item) for item in value) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
