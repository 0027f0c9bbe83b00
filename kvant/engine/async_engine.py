"""AsyncEngine: the caller's side of an engine that computes in a process of its own. No torch is loaded here.

    event loop                      threads               pipes            engine/process.py
    answer() ── Add, Abort ──▶ outbox ──"kvant-write"──▶  stdin  ────────▶ Inbox ─▶ step ─▶ ...
    Answer.take() ◀── Outputs ── deliver ◀──"kvant-read"── stdout ◀──────── Outputs, a list per step

The rules. Nobody waits for a slow reader: what it has not taken lies in its own Answer, which holds at most the rest of that
answer. The event loop never waits for the engine: a thread writes, a thread reads. Only a caller who stops as a whole
stops the engine, whose outputs then stay in the pipe. Whoever leaves an answer early has it aborted. When the process
ends, by itself or by somebody's hand, its pipe ends too, and everything that waits or comes later gets the error.
"""

import asyncio
import copy
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any, NamedTuple

from kvant.config.engine import EngineConfig
from kvant.config.sampling import SamplingParams
from kvant.engine.process import Failure, Ready
from kvant.errors import GenerationError
from kvant.tokenizer.tokenizer import Tokenizer
from kvant.types import Abort, Add, Output, Request

LEAVE_SECONDS = 5.0  # for the step under way; then the process is told, and at last made, to end


class EngineTraceback(Exception):
    """The cause of an error that was raised in the engine's process: its traceback there, as text."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class News(NamedTuple):
    """An Output, and when it arrived (seconds of the monotonic clock)."""

    output: Output
    time: float


class Answer:
    """The Outputs of one request that nobody has taken yet. Belongs to the event loop."""

    def __init__(self, request: Request):
        self.request = request
        self._unfinished = request.sampling.n
        self._news: deque[News] = deque()
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    @property
    def finished(self) -> bool:
        """Whether the last Output has arrived (it may still wait to be taken)."""
        return self._unfinished == 0

    async def take(self) -> list[News]:
        """Waits for news, and takes all there is. Raises what ended the engine, after the news before it."""
        await self._arrived.wait()
        if not self._news and self._error is not None:
            raise _again(self._error)
        news = list(self._news)
        self._news.clear()
        if self._error is None:
            self._arrived.clear()
        return news

    def put(self, news: News) -> None:
        self._news.append(news)
        self._unfinished -= news.output.finish_reason is not None
        self._arrived.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._arrived.set()


class AsyncEngine:
    """A running engine process. Bound to the event loop that started it."""

    def __init__(self, process: "subprocess.Popen[bytes]", loop: asyncio.AbstractEventLoop):
        self._process = process
        self._loop = loop
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._answers: dict[str, Answer] = {}
        self._numbers = count()
        self._error: Exception | None = None  # why it ended
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="kvant-read", daemon=True)
        self._writer = threading.Thread(target=self._write, name="kvant-write", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="kvant-watch", daemon=True)

    @classmethod
    async def start(cls, config: EngineConfig) -> "AsyncEngine":
        """Starts the process and waits until its model is loaded. Raises what `create` raises there."""
        engine = cls(_spawn(), asyncio.get_running_loop())
        for thread in (engine._reader, engine._writer, engine._watcher):
            thread.start()
        engine._send(config)
        try:
            ready = await engine._ready
            engine.admission, engine.config = ready.admission, ready.config
            engine.default_sampling, engine.reasons, engine.notices = ready.default_sampling, ready.reasons, ready.notices
            engine.tokenizer = await asyncio.to_thread(Tokenizer.from_source, ready.tokenizer_source)
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def is_running(self) -> bool:
        return self._error is None

    @property
    def process_id(self) -> int:
        return self._process.pid

    @contextmanager
    def answer(self, token_ids: list[int], sampling: SamplingParams) -> Iterator[Answer]:
        """Asks, for as long as the block lasts: leaving it before the answer is finished aborts the request."""
        if self._error is not None:
            raise _again(self._error)
        request = self.admission.request(next(self._numbers), token_ids, sampling, arrival=time.monotonic())
        answer = self._answers[request.request_id] = Answer(request)
        self._send(Add(request))
        try:
            yield answer
        finally:
            del self._answers[request.request_id]
            if not answer.finished:
                self._send(Abort(request.request_id))

    async def close(self) -> None:
        """Ends the process; answers under way fail. Does nothing the second time."""
        self._end(GenerationError("this engine is closed"))
        self._outbox.put(None)
        await asyncio.to_thread(self._leave)

    # --- the event loop's half -------------------------------------------------------------------------------------------

    def _receive(self, message: Any, now: float) -> None:
        if isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, Failure):
            message.error.__cause__ = EngineTraceback(message.trace)
            self._end(message.error)
        else:
            for output in message:
                answer = self._answers.get(output.request_id)
                if answer is not None:  # else its reader has left
                    answer.put(News(output, now))

    def _end(self, error: Exception) -> None:
        """Nothing comes any more. The first reason is the one that counts."""
        if self._error is not None:
            return
        self._error = error
        for answer in self._answers.values():
            if not answer.finished:
                answer.fail(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # whoever started it may have been cancelled: then nobody asks

    def _send(self, message: object) -> None:
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    # --- the threads' half -----------------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while True:
                message = pickle.load(self._process.stdout)
                self._tell(self._receive, message, time.monotonic())
        except (EOFError, OSError, ValueError, pickle.UnpicklingError):
            self._tell(self._end, GenerationError(f"{_death(self._process)}; what was under way is lost"))

    def _watch(self) -> None:
        """For the case that the pipe does not end with the process: a program it started may hold it open."""
        self._process.wait()
        self._reader.join(1.0)  # its last words go first
        self._tell(self._end, GenerationError(f"{_death(self._process)}; what was under way is lost"))

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it ended; the reader notices
            while (data := self._outbox.get()) is not None:
                self._process.stdin.write(data)
                self._process.stdin.flush()
        with suppress(OSError):
            self._process.stdin.close()

    def _tell(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(function, *arguments)

    def _leave(self) -> None:
        for insist in (lambda: None, self._process.terminate, self._process.kill):
            insist()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_SECONDS)
                break
        self._writer.join(LEAVE_SECONDS)
        self._reader.join(LEAVE_SECONDS)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()


def _spawn() -> "subprocess.Popen[bytes]":
    """A fresh interpreter that finds the same modules as this one.

    Not `multiprocessing`: that runs the caller's main program again in the new process, and so asks every script for an
    `if __name__ == "__main__"`. In a process group of its own Ctrl-C does not reach it: the caller decides what that means.
    """
    program = f"import sys; sys.path[:] = {sys.path!r}; from kvant.engine.process import main; main()"
    options: dict[str, Any] = {"process_group": 0}
    if sys.platform == "win32":
        options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)


def _death(process: "subprocess.Popen[bytes]") -> str:
    """How the process ended, in words."""
    try:
        code = process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:  # it lives, but its pipe is gone: nothing can be heard of it any more
        process.kill()
        return "the engine's process closed its pipe"
    if code >= 0:
        return f"the engine's process ended with exit code {code}"
    hint = ", perhaps because memory ran out" if code == -9 else ""
    return f"the engine's process was killed by signal {-code}{hint}"


def _again(error: Exception) -> Exception:
    """A copy to raise: the same object raised in several tasks would gather all their tracebacks."""
    twin = copy.copy(error)
    twin.__cause__ = error.__cause__
    return twin
