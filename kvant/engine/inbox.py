"""Inbox: where requests and cancellations wait for the next step. Any thread may put, the step takes everything at once."""

from collections import deque

from kvant.types import Message


class Inbox:
    """Messages in order of arrival. `deque.append` and `popleft` are atomic, so no lock is needed."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()

    def put(self, message: Message) -> None:
        self._messages.append(message)

    def receive(self) -> tuple[Message, ...]:
        """Everything that arrived since the last call. Never waits."""
        return tuple(self._messages.popleft() for _ in range(len(self._messages)))

    def __len__(self) -> int:
        return len(self._messages)
