"""Opens spoiled models, one after the other, in a process of its own, and reports what became of them.

    python -m tests.fuzz.run --count 300 [--first 0] [--only "gguf metadata"]

A case is its kind and its number. Each model is opened as a user's would be, up to the token that it answers with: files,
config, plan, tokenizer, template, weights, native step. The outcome is an answer or an error of Kvant's tree; anything else
(another exception, a forbidden act, too much time) is listed with the number that repeats it. The last line is JSON.
"""

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from kvant.config.sampling import SamplingParams
from kvant.errors import KvantError
from kvant.llm import LLM
from tests.checkpoint.files import gguf_bytes
from tests.fuzz.models import Spoil, folder_cases, gguf_cases, gguf_model

SECONDS = 1.0
MAX_MESSAGE = 1000
CHAT = [{"role": "user", "content": "Hello <|im_end|> world 123"}]
# Acts that nothing in a model file may cause: programs, sockets, written or removed files, foreign objects.
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "subprocess.Popen", "socket.", "os.remove",
             "os.rename", "os.rmdir", "os.chmod", "shutil.", "pickle.", "webbrowser.")  # fmt: skip


class Forbidden(BaseException):
    """Outside of Exception, so that nobody between here and there takes it for a failure of the file."""


class Watch:
    """Python's audit events while a model is opened."""

    def __init__(self) -> None:
        self.active = False
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        written = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
        if written or event.startswith(FORBIDDEN):
            raise Forbidden(f"{event} {str(arguments)[:200]}")


def answer(path: Path) -> str:
    """Opens `path` as a user's model, has it answer a text and a conversation. Raises whatever is raised on the way."""
    llm = LLM(str(path), max_num_seqs=2, kv_cache_memory_bytes=1 << 20, threads=1, seed=0)
    llm.tokenizer.encode("Hello  wörld 123 我\n")
    (output,) = llm.generate("Hi", SamplingParams(max_tokens=1, temperature=0))
    try:
        llm.chat(CHAT, SamplingParams(max_tokens=1))
    except KvantError:
        return "answered, no chat"  # a template that is broken: the model itself is fine
    return "answered" if output.outputs[0].finish_reason != "error" else "no finite answer"


class Run:
    """All cases of one process, and what is told about them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.watch = Watch()
        self.outcomes: dict[str, Counter[str]] = {}
        self.failures: list[str] = []
        self.slowest = (0.0, "")

    def one(self, kind: str, number: int, spoil: Spoil) -> None:
        path = spoil(self.folder, random.Random(f"{kind}/{number}"))
        self.judge(kind, f"{kind} {number}", path)

    def judge(self, kind: str, case: str, path: Path) -> None:
        started = time.process_time()
        try:
            self.watch.active = True
            outcome = answer(path)
        except KvantError as error:
            outcome = type(error).__name__
            if not str(error) or len(str(error)) > MAX_MESSAGE or "\n" in str(error):
                self.failures.append(f"{case}: a message that is no clear line: {str(error)[:200]!r}")
        except BaseException as error:  # panics of Rust libraries are no Exceptions
            outcome = f"!{type(error).__name__}"
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append(
                f"{case}: {type(error).__name__}: {str(error)[:150]} ({Path(where.filename).name}:{where.lineno})"
            )
        finally:
            self.watch.active = False
        took = time.process_time() - started
        self.slowest = max(self.slowest, (took, case))
        self.outcomes.setdefault(kind, Counter())[outcome] += 1


def run(count: int, first: int, only: str | None) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="kvant-fuzz-"))
    try:
        runner = Run(folder)
        (folder / "hf").mkdir()
        kinds = gguf_cases(folder) | folder_cases(folder / "hf")
        (folder / "whole.gguf").write_bytes(gguf_bytes(*gguf_model()))
        for path in (folder / "whole.gguf", folder / "hf"):  # what is not spoiled answers; late imports happen here, unwatched
            assert answer(path) == "answered"
        for kind, spoil in kinds.items():
            for number in range(first, first + count) if only in (None, kind) else ():
                runner.one(kind, number, spoil)
        return report(runner)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def report(runner: Run) -> dict[str, Any]:
    return {
        "outcomes": {kind: dict(counts) for kind, counts in runner.outcomes.items()},
        "failures": runner.failures,
        "slowest": runner.slowest,
        "peak_kib": peak_kib(),
    }


def peak_kib() -> int:
    """The most memory this process ever had. Not getrusage's word where Linux has a better one: that number is carried over
    from whoever started the process, and pytest's own processes are large."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only")
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.count, arguments.first, arguments.only)))
