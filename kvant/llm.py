"""LLM and AsyncLLM: the Python doors. Prompts in, texts out; everything that arrives together is computed together.

llm = LLM("smollm2-135m")                                       computes in this process, while it is called
llm.generate(["The capital of France is"], SamplingParams(temperature=0))
llm.chat([{"role": "user", "content": "Hello"}])
for event in llm.stream("Once upon a time"): print(event.text, end="")

async with AsyncLLM("smollm2-135m") as llm:                     computes in a process of its own, for any number of tasks
    async for output in llm.generate("The capital of France is"): ...
    async for output in llm.chat([{"role": "user", "content": "Hello"}]): ...
    async for event in llm.stream("Once upon a time"): print(event.text, end="")
"""

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvant.config.engine import DEFAULT_MODEL, EngineConfig
from kvant.config.sampling import SamplingParams
from kvant.engine.outputs import RequestOutput, RequestText, StreamEvent, joined
from kvant.engine.prompts import (
    Encoded,
    Messages,
    Prompt,
    encode_any,
    encode_conversation,
    encode_conversations,
    encode_prompt,
    encode_prompts,
    is_conversation,
    params_for,
)
from kvant.engine.turns import Turns
from kvant.errors import ConfigError, GenerationError
from kvant.tokenizer.tokenizer import Tokenizer
from kvant.types import Request, StepInput

if TYPE_CHECKING:
    from kvant.engine.async_engine import AsyncEngine


class LLM:
    """A model, ready to answer. Keyword arguments are the fields of `EngineConfig`.

    Without sampling parameters a request is drawn as the model's authors recommend (`default_sampling`), and a chat goes on
    to the end of the context. Threads may share an LLM: what they ask at the same time is computed together.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any):
        from kvant.engine.create import create

        created = create(_config(model, options))
        self.config = created.config
        self.engine = created.engine
        self.tokenizer = created.tokenizer
        self.max_model_len: int = created.engine.context.max_model_len
        self.default_sampling: dict[str, Any] = created.default_sampling
        self.notices: tuple[str, ...] = created.notices
        self.reasons: tuple[str, ...] = created.reasons
        self._turns = Turns()
        self._texts: dict[str, RequestText] = {}
        self._streams: dict[str, deque[StreamEvent]] = {}  # events that wait for their reader

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answers every prompt: a text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}, or a list of those.

        All are checked before any is computed. A request that fails while it runs has finish_reason "error" and leaves the
        others alone.
        """
        encoded = encode_prompts(self.tokenizer, prompts)
        return self._answer(encoded, params_for(sampling_params, len(encoded), _recommended(self.default_sampling)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation, or a list of them. `template` goes to the chat template (add_generation_prompt, ...)."""
        encoded = encode_conversations(self.tokenizer, messages, **template)
        return self._answer(encoded, params_for(sampling_params, len(encoded), _recommended(self.default_sampling, chat=True)))

    def stream(self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None) -> Iterator[StreamEvent]:
        """The answer to one prompt or conversation, piece by piece. Closing the iterator cancels the request."""
        text, ids = encode_any(self.tokenizer, prompt)
        (params,) = params_for(sampling_params, 1, _recommended(self.default_sampling, chat=is_conversation(prompt)))
        # Checked here, so that a wrong request raises at once and not at the first `next`.
        request = self.engine.request(ids, params, arrival=time.monotonic())
        return self._events(request, text)

    def count_tokens(self, messages: Messages) -> int:
        """How many prompt tokens the conversation takes."""
        return len(encode_conversation(self.tokenizer, messages)[1])

    def _answer(self, encoded: list[Encoded], params: list[SamplingParams]) -> list[RequestOutput]:
        now = time.monotonic()
        requests = [self.engine.request(ids, each, arrival=now) for (_, ids), each in zip(encoded, params, strict=True)]
        texts: list[RequestText] = []
        try:
            for request, (text, _) in zip(requests, encoded, strict=True):
                texts.append(RequestText(request, text, self.tokenizer, now))
                self._start(texts[-1])

            def finished() -> bool:
                return all(text.output.finished for text in texts)

            while not finished():
                self._step(finished)
        finally:
            for text in texts:  # Ctrl-C, or a fault of the engine: nothing may go on unseen
                self._drop(text)
        return [text.output for text in texts]

    def _events(self, request: Request, prompt: str | None) -> Iterator[StreamEvent]:
        text = RequestText(request, prompt, self.tokenizer, request.arrival)
        events: deque[StreamEvent] = deque()

        def has_news() -> bool:
            return bool(events) or text.output.finished

        try:
            self._streams[request.request_id] = events
            self._start(text)
            while events or not text.output.finished:
                while events:
                    yield events.popleft()
                if not text.output.finished:
                    self._step(has_news)  # another stream may have taken this one's steps: its events wait above
                    if not events:
                        yield StreamEvent(index=0, text="", token_ids=())  # a sign of life while a long prompt is computed
        finally:
            self._streams.pop(request.request_id, None)
            self._drop(text)

    def _start(self, text: RequestText) -> None:
        self._texts[text.request.request_id] = text
        self.engine.add(text.request)

    def _drop(self, text: RequestText) -> None:
        if self._texts.pop(text.request.request_id, None) is not None and not text.output.finished:
            self.engine.abort(text.request.request_id)

    def _step(self, satisfied: Callable[[], bool]) -> None:
        """One step for everybody, taken here or by another thread, unless the caller is `satisfied` already."""
        self._turns.step(self._compute, satisfied)

    def _compute(self) -> None:
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


class AsyncLLM:
    """A model in a process of its own, for any number of tasks of one event loop. Options as of `LLM`.

    `async with` starts and ends the process; so do `start` and `close`, and the first request starts it too. Text is made
    in the caller's process, which never loads torch. Leaving an iterator early, by `break`, `aclose` or a cancelled task,
    aborts its request. When the process dies, every answer under way and every later call raises `GenerationError`.
    """

    # asyncio and AsyncEngine are imported where they are used: an LLM starts 20 ms earlier without them.

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any):
        import asyncio

        self.config = _config(model, options)  # with everything decided, once it has started
        self._starting = asyncio.Lock()
        self._engine: AsyncEngine | None = None

    async def start(self) -> "AsyncLLM":
        """Starts the process and waits until the model is loaded; raises what `LLM(...)` raises. Idempotent."""
        from kvant.engine.async_engine import AsyncEngine

        async with self._starting:
            if self._engine is None:
                self._engine = await AsyncEngine.start(self.config)
                self.config = self._engine.config
        return self

    async def close(self) -> None:
        """Ends the process; answers under way raise `GenerationError`, as later calls do. Idempotent."""
        if self._engine is not None:
            await self._engine.close()

    async def __aenter__(self) -> "AsyncLLM":
        return await self.start()

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    @property
    def is_running(self) -> bool:
        """Whether requests can be made: started, and neither closed nor dead."""
        return self._engine is not None and self._engine.is_running

    @property
    def engine(self) -> "AsyncEngine":
        """The engine behind it, with `tokenizer`, `default_sampling`, `reasons`, `notices`. Raises before the start."""
        if self._engine is None:
            raise ConfigError("this AsyncLLM has not started yet; use it in `async with`, or await its start()")
        return self._engine

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.admission.max_model_len

    @property
    def default_sampling(self) -> dict[str, Any]:
        return self.engine.default_sampling

    @property
    def notices(self) -> tuple[str, ...]:
        return self.engine.notices

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.engine.reasons

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """The answer to one prompt, as it stands after each piece of news: one RequestOutput, which grows."""
        async with aclosing(self._answer(encode_prompt, prompt, sampling_params)) as answer:
            async for output, _ in answer:
                yield output

    async def chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None, **template: Any
    ) -> AsyncIterator[RequestOutput]:
        """The same for a conversation. `template` goes to the chat template (add_generation_prompt, ...)."""
        async with aclosing(self._answer(encode_conversation, messages, sampling_params, **template)) as answer:
            async for output, _ in answer:
                yield output

    async def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None
    ) -> AsyncIterator[StreamEvent]:
        """The answer piece by piece. A reader who is slower than the model gets larger pieces."""
        async with aclosing(self._answer(encode_any, prompt, sampling_params)) as answer:
            async for _, events in answer:
                for event in events:
                    yield event

    def count_tokens(self, messages: Messages) -> int:
        """How many prompt tokens the conversation takes."""
        return len(encode_conversation(self.tokenizer, messages)[1])

    async def _answer(
        self, encode: Callable[..., Encoded], prompt: Any, sampling_params: SamplingParams | None, **template: Any
    ) -> AsyncIterator[tuple[RequestOutput, list[StreamEvent]]]:
        import asyncio

        engine = (await self.start()).engine
        # In a thread: long prompts and chat templates may take seconds, and other tasks go on meanwhile.
        prompt_text, ids = await asyncio.to_thread(encode, engine.tokenizer, prompt, **template)
        chat = encode is encode_conversation or (encode is encode_any and is_conversation(prompt))
        (params,) = params_for(sampling_params, 1, _recommended(engine.default_sampling, chat=chat))
        with engine.answer(ids, params) as answer:
            text = RequestText(answer.request, prompt_text, engine.tokenizer, answer.request.arrival)
            while not text.output.finished:
                events = [text.receive(news.output, news.time) for news in await answer.take()]
                yield text.output, joined(events)


def _config(model: str, options: dict[str, Any]) -> EngineConfig:
    known = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known are {', '.join(known)}", param=name)
    return EngineConfig(model=str(model), **options)


def _recommended(default_sampling: dict[str, Any], chat: bool = False) -> SamplingParams:
    """For who gives no parameters: the model's own, and in a chat no limit but the context."""
    return SamplingParams(**default_sampling, **({"max_tokens": None} if chat else {}))
