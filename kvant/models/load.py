"""From a checkpoint to a network: every weight that a brick wants is found by name and shape, and nothing is left over.

Missing, misshapen and unconsumed tensors refuse the load, by name: a network with one uninitialised matrix talks fluently
and wrongly.
"""

from collections.abc import Callable
from typing import Any, Protocol

from kvant.checkpoint.checkpoint import Checkpoint, FileTensors
from kvant.checkpoint.kept import Shelf
from kvant.checkpoint.open import open_checkpoint
from kvant.checkpoint.store import resolve_model
from kvant.config.environment import Environment
from kvant.config.formats import StoredTensor
from kvant.config.model import ModelConfig
from kvant.distributed.mesh import Mesh
from kvant.errors import CheckpointError
from kvant.layers.brick import Brick, Shape
from kvant.models.registry import family

SHOWN = 6  # names listed in an error before "and n more"


class TensorSource(Protocol):
    """Where weights come from: a file's tensors by HF name, or random ones of the wanted shape."""

    def find(self, name: str, shape: Shape) -> StoredTensor | None:
        """The tensor `name`, or None; the shape is what the caller expects, and checks."""

    def names(self) -> set[str]:
        """Every name the file holds and the network is expected to consume."""


def open_model(name: str) -> Checkpoint:
    """The checkpoint behind an alias (fetched where it is missing), a file, a directory or `dummy:`."""
    return open_checkpoint(resolve_model(name))


def shelf_for(checkpoint: Checkpoint, environment: Environment, notice: Callable[[str], None]) -> Shelf | None:
    """Where what loading makes of `checkpoint` is kept; None where nothing shall be, or random numbers are no file's."""
    if environment.packed_limit == 0 or not isinstance(checkpoint.tensors, FileTensors):
        return None
    return Shelf(environment.packed, checkpoint.path, environment.packed_limit, notice)


def build(config: ModelConfig, mesh: Mesh) -> Any:
    """The network of `config`, still without weights."""
    return family(config.architecture)(config, mesh)


def placement(device: str, dtype: Any) -> Any:
    """Where `load_weights` puts tensors, and in which torch dtype."""
    from kvant.quantization.scheme import Placement

    return Placement(device=device, dtype=dtype)


def load_weights(model: Brick, source: TensorSource, placement: Any | None) -> int:
    """Fills `model` from `source`; returns the bytes read. Raises `CheckpointError` naming every tensor that does not fit.

    With a `Placement` the bricks make tensors of their weights; with None they keep them as stored, for recording.
    """
    found, missing, misshapen = _collect(model, source)
    _refuse("lacks", missing)
    _refuse("has the wrong shape for", misshapen)
    consumed = {stored_name for tensors in found.values() for stored_name in tensors}
    _refuse("holds tensors that this network does not use:", sorted(source.names() - consumed))
    total = 0
    for path, brick in model.walk():
        wanted = brick.wants()
        tensors = {name: found[path][path + name] for name in wanted}
        total += sum(tensor.num_bytes for tensor in tensors.values())
        if placement is None:
            brick.keep(tensors)
        else:
            brick.load(tensors, placement)
    return total


def _collect(model: Brick, source: TensorSource) -> tuple[dict[str, dict[str, StoredTensor]], list[str], list[str]]:
    found: dict[str, dict[str, StoredTensor]] = {}
    missing, misshapen = [], []
    for path, brick in model.walk():
        tensors = found.setdefault(path, {})
        for name, shape in brick.wants().items():
            stored = source.find(path + name, shape)
            if stored is None:
                missing.append(path + name)
            elif stored.shape != shape:
                misshapen.append(f"{path + name} ({list(stored.shape)} instead of {list(shape)})")
            else:
                tensors[path + name] = stored
    return found, missing, misshapen


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        raise CheckpointError(f"the checkpoint {what} {', '.join(names[:SHOWN])}{more}")
