"""What users hand over: prompts, conversations and sampling parameters of many shapes, made into one.

    "text" · [1, 2, 3] · array of ids · {"prompt": ...} · {"prompt_token_ids": ...}         one prompt
    a list, or anything that can be iterated, of those                                      several
    [{"role": ..., "content": ...}, ...]                                                    one conversation; a list: several

Ids may be numpy's or torch's numbers. Whatever is none of this is refused by name, before anything is computed.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvant.config.sampling import SamplingParams
from kvant.config.values import shown
from kvant.errors import RequestError
from kvant.tokenizer.tokenizer import Tokenizer

Prompt = str | Sequence[int] | dict[str, Any]
Messages = Sequence[dict[str, Any]]
Encoded = tuple[str | None, list[int]]  # a prompt's text, where it has one of its own, and its ids

PROMPT_KEYS = ("prompt", "prompt_token_ids")


def encode_prompts(tokenizer: Tokenizer, prompts: Prompt | Iterable[Prompt]) -> list[Encoded]:
    """One prompt, or several."""
    if isinstance(prompts, (str, Mapping)):
        return [encode_prompt(tokenizer, prompts)]
    items = _items(prompts)
    if items and all(_id(item) is not None for item in items):
        return [encode_prompt(tokenizer, items)]
    return [encode_prompt(tokenizer, item) for item in items]


def encode_prompt(tokenizer: Tokenizer, prompt: Any) -> Encoded:
    """A text, ids, or a dict that holds one of them."""
    if isinstance(prompt, str):
        return prompt, tokenizer.encode(prompt)
    if isinstance(prompt, Mapping):
        known = [key for key in PROMPT_KEYS if key in prompt]
        if len(known) != 1 or len(prompt) != 1:
            raise RequestError(
                f"a prompt dict holds either 'prompt' or 'prompt_token_ids', not {shown(list(prompt))}", param="prompt"
            )
        prompt = prompt[known[0]]
        if isinstance(prompt, Mapping) or (isinstance(prompt, str) and known == ["prompt_token_ids"]):
            raise _neither(prompt)
        return encode_prompt(tokenizer, prompt)
    ids = [_id(token) for token in _items(prompt)]
    if None in ids:
        raise _neither(prompt)
    return None, [token for token in ids if token is not None]


def encode_conversations(tokenizer: Tokenizer, messages: Any, **template: Any) -> list[Encoded]:
    """One conversation, or several."""
    listed = _listed_messages(messages)
    if not listed or isinstance(listed[0], Mapping):
        return [encode_conversation(tokenizer, listed, **template)]
    return [encode_conversation(tokenizer, each, **template) for each in listed]


def encode_conversation(tokenizer: Tokenizer, messages: Any, **template: Any) -> Encoded:
    return None, tokenizer.encode_chat(_listed_messages(messages), **template)


def is_conversation(prompt: Any) -> bool:
    """Whether this is a conversation, where a prompt might stand too."""
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], Mapping)


def encode_any(tokenizer: Tokenizer, prompt: Any) -> Encoded:
    """A prompt or a conversation."""
    if is_conversation(prompt):
        return encode_conversation(tokenizer, prompt)
    return encode_prompt(tokenizer, prompt)


def params_for(sampling_params: Any, count: int, default: SamplingParams) -> list[SamplingParams]:
    """The parameters of `count` prompts: `default` where there are none, one for all, or one for each."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or default] * count
    if isinstance(sampling_params, (str, bytes, Mapping)) or not isinstance(sampling_params, Iterable):
        raise _no_params(sampling_params)
    params = list(sampling_params)
    for each in params:
        if not isinstance(each, SamplingParams):
            raise _no_params(each)
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one for all, or one for each")
    return params


def _items(prompt: Any) -> list[Any]:
    # Bytes can be iterated and give numbers, which would be taken for token ids.
    if isinstance(prompt, (bytes, bytearray, memoryview)) or not isinstance(prompt, Iterable):
        raise _neither(prompt)
    return list(prompt)


def _id(token: Any) -> int | None:
    """`token` as a plain whole number, if it is one."""
    if isinstance(token, (bool, str)):
        return None
    try:
        return operator.index(token)
    except TypeError:
        return None


def _listed_messages(messages: Any) -> list[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise RequestError(f"messages must be a list of messages, not {shown(messages)}", param="messages")
    return list(messages)


def _neither(prompt: Any) -> RequestError:
    return RequestError(f"a prompt is a text or a list of token ids, not {shown(prompt)}", param="prompt")


def _no_params(value: Any) -> RequestError:
    return RequestError(
        f"sampling_params must be SamplingParams(...), or a list of those, not {shown(value)}",
        param="sampling_params",
    )
