"""LLM: the Python door. Prompts in, texts out; everything that arrives together is computed together.

llm = LLM("smollm2-135m")
llm.generate(["The capital of France is"], SamplingParams(temperature=0))
llm.chat([{"role": "user", "content": "Hello"}])
for event in llm.stream("Once upon a time"): print(event.text, end="")
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from kvant.config.engine import DEFAULT_MODEL, EngineConfig
from kvant.config.sampling import SamplingParams
from kvant.engine.outputs import RequestOutput, RequestText, StreamEvent
from kvant.errors import ConfigError, GenerationError, RequestError
from kvant.types import Request, StepInput

Prompt = str | Sequence[int] | dict[str, Any]
Messages = Sequence[dict[str, Any]]


class LLM:
    """A model, ready to answer. Keyword arguments are the fields of `EngineConfig`."""

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any):
        from kvant.engine.create import create

        try:
            self.config = EngineConfig(model=str(model), **options)
        except TypeError as error:
            raise ConfigError(f"unknown option: {error}; see EngineConfig for the options") from None
        created = create(self.config)
        self.config = created.config
        self.engine = created.engine
        self.tokenizer = created.tokenizer
        self.max_model_len: int = created.engine.context.max_model_len
        self.default_sampling: dict[str, Any] = created.default_sampling
        self.notices: tuple[str, ...] = created.notices
        self.reasons: tuple[str, ...] = created.reasons
        self._texts: dict[str, RequestText] = {}
        self._streams: dict[str, deque[StreamEvent]] = {}  # events that wait for their reader

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answers every prompt: a text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}, or a list of those.

        All are checked before any is computed. A request that fails while it runs has finish_reason "error" and leaves the
        others alone.
        """
        items = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[arg-type]
        encoded = [self._encode(item) for item in items]
        return self._answer(encoded, sampling_params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or a list of them. `template` goes to the chat template (add_generation_prompt, ...)."""
        conversations = [messages] if not messages or isinstance(messages[0], dict) else list(messages)
        encoded = [(None, self.tokenizer.encode_chat(list(conversation), **template)) for conversation in conversations]
        return self._answer(encoded, sampling_params)

    def stream(self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """The answer to one prompt or conversation, piece by piece. Closing the iterator cancels the request."""
        if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], dict):
            text, ids = None, self.tokenizer.encode_chat(list(prompt))
        else:
            text, ids = self._encode(prompt)  # type: ignore[arg-type]
        # Checked here, so that a wrong request raises at once and not at the first `next`.
        request = self.engine.request(ids, sampling_params or SamplingParams(), arrival=time.monotonic())
        return self._events(request, text)

    def count_tokens(self, messages: Messages) -> int:
        """How many prompt tokens the conversation takes."""
        return len(self.tokenizer.encode_chat(list(messages)))

    def _answer(self, encoded: list[tuple[str | None, list[int]]], sampling_params: Any) -> list[RequestOutput]:
        params = _params_of(sampling_params, len(encoded))
        now = time.monotonic()
        requests = [self.engine.request(ids, each, arrival=now) for (_, ids), each in zip(encoded, params, strict=True)]
        texts = [self._start(request, text) for request, (text, _) in zip(requests, encoded, strict=True)]
        try:
            while not all(text.output.finished for text in texts):
                self._step()
        except BaseException:
            for text in texts:  # Ctrl-C, or a fault of the engine: nothing may go on unseen
                self._drop(text)
            raise
        for text in texts:
            self._texts.pop(text.request.request_id, None)
        return [text.output for text in texts]

    def _events(self, request: Request, prompt: str | None) -> Iterator[StreamEvent]:
        text = self._start(request, prompt)
        events = self._streams[request.request_id] = deque()
        try:
            while events or not text.output.finished:
                while events:
                    yield events.popleft()
                if not text.output.finished:
                    self._step()  # another stream may have taken this one's steps: its events wait above
                    if not events:
                        yield StreamEvent(index=0, text="", token_ids=())  # a sign of life while a long prompt is computed
        finally:
            del self._streams[request.request_id]
            self._drop(text)

    def _start(self, request: Request, prompt: str | None) -> RequestText:
        text = RequestText(request, prompt, self.tokenizer, request.arrival)
        self._texts[request.request_id] = text
        self.engine.add(request)
        return text

    def _drop(self, text: RequestText) -> None:
        if self._texts.pop(text.request.request_id, None) is not None and not text.output.finished:
            self.engine.abort(text.request.request_id)

    def _step(self) -> None:
        if not self.engine.has_work():
            raise GenerationError(
                "the engine has nothing to compute although a request is unfinished; this is a fault in Kvant"
            )
        outputs = self.engine.step(StepInput(now=time.monotonic(), messages=self.engine.inbox.receive()))
        now = time.monotonic()
        for output in outputs:
            if (text := self._texts.get(output.request_id)) is None:
                continue  # dropped by its reader
            event = text.receive(output, now)
            if (events := self._streams.get(output.request_id)) is not None:
                events.append(event)

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, dict):
            known = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
            if len(known) != 1 or len(prompt) != 1:
                raise RequestError(
                    f"a prompt dict holds either 'prompt' or 'prompt_token_ids', not {sorted(prompt)}", param="prompt"
                )
            return self._encode(prompt[known[0]])
        ids = list(prompt)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise RequestError(f"a prompt is a text or a list of token ids, not {prompt!r}", param="prompt")
        return None, ids


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, (str, dict)):
        return True
    return bool(prompts) and all(isinstance(token, int) for token in prompts)


def _params_of(sampling_params: Any, count: int) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    params = list(sampling_params)
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one for all, or one for each")
    return params
