"""What the commands reach out to: the model, the store, the machine, the screen. Tests put their own in these places."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvant.cli.screen import Screen
from kvant.config.engine import EngineConfig
from kvant.config.environment import Environment, read_environment
from kvant.config.hardware import Hardware, detect

if TYPE_CHECKING:
    from kvant.llm import LLM


def open_llm(config: EngineConfig) -> "LLM":
    """Loads the model. Imports torch, so this is the last thing a command does before it answers."""
    from kvant.llm import LLM

    return LLM(**{f.name: getattr(config, f.name) for f in fields(config)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Doors:
    environment: Environment
    screen: Screen
    open_llm: Callable[[EngineConfig], "LLM"] = open_llm
    detect: Callable[[], Hardware] = detect

    @classmethod
    def of_this_process(cls) -> "Doors":
        environment = read_environment()
        return cls(environment=environment, screen=Screen(environment.color))
