"""Chat: questions and answers in a terminal.

    > hello                       the prompt; Ctrl-C twice, Ctrl-D or /exit leaves
    Hello! How can I help?        the answer as it is drawn; Ctrl-C stops it and keeps what is there
    9 tokens · 31.0 tok/s · first token 0.21 s

A model without a chat template has no conversation: every line is continued on its own.
"""

import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvant.cli.answer import Answer, numbers, show
from kvant.cli.history import Message, conversation, fit, within
from kvant.cli.options import SAMPLING_OPTIONS, parse
from kvant.cli.screen import Screen
from kvant.config.sampling import SamplingParams
from kvant.errors import KvantError, RequestError

if TYPE_CHECKING:
    from kvant.llm import LLM

HELP = """\
/set NAME VALUE   change a sampling parameter, e.g. /set temperature 0.7; /set alone lists them
/system TEXT      give the model a system prompt; /system alone takes it away
/clear            forget the conversation
/stats            how full the context is
/exit             leave (Ctrl-D too)
\"\"\"               begins and ends a message of several lines
Ctrl-C            stops an answer"""

PROMPT, CONTINUED = "> ", ". "
QUOTES = '"""'


class Chat:
    """A conversation with `llm`. `sampling` is what every question starts from, `templated` whether there are turns."""

    def __init__(self, llm: "LLM", screen: Screen, sampling: SamplingParams, *, system: str = "", templated: bool = True):
        self.llm = llm
        self.screen = screen
        self.sampling = sampling
        self.system = system
        self.templated = templated
        self.turns: list[Message] = []
        self._commands = {
            "/help": lambda _: screen.line(HELP),
            "/set": self._set,
            "/system": self._system,
            "/clear": self._clear,
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

    def _reply(self, text: str) -> None:
        if not self.templated:
            sampling = within(self.sampling, len(self.llm.tokenizer.encode(text)), self.llm.max_model_len)
            answer = show(self.llm.stream(text, sampling), self.screen.answer)
            self.screen.aside(numbers(answer))
            return
        question = {"role": "user", "content": text}
        context = self.llm.max_model_len
        fitted = fit(self.system, [*self.turns, question], self.llm.count_tokens, context, self.sampling.max_tokens)
        if fitted.num_dropped:
            turns = "turn was" if fitted.num_dropped == 1 else f"{fitted.num_dropped} turns were"
            self.screen.notice(f"the context of {context} tokens is full: the oldest {turns} dropped")
        sampling = within(self.sampling, fitted.num_tokens, context)
        answer = show(self.llm.stream(conversation(self.system, fitted.turns), sampling), self.screen.answer)
        self._remember(fitted.turns, answer)
        self.screen.aside(numbers(answer))

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

    def _clear(self, _: str) -> None:
        self.turns = []
        self.screen.aside("the conversation is forgotten")

    def _stats(self, _: str) -> None:
        messages = conversation(self.system, self.turns)
        tokens = self.llm.count_tokens(messages) if messages else 0
        turns = len(self.turns) // 2
        self.screen.line(f"{turns} turn{'' if turns == 1 else 's'}, {tokens} of {self.llm.max_model_len} tokens of context")


def describe(sampling: SamplingParams) -> str:
    """The parameters that differ from their defaults, for the line above a chat."""
    changed = {f.name: getattr(sampling, f.name) for f in fields(SamplingParams) if getattr(sampling, f.name) != f.default}
    changed.pop("max_tokens", None)
    return ", ".join(f"{name} {_shown(value)}" for name, value in changed.items()) or f"temperature {sampling.temperature:g}"


def read_message() -> str:
    """One message: a line, or lines between triple quotes."""
    text = input(PROMPT)
    if not text.strip().startswith(QUOTES):
        return text
    lines = [text.strip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(input(CONTINUED))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(repr(item) for item in value) or "none"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
