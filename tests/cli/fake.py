"""A model that is no model: the interface of LLM, words for tokens, answers from a list. Also the program around it.

`python -m tests.cli.fake ARGUMENTS` is `kvant ARGUMENTS` with this model; $FAKE holds FakeLLM's settings as JSON.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvant.cli.doors import Doors
from kvant.cli.screen import Screen
from kvant.config.environment import Environment, read_environment
from kvant.config.hardware import Hardware
from kvant.errors import CapacityError, ContextLengthError

MODEL = f"dummy:{Path(__file__).with_name('config.json')}"  # something that the store finds without a download
HARDWARE = Hardware(
    cpu_name="Fast 9000",
    cpu_flags=frozenset({"avx2", "avx512_bf16"}),
    num_cpus=4,
    num_cores=2,
    memory_total=8 << 30,
    memory_available=6 << 30,
    compiler=None,
)


@dataclass
class FakeLLM:
    """Answers with `replies` in turn, or echoes the last message; one word a token, `delay` seconds apart."""

    replies: list[str] = field(default_factory=list)
    delay: float = 0.0
    template: str | None = "a template"
    max_model_len: int = 100
    default_sampling: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    error: str | None = None  # how every answer ends
    prompts: list[Any] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    num_closed_early: int = 0
    config: Any = field(default_factory=lambda: SimpleNamespace(model="fake"))

    @property
    def tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(chat_template=self.template, encode=str.split)

    def count_tokens(self, messages: list[dict[str, str]]) -> int:
        return sum(1 + len(message["content"].split()) for message in messages)

    def stream(self, prompt: Any, params: Any) -> Iterator[SimpleNamespace]:
        self.prompts.append(prompt)
        self.params.append(params)
        tokens = len(prompt.split()) if isinstance(prompt, str) else self.count_tokens(prompt)
        if tokens >= self.max_model_len or (params.max_tokens and tokens + params.max_tokens > self.max_model_len):
            raise ContextLengthError(f"{tokens} prompt tokens do not fit into a context of {self.max_model_len}")
        last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        answer = self.replies[(len(self.prompts) - 1) % len(self.replies)] if self.replies else f"You said: {last}"
        return self._events(re.findall(r"\S+\s*|\s+", answer), params, tokens)

    def _events(self, words: list[str], params: Any, num_prompt_tokens: int) -> Iterator[SimpleNamespace]:
        limit = params.max_tokens or self.max_model_len
        reason = "length" if len(words) > limit else "stop"
        words = words[:limit]
        finished = False
        try:
            for index, word in enumerate(words):
                time.sleep(self.delay)
                last = index == len(words) - 1
                finished = last
                metrics = SimpleNamespace(
                    num_prompt_tokens=num_prompt_tokens,
                    num_cached_tokens=0,
                    num_output_tokens=len(words),
                    time_to_first_token=0.25,
                    decode_tokens_per_second=31.0,
                )
                yield SimpleNamespace(
                    text=word,
                    token_ids=(index,),
                    finish_reason=("error" if self.error else reason) if last else None,
                    stop_reason=None,
                    error=self.error if last else None,
                    metrics=metrics if last else None,
                )
        finally:
            self.num_closed_early += not finished


def doors(llm: FakeLLM, cache: Path, **changes: Any) -> Doors:
    def open_llm(config: Any) -> FakeLLM:
        if config.kv_cache_memory_bytes == 1:
            raise CapacityError(
                "there is no room for keys and values; raise kv_cache_memory_bytes", param="kv_cache_memory_bytes"
            )
        llm.config = config
        return llm

    standing = {"environment": Environment(cache=cache, offline=True), "screen": Screen(), "open_llm": open_llm}
    return Doors(**{**standing, "detect": lambda: HARDWARE, **changes})


if __name__ == "__main__":
    from kvant.cli.main import main

    settings = json.loads(os.environ.get("FAKE", "{}"))
    screen = Screen(read_environment().color)
    main(doors=doors(FakeLLM(**settings), Path(os.environ["KVANT_CACHE"]), screen=screen))
