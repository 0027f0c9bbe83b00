"""The engine's side of `AsyncEngine`: a process of its own that computes, and knows neither text nor its readers.

    stdin    EngineConfig, then Add and Abort ...      read by a thread, so that the pipe never fills up while a step runs
    stdout   Ready, then a list of Outputs per step;   or, last of all, Failure

One pickle after the other, between two processes of one program. The end of stdin means "leave", whether the other side
closed it or died. Without work the process sleeps. If nobody reads its outputs at all (the other process is stopped), it
waits in the pipe instead of piling them up.
"""

import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

from kvant.config.engine import EngineConfig
from kvant.engine.admission import Admission
from kvant.engine.inbox import Inbox
from kvant.errors import GenerationError
from kvant.types import StepInput


class Ready(NamedTuple):
    """The engine is there: what its readers need to make requests and texts."""

    admission: Admission
    tokenizer_source: Any
    config: EngineConfig  # with everything decided
    default_sampling: dict[str, Any]
    reasons: tuple[str, ...]
    notices: tuple[str, ...]


class Failure(NamedTuple):
    """The engine ended by an exception."""

    error: Exception
    trace: str

    @classmethod
    def of(cls, error: Exception) -> "Failure":
        """Only errors of Kvant and of Python itself travel as they are: unpickling any other would import its library."""
        trace = "".join(traceback.format_exception(error))
        if type(error).__module__.partition(".")[0] in ("kvant", "builtins"):
            try:
                return cls(pickle.loads(pickle.dumps(error)), trace)
            except Exception:  # an exception may refuse to be pickled in any way it likes
                pass
        return cls(GenerationError(f"the engine failed: {type(error).__qualname__}: {error}"), trace)


class Mail:
    """What arrives: messages for the next step, and word that the other side has left."""

    def __init__(self, stream: BinaryIO):
        self.inbox = Inbox()
        self.left = False
        self.loading = True
        self.news = threading.Event()
        self._stream = stream
        self.config: EngineConfig = pickle.load(stream)
        threading.Thread(target=self._receive, name="kvant-mail", daemon=True).start()

    def _receive(self) -> None:
        try:
            while True:
                self.inbox.put(pickle.load(self._stream))
                self.news.set()
        except (EOFError, OSError, pickle.UnpicklingError):
            if self.loading:
                os._exit(0)  # nobody waits any longer for a model that may take minutes to load
            self.left = True
            self.news.set()


def main() -> None:
    """Serves until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's, who then closes stdin
    requests, outputs = _take(0, os.O_RDONLY, "rb"), _take(1, os.O_WRONLY, "wb")
    code = 0
    try:
        _serve(Mail(requests), outputs)
    except (BrokenPipeError, EOFError):
        pass  # nobody is there any more
    except Exception as error:
        code = 1
        with suppress(OSError):
            _send(outputs, Failure.of(error))
    sys.stderr.flush()
    os._exit(code)  # the thread that reads may hold a lock that an orderly end would wait for


def _take(number: int, mode: int, kind: str) -> BinaryIO:
    """The pipe at a standard stream, which no library and no program started from here shall write into or hold open."""
    stream: BinaryIO = os.fdopen(os.dup(number), kind)  # type: ignore[assignment]
    if mode == os.O_WRONLY:
        os.dup2(2, number)
    else:
        os.dup2(os.open(os.devnull, mode), number)
    return stream


def _serve(mail: Mail, outputs: BinaryIO) -> None:
    from kvant.engine.create import create  # the only door to everything heavy; the other side imports this file too

    created = create(mail.config)
    engine = created.engine
    mail.loading = False
    _send(
        outputs,
        Ready(
            admission=engine.admission,
            tokenizer_source=created.tokenizer_source,
            config=created.config,
            default_sampling=created.default_sampling,
            reasons=created.reasons,
            notices=created.notices,
        ),
    )
    while True:
        mail.news.clear()  # before looking: what comes after is then not slept through
        if mail.left:
            return
        if not len(mail.inbox) and not engine.has_work():
            mail.news.wait()
            continue
        news = engine.step(StepInput(now=time.monotonic(), messages=mail.inbox.receive()))
        if news:
            _send(outputs, news)


def _send(stream: BinaryIO, message: object) -> None:
    stream.write(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
    stream.flush()
