"""`kvant run`: one answer for `-p` and pipes, else a chat.

Everything that can be checked is checked before the model is loaded: options, then the store, then torch.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvant.cli.answer import numbers, show
from kvant.cli.doors import Doors
from kvant.cli.history import conversation, within
from kvant.cli.models import fetched, model_argument
from kvant.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS, chosen, config_file, generated, layers
from kvant.config.engine import DEFAULT_MODEL, EngineConfig
from kvant.config.explain import merged
from kvant.config.sampling import SamplingParams
from kvant.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from kvant.cli.chat import Chat
    from kvant.llm import LLM

# Any of these says that the answer shall be drawn, not taken greedily.
DRAWING = ("temperature", "top_p", "top_k", "min_p", "seed")
# For a chat with a model that recommends nothing: lively, without the tail of nonsense.
CHAT_SAMPLING = {"temperature": 0.7, "top_p": 0.95}
# A model without a chat template never feels that it is done; a small one that answers greedily may fall into a loop. A chat
# has a person who can stop it.
MAX_COMPLETION_TOKENS = 256
MAX_ANSWER_TOKENS = 512
HISTORY = "chat_history"  # the file in the cache folder


@click.command()
@model_argument(
    f"Alias, .gguf file, folder, Hugging Face model org/name or dummy:CONFIG.json [default: {DEFAULT_MODEL}]", required=False
)
@click.option("--prompt", "-p", metavar="TEXT", help="Answer this and exit")
@click.option("--system", metavar="TEXT", default="", help="The system prompt")
@click.option("--raw", is_flag=True, help="Continue the text as it is: no chat template")
@click.option("--plain", is_flag=True, help="Show answers as they are: no rendering of Markdown")
@click.option("--stats/--no-stats", default=None, help="Speed on stderr after the answer; by default on a terminal")
@click.option("--history/--no-history", "keep", default=True, help="Remember the lines typed in a chat")
@config_file
@generated(engine=ENGINE_OPTIONS, sampling=SAMPLING_OPTIONS)
@click.pass_obj
def run(
    doors: Doors,
    *,
    model: str | None,
    prompt: str | None,
    system: str,
    raw: bool,
    plain: bool,
    stats: bool | None,
    keep: bool,
    config: Path | None,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to a model: a chat, or one answer with -p or piped text.

    An answer for -p or a pipe is greedy unless a sampling option is given; a chat samples as the model recommends.
    Without --max-tokens an answer in a chat may fill the context, one for -p or a pipe has 512 tokens (256 where there is no
    chat template).
    """
    given = merged(layers(config, model, engine, sampling))
    sampling = chosen(given, SAMPLING_OPTIONS)
    SamplingParams(**{"max_tokens": None, **sampling})  # refuses what cannot be, before the model is loaded
    options = EngineConfig(model=given.get("model", DEFAULT_MODEL), **chosen(given, ENGINE_OPTIONS))
    if raw and system:
        raise ConfigError("--system needs the chat template that --raw switches off; give one of them")
    question = _question(doors, prompt)
    llm = _open(doors, options)
    templated = _templated(doors, llm, raw, system)
    params = sampling_for(sampling, llm.default_sampling, chat=question is None, templated=templated)
    if question is None:
        from kvant.cli.chat import Chat

        chat = Chat(llm, doors.screen, params, system=system, templated=templated, plain=plain)
        _talk(doors, chat, options.model, keep)
        return
    message = conversation(system, [{"role": "user", "content": question}]) if templated else question
    if "max_tokens" not in sampling:
        num_tokens = llm.count_tokens(message) if templated else len(llm.tokenizer.encode(question))
        params = within(params, num_tokens, llm.max_model_len)
    with doors.screen.rendering(templated and not plain) as write:
        answer = show(llm.stream(message, params), write)
    if answer.stopped:
        raise KeyboardInterrupt
    if answer.finish_reason == "length" and "max_tokens" not in sampling:
        doors.screen.notice(f"cut after {answer.num_tokens} tokens; --max-tokens allows more")
    if stats if stats is not None else doors.screen.shows_numbers:
        doors.screen.aside(numbers(answer))


def sampling_for(given: dict[str, Any], recommended: dict[str, Any], *, chat: bool, templated: bool) -> SamplingParams:
    """What the user gave, over what the model recommends, over what suits the occasion."""
    limit = MAX_ANSWER_TOKENS if templated else MAX_COMPLETION_TOKENS
    base: dict[str, Any] = {"max_tokens": None if chat and templated else max(limit, given.get("min_tokens", 0))}
    if chat:
        base |= recommended or CHAT_SAMPLING
    elif any(name in given for name in DRAWING):
        base |= recommended
    else:
        base["temperature"] = 0.0
    return SamplingParams(**{**base, **given})


def _question(doors: Doors, prompt: str | None) -> str | None:
    """The text to answer once, or None for a chat."""
    if prompt is None and doors.screen.talks:
        return None
    if prompt is None and sys.stdin.isatty():
        raise ConfigError("a chat needs a terminal to write to; give the question with -p, or pipe it in")
    text = sys.stdin.read().rstrip("\n") if prompt is None else prompt
    if not text.strip():
        raise RequestError("the prompt is empty; give a question with -p, or pipe one in", param="prompt")
    return text


def _open(doors: Doors, config: EngineConfig) -> "LLM":
    fetched(doors, config.model)
    with doors.screen.waiting(f"loading {config.model} ..."):
        llm = doors.open_llm(config)
    for notice in llm.notices:
        doors.screen.notice(notice)
    return llm


def _templated(doors: Doors, llm: "LLM", raw: bool, system: str) -> bool:
    """Whether questions go through the model's chat template."""
    if raw:
        return False
    if llm.tokenizer.chat_template is not None:
        return True
    if system:
        raise ConfigError("--system needs a chat template, and this model has none")
    doors.screen.notice("this model has no chat template: it continues the text instead of answering")
    return False


def _talk(doors: Doors, chat: "Chat", model: str, keeps_history: bool) -> None:
    from kvant.cli.chat import describe
    from kvant.cli.message import history

    llm = chat.llm
    origin = " (recommended by the model)" if llm.default_sampling else ""
    doors.screen.aside(f"{model} · context {llm.max_model_len} tokens · {describe(chat.sampling)}{origin} · /help")
    with history(doors.environment.cache / HISTORY if keeps_history else None):
        chat.loop()
