"""Brick: a part of a network. It owns weights, or other bricks, or both, and computes in one of two ways.

    forward(tensors)   computes, with torch
    emit(symbols)      writes the same operation into a Program, which the native executor runs (native/record.py)

Calling a brick chooses by its first argument. A brick that only wires others together needs no `emit`: its `forward` runs
with symbols as it stands.

The tree of bricks gives every weight its Hugging Face name: the attribute path, `model.layers.3.mlp.down_proj.weight`. A
brick that fuses several of the file's matrices (`QKV`, `GateUp`) leaves its own attribute out of the path (`fused`), since
the file knows only the parts. Nothing here imports torch: arithmetic is reached through `kernels.ops`, which loads it when
it is first used.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvant.native.program import Buffer
from kvant.native.record import Input

if TYPE_CHECKING:
    from kvant.config.formats import StoredTensor
    from kvant.quantization.scheme import Placement

Shape = tuple[int, ...]


class Brick:
    """A part of a network. Subclasses define `forward` and, where they compute or hold weights, `emit`, `wants`, `load`."""

    fused = False
    stored: "Mapping[str, StoredTensor]"  # the weights as the file has them, for `emit`

    def __call__(self, *args: Any) -> Any:
        if isinstance(args[0], (Buffer, Input)):
            return self.emit(*args)
        return self.forward(*args)

    def forward(self, *args: Any) -> Any:
        raise TypeError(f"{type(self).__name__} is no function of its own; call its parts")

    def emit(self, *args: Any) -> Any:
        """Records this brick. The default is right for bricks that only wire others together."""
        return self.forward(*args)

    def wants(self) -> dict[str, Shape]:
        """The weights of this brick itself: name relative to its path -> shape, [out, in] for matrices."""
        return {}

    def load(self, tensors: "Mapping[str, StoredTensor]", placement: "Placement") -> None:
        """Receives exactly what `wants` named, and makes tensors of it."""

    def keep(self, tensors: "Mapping[str, StoredTensor]") -> None:
        """Receives exactly what `wants` named, and leaves it as stored."""
        self.stored = tensors

    def children(self) -> Iterator[tuple[str, "Brick"]]:
        """The bricks that this one is made of, by attribute name; members of a list by their number."""
        for name, value in vars(self).items():
            if isinstance(value, Brick):
                yield name, value
            elif isinstance(value, list):
                for number, item in enumerate(value):
                    if isinstance(item, Brick):
                        yield f"{name}.{number}", item

    def walk(self, path: str = "") -> Iterator[tuple[str, "Brick"]]:
        """Every brick below and including this one, with the path its weights' names begin with."""
        yield path, self
        for name, child in self.children():
            yield from child.walk(path if child.fused else f"{path}{name}.")
