"""`kvant bench latency | throughput | kernels | startup`: how fast a model is here, beside how fast it can be at most."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvant.cli.doors import Doors
from kvant.cli.models import fetched, model_argument
from kvant.cli.options import ENGINE_OPTIONS, chosen, config_file, generated, layers
from kvant.cli.screen import columns
from kvant.config.engine import DEFAULT_MODEL, EngineConfig
from kvant.config.explain import merged

if TYPE_CHECKING:
    from kvant.bench.report import Row

NANO_STREAMS = 256
KERNEL_STREAMS = {"cpu": (1, 8, 32), "cuda": (1, 8, 64, 256)}
KERNEL_PROMPT = {"cpu": 512, "cuda": 2048}


@click.group("bench")
def bench() -> None:
    """Measure a model on this machine, each line with its distance to what the machine can do at most.

    The floor is the least time for the bytes and operations of the work, at the speeds of memory and arithmetic that are
    measured in the same run. A fraction of 100 % cannot be passed.
    """


def _command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """What all of them take."""

    def decorate(command: Callable[..., None]) -> click.Command:
        for decorator in (
            click.pass_obj,
            generated(engine=ENGINE_OPTIONS),
            config_file,
            click.option("--save-result", metavar="FILE", type=click.Path(path_type=Path), help="The results as JSON too"),
            model_argument(f"As for kvant run [default: {DEFAULT_MODEL}]", required=False),
        ):
            command = decorator(command)
        return bench.command(name)(command)

    return decorate


def _count(name: str, default: int, help: str, least: int = 1) -> Any:
    return click.option(name, type=click.IntRange(least), default=default, show_default=True, metavar="N", help=help)


@_command("latency")
@_count("--batch-size", 1, "Streams that run together")
@_count("--input-len", 128, "Tokens of every prompt")
@_count("--output-len", 288, "Tokens of every answer", 2)
@_count("--num-iters", 5, "Repetitions; the best counts")
@click.option("--profile", is_flag=True, help="Also where a step's time goes, operation by operation")
def latency(
    doors: Doors, *, batch_size: int, input_len: int, output_len: int, num_iters: int, profile: bool, **given: Any
) -> None:
    """Time to the first token, and time per token after it, of streams that run together."""
    from kvant.bench import latency as measurement
    from kvant.bench.profile import profile as take_apart
    from kvant.bench.workload import uniform

    config = _config(given, max_num_seqs=batch_size, enable_prefix_caching=False)
    with _Session(doors, config, given, "latency") as session:
        workload = uniform(batch_size, input_len, output_len, session.target.runner.vocab_size)
        session.rows += measurement.latency(session.target, workload, num_iters, session.say)
        if profile:
            session.add("one decode step", take_apart(session.target, workload, session.say))


@_command("throughput")
@_count("--num-prompts", 32, "Requests, offered all at once")
@_count("--input-len", 256, "Tokens of every prompt")
@_count("--output-len", 128, "Tokens of every answer")
@_count("--num-iters", 1, "Repetitions; the best counts")
@click.option(
    "--workload", type=click.Choice(["nano"]), help="nano-vllm's public protocol instead: 256 requests, 100-1,024 tokens"
)
@click.option("--profile", is_flag=True, help="Also where a step's time goes, operation by operation")
def throughput(
    doors: Doors,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    num_iters: int,
    workload: str | None,
    profile: bool,
    **given: Any,
) -> None:
    """Tokens per second of many requests that are offered all at once."""
    from kvant.bench import throughput as measurement
    from kvant.bench.profile import profile as take_apart
    from kvant.bench.workload import nano, uniform

    streams = NANO_STREAMS if workload else num_prompts
    config = _config(given, max_num_seqs=streams, enable_prefix_caching=False)
    with _Session(doors, config, given, "throughput") as session:
        vocab_size = session.target.runner.vocab_size
        work = nano(vocab_size) if workload else uniform(num_prompts, input_len, output_len, vocab_size)
        session.rows += measurement.throughput(session.target, work, num_iters, session.say)
        if profile:
            streams = min(streams, session.target.config.max_num_seqs)
            part = uniform(streams, input_len, output_len, vocab_size)
            session.add(f"one decode step of {streams} streams", take_apart(session.target, part, session.say))


@_command("kernels")
def kernels(doors: Doors, **given: Any) -> None:
    """Every operation of the model in place: in decode steps of several sizes, and in a prompt."""
    from kvant.bench.profile import profile, profile_prompts
    from kvant.bench.workload import uniform

    config = _config(given, enable_prefix_caching=False)
    with _Session(doors, config, given, "kernels") as session:
        target = session.target
        vocab_size, device = target.runner.vocab_size, target.config.device
        for streams in KERNEL_STREAMS[device]:
            if streams <= target.config.max_num_seqs:
                work = uniform(streams, 128, 32, vocab_size)
                session.add(f"decode, {streams} x 128 tokens", profile(target, work, session.say))
        length = min(KERNEL_PROMPT[device], target.llm.max_model_len - 1)
        work = uniform(1, length, 1, vocab_size)
        session.add(f"a prompt of {length} tokens", profile_prompts(target, work, session.say))


@_command("startup")
@_count("--num-iters", 3, "Starts; the best counts")
def startup(doors: Doors, *, num_iters: int, **given: Any) -> None:
    """Seconds from the start of a process to its first token, each time in a process of its own."""
    from kvant.bench import startup as measurement

    config = _config(given)
    session = _Session(doors, config, given, "startup", loads=False)
    with session:
        session.rows += measurement.startup(config, num_iters, session.say)


def _config(given: dict[str, Any], **defaults: Any) -> EngineConfig:
    """The user's options over what suits the measurement."""
    values = merged(layers(given["config"], given["model"], given["engine"], {}))
    return EngineConfig(model=values.get("model", DEFAULT_MODEL), **{**defaults, **chosen(values, ENGINE_OPTIONS)})


class _Session:
    """Fetches and loads the model; shows and saves what was measured."""

    def __init__(self, doors: Doors, config: EngineConfig, given: dict[str, Any], command: str, loads: bool = True):
        self.doors, self.config, self.command = doors, config, command
        self.path: Path | None = given["save_result"]
        self.loads = loads
        self.rows: list[Row] = []
        self._sections: list[tuple[str, list[Row]]] = []
        self._target: Any = None

    @property
    def target(self) -> Any:
        return self._target

    def say(self, text: str) -> None:
        """What goes on, on stderr."""
        self.doors.screen.aside(text)

    def add(self, title: str, rows: "list[Row]") -> None:
        """A table of its own."""
        self._sections.append((title, rows))

    def __enter__(self) -> "_Session":
        from kvant.bench.target import open_target

        fetched(self.doors, self.config.model)
        if self.loads:
            self._target = open_target(self.config, self.say)
            for notice in self._target.llm.notices:
                self.doors.screen.notice(notice)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            return
        from kvant.bench.report import save, table

        screen = self.doors.screen
        about: dict[str, Any] = {"command": self.command, "model": self.config.model}
        if self._target is not None:
            for line in self._target.describe():
                screen.line(line)
            about["ceilings"] = self._target.ceilings._asdict()
        for title, rows in [("", self.rows), *self._sections]:
            if not rows:
                continue
            if title:
                screen.rule(title)
            for line in columns(table(rows)):
                screen.line(line)
        if self.path is not None:
            named = [row._replace(scenario=f"{title}: {row.scenario}") for title, rows in self._sections for row in rows]
            save(self.path, [*self.rows, *named], **about)
