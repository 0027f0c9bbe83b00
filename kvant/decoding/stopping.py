"""When a sequence ends. One function, one order of checks, for every strategy.

    order   1  end token        the model's own (`Request.end_token_ids`), unless ignore_eos   STOP, no stop_reason
            2  stop token       `stop_token_ids`                                               STOP, the id
            3  stop string      completed by this token                                        STOP, the string
            4  length           max_tokens reached, or the context is full                     LENGTH

Before `min_tokens` output tokens exist 1 to 3 do not count (the sampler also keeps end tokens from being drawn until then);
a stop string that was completed earlier is simply part of the text. What ends the text by meaning goes before what cuts it:
a last allowed token that completes a stop string is a STOP.

A token that ends a sequence stays in `token_ids`, as vLLM has it; whether its text is shown is decided where text is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvant.config.sampling import SamplingParams
from kvant.types import FinishReason, Request


class StopMatcher(Protocol):
    """Looks for a request's stop strings in the bytes of its tokens; keeps a short tail. `tokenizer/stops.py` has it."""

    def push(self, token_id: int) -> str | None:
        """One more token. Returns the stop string that it completes, if any."""

    def fork(self) -> "StopMatcher":
        """A matcher that goes on from here by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeContext:
    """What decoding must know of the engine: the context's length, and how to look for stop strings."""

    max_model_len: int
    new_matcher: Callable[[SamplingParams], StopMatcher]  # for a request that has stop strings


class Ending(NamedTuple):
    """Whether, and by what, a token ends its sequence."""

    finish: FinishReason | None = None
    stop_reason: int | str | None = None


GOES_ON = Ending()


def ending(request: Request, token: int, num_tokens: int, matcher: StopMatcher | None, max_model_len: int) -> Ending:
    """What `token` means for its sequence, which holds `num_tokens` tokens with it, the prompt among them.

    To be called once for every token, in order: `matcher` has to see them all.
    """
    sampling = request.sampling
    num_output = num_tokens - len(request.prompt_token_ids)
    if num_output >= sampling.min_tokens:
        if token in request.end_token_ids and not sampling.ignore_eos:
            return Ending(FinishReason.STOP)
        if token in sampling.stop_token_ids:
            return Ending(FinishReason.STOP, token)
    if matcher is not None:
        found = matcher.push(token)
        if found is not None and num_output >= sampling.min_tokens:
            return Ending(FinishReason.STOP, found)
    if num_tokens >= max_model_len or (sampling.max_tokens is not None and num_output >= sampling.max_tokens):
        return Ending(FinishReason.LENGTH)
    return GOES_ON
