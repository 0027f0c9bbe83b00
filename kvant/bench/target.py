"""Target: a running model, the floor of its steps, and the machine's ceilings: what every measurement needs."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from kvant.bench.ceilings import Measured, measure
from kvant.config.engine import EngineConfig
from kvant.config.hardware import detect
from kvant.engine.create import plan
from kvant.llm import LLM
from kvant.planning.shape import Matrix, matrices, network_of
from kvant.planning.work import Ceilings, Network

Say = Callable[[str], None]  # tells the user what goes on


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """What is measured, and against what."""

    llm: LLM
    matrices: list[Matrix]
    network: Network
    measured: Measured

    @property
    def ceilings(self) -> Ceilings:
        return self.measured.ceilings

    @property
    def config(self) -> EngineConfig:
        """With everything decided."""
        return self.llm.config

    @property
    def runner(self) -> Any:
        return self.llm.engine.runner

    def describe(self) -> list[str]:
        """The lines above a table of results."""
        config, ceilings = self.config, self.ceilings
        compute = f"{ceilings.compute / 1e12:,.1f} Top/s"
        return [
            f"{config.model}: {self.runner.executor} on {config.device}, {config.dtype}",
            f"ceilings: {ceilings.bandwidth / 1e9:,.0f} GB/s, {compute} ({self.measured.how})",
        ]


def open_target(config: EngineConfig, say: Say, measured: Measured | None = None) -> Target:
    """Loads the model, and measures the machine unless that was done. Raises what `LLM(...)` raises."""
    opened, _ = plan(config, detect())  # headers only: for shapes and formats
    say(f"loading {config.model}")
    llm = LLM(**{field.name: getattr(config, field.name) for field in fields(config)})
    executor, dtype = llm.engine.runner.executor, llm.config.dtype
    found = matrices(opened.config, opened.checkpoint.tensors, executor, dtype)
    network = network_of(opened.config, found, executor, dtype)
    if measured is None:
        say("measuring the ceilings of this machine")
        num_bytes = network.linears.num_bytes + network.head.num_bytes
        measured = measure(llm.engine.runner, llm.config.device, dtype, llm.config.threads or 1, num_bytes)
    return Target(llm, found, network, measured)
