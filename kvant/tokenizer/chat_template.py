"""Chat templates: a conversation becomes text, together with the knowledge of which characters are content.

    messages ──render──▶ Rendered(text, content)  ──Tokenizer.encode_chat──▶ ids
                         '<|im_start|>user\\nHi <|im_end|><|im_end|>\\n'
                                           └─ content ─┘ its spelling of a control token stays plain text

Templates are programs that come with model files, written in jinja2 and made for transformers' dialect of it:
trim_blocks, lstrip_blocks, `raise_exception`, `strftime_now`, a plain `tojson`, loop controls. They run in `sandbox.py`.
Everything that goes wrong is a TemplateError: the template's own refusal in its own words, or what is wrong with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

from kvant.errors import TemplateError
from kvant.tokenizer.template_text import Span, content_spans, literal

Message = Mapping[str, Any]

# A role of this closed set is as good as written by the template, which may build a marker from it: '<|' + role + '|>'.
# Any other role is content.
ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function", "ipython", "model"})


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text; `content` are the spans, in order, that the template did not write itself."""

    text: str
    content: tuple[Span, ...]


class ChatTemplate:
    """One template of one model. `bos_token` and `eos_token` are the spellings it may print; "" where there is none."""

    def __init__(self, source: str, bos_token: str = "", eos_token: str = ""):
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Rendered:
        """The conversation as the model was trained to see it.

        `variables` are further names the template may look at (`enable_thinking=False`). Raises TemplateError when the
        template refuses the conversation, fails on it, or is itself unsafe.
        """
        from kvant.tokenizer.sandbox import execute_template

        names = {
            **variables,
            "messages": [_checked(message) for message in _not_empty(messages)],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": literal(self.bos_token),
            "eos_token": literal(self.eos_token),
        }
        code = self._code
        try:
            text = execute_template(code, names)
        except Exception as error:  # whatever a stranger's program raises is that program's failure
            raise _explained(error, "refuses or fails on this conversation") from error
        return Rendered(str.__str__(text), content_spans(text))

    @cached_property
    def _code(self) -> CodeType:
        from kvant.tokenizer.sandbox import compile_template

        try:
            return compile_template(self.source)
        except Exception as error:  # as above: the parser's and Python's own limits included
            raise _explained(error, "cannot be read") from error


def _not_empty(messages: Sequence[Message]) -> Sequence[Message]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TemplateError(f"messages must be a list of messages, not {type(messages).__name__}", param="messages")
    if not messages:
        raise TemplateError("messages is empty; give at least one message", param="messages")
    return messages


def _checked(message: Message) -> dict[str, Any]:
    """The message for the template's eyes: known roles count as the template's own text, everything else as content."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError("every message must be an object with a 'role' that is a string", param="messages")
    role = message["role"]
    return {**message, "role": literal(role) if role in ROLES else role}


def _explained(error: Exception, failure: str) -> TemplateError:
    from jinja2.exceptions import SecurityError, TemplateSyntaxError

    from kvant.tokenizer.template_functions import Refusal

    if isinstance(error, Refusal):
        return TemplateError(str(error) or "the chat template refuses this conversation", param="messages")
    if isinstance(error, SecurityError):
        return TemplateError(f"the chat template is unsafe and was stopped: {error}", param="chat_template")
    if isinstance(error, (RecursionError, MemoryError)):
        return TemplateError("the chat template is unsafe and was stopped: it nests too deeply", param="chat_template")
    if isinstance(error, TemplateSyntaxError):
        return TemplateError(f"the chat template {failure}: line {error.lineno}: {error.message}", param="chat_template")
    return TemplateError(f"the chat template {failure}: {type(error).__name__}: {error}", param="messages")
