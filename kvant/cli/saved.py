"""Conversations in files: JSON, in the form in which messages go to a model.

{"kvant_chat": 1, "model": "smollm2-135m", "messages": [{"role": "system", "content": "..."}, {"role": "user", ...}, ...]}
"""

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from kvant.cli.history import Message, conversation
from kvant.errors import RequestError

VERSION = 1
MAX_BYTES = 64 << 20


class Saved(NamedTuple):
    system: str
    turns: list[Message]


def file_named(words: str, now: datetime) -> Path:
    """The file that `/save WORDS` means; without words one named after the time, in characters that every system allows."""
    return Path(words).expanduser() if words else Path(f"chat-{now:%Y-%m-%d-%H%M%S}.json")


def save(path: Path, model: str, system: str, turns: list[Message]) -> None:
    """Writes the conversation. Raises `RequestError` where the file cannot be written, or holds anything else."""
    if path.exists():
        try:
            load(path)
        except RequestError:
            raise RequestError(f"{path} exists and holds no conversation; choose another name") from None
    content = {"kvant_chat": VERSION, "model": model, "messages": conversation(system, turns)}
    try:
        path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from None


def load(path: Path) -> Saved:
    """Reads a conversation. Raises `RequestError` for anything that is none."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES)
        content = json.loads(data)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("kvant_chat") != VERSION:
        raise RequestError(f"{path} holds no conversation that /save wrote")
    messages = content.get("messages")
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise RequestError(f"{path} is damaged: its messages have no role and content")
    system = ""
    if messages and messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    roles = [message["role"] for message in messages]
    if len(roles) % 2 or roles != ["user", "assistant"] * (len(roles) // 2):
        raise RequestError(f"{path} is damaged: questions and answers must alternate")
    return Saved(system, [{"role": message["role"], "content": message["content"]} for message in messages])


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
