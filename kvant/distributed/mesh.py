"""Mesh: which devices work together, along which axes. Bricks get it at construction and hold their own shard.

Axes: tp (tensor), pp (pipeline), sp (sequence), ep (expert), dp (data). One device is the mesh whose axes are all 1; the
collectives over an axis of size 1 are the identity and are not called.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the axes. `Mesh()` is one device."""

    tp: int = 1
    pp: int = 1
    sp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.sp * self.ep * self.dp
