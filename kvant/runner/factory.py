"""Where a runner comes from: a checkpoint is opened, its network built, weights and cache tensors are placed.

Two runners, one choice, made in `config/resolve.py` and carried out here: `torch` on any device, `native` on a CPU.
"""

import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from kvant.config.environment import read_environment
from kvant.config.memory import ITEMSIZE
from kvant.config.model import ModelConfig
from kvant.config.resolve import Resolved
from kvant.config.sampling import SamplingParams
from kvant.distributed.mesh import Mesh
from kvant.errors import ConfigError, RequestError
from kvant.models.load import build, load_weights, placement, shelf_for
from kvant.models.load import open_model as open_checkpoint
from kvant.native.build import load as load_library
from kvant.native.record import record
from kvant.runner.native_runner import NativeRunner
from kvant.runner.seats import SeatTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A checkpoint whose headers are read and whose weights are not."""

    checkpoint: Any
    config: ModelConfig
    default_sampling: dict[str, Any]
    end_token_ids: tuple[int, ...]
    notices: tuple[str, ...]

    def weight_bytes(self, executor: str, dtype: str) -> int:
        """What the weights will take in memory: as they are stored where they stay so, else every value in `dtype`."""
        stored = getattr(self.checkpoint.tensors, "num_bytes", 0)
        if executor == "native" and stored:
            return stored
        wanted = [item for _, brick in build(self.config, Mesh()).walk() for item in brick.wants().items()]
        # Vectors that are no biases are norms', which stay fp32 (layers/norm.py).
        return sum(
            math.prod(shape) * ITEMSIZE["float32" if len(shape) == 1 and name.endswith("weight") else dtype]
            for name, shape in wanted
        )


def open_model(name: str) -> Opened:
    """Opens an alias, file, directory or `dummy:`. Raises `ModelError` and its children."""
    checkpoint = open_checkpoint(name)
    sampling, notices = _sampling(checkpoint.generation_config)
    return Opened(
        checkpoint=checkpoint,
        config=ModelConfig.from_dict(checkpoint.config),
        default_sampling=sampling,
        end_token_ids=tuple(checkpoint.end_token_ids),
        notices=(*notices, *(f"not used by this network: {name}" for name in checkpoint.skipped)),
    )


class Made(NamedTuple):
    """A runner, and what the user should know about it."""

    runner: Any
    notices: tuple[str, ...] = ()


def create_runner(resolved: Resolved, opened: Opened, num_tokens_known: int) -> Made:
    """The runner of a resolved configuration, with weights loaded and cache allocated.

    Where the native executor was chosen but cannot be built after all, torch takes over, with a notice.
    """
    config = resolved.config
    assert config.max_model_len is not None
    known = min(num_tokens_known, opened.config.vocab_size)
    seats = SeatTable(config.max_num_seqs, resolved.groups, config.max_model_len)
    model = build(replace(opened.config, context_length=config.max_model_len), Mesh())
    notices: list[str] = []
    if resolved.executor == "native":
        environment = read_environment()
        library = load_library(notices.append, environment.cache / "native", environment.isa)
        if library is not None:
            load_weights(model, opened.checkpoint.tensors, None)
            network = record(model, resolved.groups).finish(
                library,
                threads=config.threads or 1,
                deterministic=config.deterministic,
                shelf=shelf_for(opened.checkpoint, environment, notices.append),
            )
            if network.threads < (config.threads or 1):
                started = f"{network.threads} of {config.threads} threads could be started"
                notices.append(f"{started}: this user or container may have no more; slower")
            cache = network.new_cache(resolved.num_blocks)
            return Made(NativeRunner(network, cache, seats, known, opened.config.vocab_size), tuple(notices))
    if config.deterministic:
        raise ConfigError(
            "deterministic needs the native executor: a CPU, dtype auto and a C++ compiler (see kvant doctor)",
            param="deterministic",
        )
    if find_spec("torch") is None:
        reason = "; ".join(notices) or "this configuration computes with torch"
        raise ConfigError(f"{reason}; torch is not installed: pip install 'kvant[torch]'")
    runner, notice = _torch_runner(resolved, opened, model, seats, known)
    return Made(runner, (*notices, *([notice] if notice else [])))


def _torch_runner(resolved: Resolved, opened: Opened, model: Any, seats: SeatTable, known: int) -> tuple[Any, str]:
    import torch

    from kvant.attention.select import choose
    from kvant.attention.storage import KVStorage
    from kvant.runner.runner import TorchRunner

    config = resolved.config
    if config.device == "cpu":
        torch.set_num_threads(config.threads or 1)
    dtype = getattr(torch, config.dtype)
    load_weights(model, opened.checkpoint.tensors, placement(config.device, dtype))
    storage = KVStorage(resolved.groups, resolved.num_blocks, dtype, config.device)
    attention = choose("auto", storage)
    return TorchRunner(model, storage, seats, attention.backend, known), attention.notice


def _sampling(generation_config: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The sampling parameters that the model's authors recommend, by our names; a notice where they cannot be."""
    if generation_config.get("do_sample") is False:
        return {"temperature": 0.0}, ()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    recommended = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    try:
        SamplingParams(**recommended)
    except RequestError as error:
        return {}, (f"the sampling parameters that the model recommends are not used: {error}",)
    return recommended, ()
