"""SamplingParams: how one request wants its tokens chosen, and when it ends.

The names are the ones vLLM and OpenAI users already know. A value that cannot be honoured is refused here, before the
request meets anybody else's, with the name of the field. `temperature=0` means greedy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvant.config.option import option
from kvant.config.values import INT64, real, shown, truth, whole
from kvant.errors import RequestError

MAX_CHOICES = 128  # n
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of one stop string
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROBS = 64
MAX_BIASES = 1024
LARGEST_BIAS = 100.0  # OpenAI's bound: as good as forbidding, or demanding, a token
GREEDY_TEMPERATURE = 1e-5  # below this the division would overflow; the limit distribution is the argmax anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request wants its tokens chosen. Immutable; raises `RequestError` (a `ValueError`) for impossible values."""

    n: int = option(1, "how many choices to generate for the prompt")
    temperature: float = option(1.0, "0 is greedy; higher is more varied")
    top_p: float = option(1.0, "keep the smallest set of tokens whose probability reaches this (Holtzman et al., 2020)")
    top_k: int = option(0, "keep the k most probable tokens; 0 or -1: all")
    min_p: float = option(0.0, "keep tokens at least this likely relative to the most likely one")
    presence_penalty: float = option(0.0, "subtracted once from the logit of every token generated so far")
    frequency_penalty: float = option(0.0, "subtracted per occurrence from the logit of every token generated so far")
    repetition_penalty: float = option(1.0, "divides (multiplies if negative) the logit of every token seen so far")
    logit_bias: tuple[tuple[int, float], ...] = option((), "added to the logits of tokens: {id: from -100 to 100}")
    seed: int | None = option(None, "makes the choices reproducible; any 64-bit integer")
    stop: tuple[str, ...] = option((), "strings that end the text; they are not part of it")
    stop_token_ids: tuple[int, ...] = option((), "token ids that end the text")
    include_stop_str_in_output: bool = option(False, "keep the stop string in the text")
    ignore_eos: bool = option(False, "go on after an end-of-sequence token")
    max_tokens: int | None = option(16, "the most tokens to generate; None: up to the context's end")
    min_tokens: int = option(0, "no stop condition counts before this many tokens")
    logprobs: int | None = option(None, "log-probabilities of this many alternatives per generated token")
    prompt_logprobs: int | None = option(None, "the same for every prompt token")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")
    detokenize: bool = option(True, "produce text at all")

    def __post_init__(self) -> None:
        # Lists, single strings and numpy's numbers are what people write; tuples and plain numbers can be shared safely.
        self._check_numbers()
        self._check_stops()
        self._keep("logit_bias", _biases(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken. Tiny temperatures and top_k=1 come to the same."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def with_changes(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed; unknown names are refused."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise RequestError(f"unknown sampling parameter {name!r}; known are {', '.join(sorted(known))}", param=name)
        return replace(self, **changes)

    def _check_numbers(self) -> None:
        self._keep_whole("n", 1, MAX_CHOICES)
        self._keep_real("temperature", 0, 100)
        self._keep_real("top_p", 0, 1)
        if self.top_p == 0:
            # A zero mass still keeps the most probable token, as everywhere in this field: it means greedy.
            self._keep("top_k", 1)
        self._keep_whole("top_k", -1, 2**31 - 1)
        self._keep_real("min_p", 0, 1)
        self._keep_real("presence_penalty", -2, 2)
        self._keep_real("frequency_penalty", -2, 2)
        self._keep_real("repetition_penalty", 0.01, 100)
        self._keep_whole("min_tokens", 0, 2**31 - 1)
        for name, low, high in (
            ("seed", *INT64),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            if getattr(self, name) is not None:
                self._keep_whole(name, low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens}); lower one of them",
                param="min_tokens",
            )
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            truth(name, getattr(self, name), RequestError)

    def _check_stops(self) -> None:
        stop: Any = self.stop
        self._keep("stop", (stop,) if isinstance(stop, str) else _listed("stop", stop, "strings"))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, not {len(self.stop)}", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop strings must be non-empty strings, not {shown(text)}", param="stop")
            if len(text) > MAX_STOP_LENGTH:
                raise RequestError(f"a stop string may have {MAX_STOP_LENGTH} characters, not {len(text)}", param="stop")
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise RequestError(f"the stop string {shown(text)} is not valid Unicode: half a surrogate pair", param="stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True; use stop_token_ids instead", param="stop")
        ids = _listed("stop_token_ids", self.stop_token_ids, "token ids")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed", param="stop_token_ids")
        self._keep("stop_token_ids", tuple(whole("stop_token_ids", token, 0, 2**31 - 1, RequestError) for token in ids))

    def _keep_whole(self, name: str, low: int, high: int) -> None:
        self._keep(name, whole(name, getattr(self, name), low, high, RequestError))

    def _keep_real(self, name: str, low: float, high: float) -> None:
        self._keep(name, real(name, getattr(self, name), low, high, RequestError))

    def _keep(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _listed(name: str, value: Any, what: str) -> tuple[Any, ...]:
    """`value`, a list of any kind or None, as a tuple."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise RequestError(f"{name} must be a list of {what}, not {shown(value)}", param=name)
    return tuple(value)


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """A mapping of token ids (JSON spells them as strings) to biases, as pairs in order of id."""
    try:
        items = list(given.items() if isinstance(given, Mapping) else given or ())
        pairs = [(token, bias) for token, bias in items]
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias must map token ids to numbers, not {shown(given)}", param="logit_bias") from None
    if len(pairs) > MAX_BIASES:
        raise RequestError(f"logit_bias may have {MAX_BIASES} entries, not {len(pairs)}", param="logit_bias")
    kept = {}
    for token, bias in pairs:
        name = f"logit_bias[{shown(token)}]"
        spelled = isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 11
        try:
            number = whole("id", int(token) if spelled else token, 0, 2**31 - 1, RequestError)
        except RequestError:
            raise RequestError(f"{name}: the key must be a token id, a whole number", param="logit_bias") from None
        try:
            kept[number] = real(name, bias, -LARGEST_BIAS, LARGEST_BIAS, RequestError)
        except RequestError as error:
            raise RequestError(str(error), param="logit_bias") from None
    return tuple(sorted(kept.items()))
