"""Brick: a part of a network. It owns weights, or other bricks, or both, and has one method, `forward`.

The tree of bricks gives every weight its Hugging Face name: the attribute path, `model.layers.3.mlp.down_proj.weight`. A
brick that fuses several of the file's matrices (`QKV`, `GateUp`) leaves its own attribute out of the path (`fused`), since
the file knows only the parts. Nothing here imports torch: arithmetic is reached through `kernels.ops`, which loads it when
it is first used.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvant.config.formats import StoredTensor
    from kvant.quantization.scheme import Placement

Shape = tuple[int, ...]


class Brick:
    """A part of a network. Subclasses define `forward`, and `wants` and `load` where they hold weights."""

    fused = False

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def forward(self, *args: Any) -> Any:
        raise TypeError(f"{type(self).__name__} is no function of its own; call its parts")

    def wants(self) -> dict[str, Shape]:
        """The weights of this brick itself: name relative to its path -> shape, [out, in] for matrices."""
        return {}

    def load(self, tensors: "Mapping[str, StoredTensor]", placement: "Placement") -> None:
        """Receives exactly what `wants` named."""

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
