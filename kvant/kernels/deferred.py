"""Values that are computed together with what follows them: how bricks reach the fused kernels.

On a GPU a brick does not know yet how its result is best computed: a norm is free inside the product after it when there is
one row, and inside the addition before it when there are many. So it returns what is to be done, and the next brick decides:

    x + o_proj(h)          one row: product and addition in one launch      else: a Sum, which the next norm adds up
    qkv(norm(x))           one row: the norm inside the product             else: addition and norm in one launch
    gate(gate_up(norm(x))) one row: norm, product and gate in one launch
    attend(rotate(norm(q)), rotate(norm(k)), v)      norms, turn and the write to the cache in one launch, or in none

A family's file says `x + attention(norm(x))` and gets all of it. Launches of a decode layer: five for one row, nine for many.
A deferred value knows the operators that a recorded one knows (native/program.py): `+`, `*` by a number, `split`, `reshape`;
`now` makes a tensor of anything. A `fixed` product is never computed together with anything, since it must have the same bits
for one row and for many (`linear.fixed_linear`). Nothing here imports torch before a tensor is there.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvant.kernels import ops

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from kvant.kernels.rotary import HeadNorms, Rotation


class Deferred:
    """Something that can be computed now, alone, or later, together with what follows."""

    def now(self) -> "Tensor":
        raise NotImplementedError

    def split(self, sizes: Sequence[int], axis: int = -1) -> Any:
        return self.now().split(tuple(sizes), axis)

    def reshape(self, *shape: int) -> Any:
        return self.now().reshape(*shape)

    def __add__(self, other: Any) -> Any:
        return self.now() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.now()

    def __mul__(self, factor: float) -> Any:
        return self.now() * factor

    __rmul__ = __mul__


def now(x: Any) -> Any:
    """The tensor that `x` is, or will be; symbols of a recording are left alone."""
    return x.now() if isinstance(x, Deferred) else x


class Sum(Deferred):
    """x + d, or x + norm(d) where `inner` is that norm's (weight, eps); fp32 [T, D]. Added up once, by the next norm if it
    comes first."""

    def __init__(self, x: "Tensor", delta: "Tensor", inner: "tuple[Tensor, float] | None"):
        self.x, self.delta, self.inner = x, delta, inner
        self.total: Tensor | None = None

    def now(self) -> "Tensor":
        if self.total is None:
            delta = self.delta
            if self.inner is not None:
                delta = ops.rms_norm(delta, *self.inner, self.x.dtype)
            self.total = self.x + delta
        return self.total

    def normed(self, weight: "Tensor", eps: float, out: "dtype") -> "Tensor":
        """norm(x + d) in dtype `out`."""
        if self.total is not None or (self.inner is not None and self.inner[1] != eps):
            return ops.rms_norm(self.now(), weight, eps, out)
        inner = None if self.inner is None else self.inner[0]
        self.total, normed = ops.add_rms_norm(self.x, self.delta, weight, eps, out, inner)
        return normed


class Normed(Deferred):
    """norm(x) over the last axis: x [T, D], or heads [T, N, H]; in dtype `out`."""

    def __init__(self, x: "Tensor | Deferred", weight: "Tensor", eps: float, out: "dtype"):
        self.x, self.weight, self.eps, self.out = x, weight, eps, out
        self.result: Tensor | None = None

    def now(self) -> "Tensor":
        if self.result is None:
            if isinstance(self.x, Sum):
                self.result = self.x.normed(self.weight, self.eps, self.out)
            else:
                self.result = ops.rms_norm(now(self.x), self.weight, self.eps, self.out)
        return self.result

    def __radd__(self, x: Any) -> Any:
        return Sum(x, now(self.x), (self.weight, self.eps))


class Product(Deferred):
    """W x (+ b): x [T, K], W [N, K], b [N] -> [T, N] in W's dtype."""

    def __init__(self, x: "Tensor | Deferred", weight: "Tensor", bias: "Tensor | None", fixed: bool):
        self.x, self.weight, self.bias, self.fixed = x, weight, bias, fixed

    def one_normed_row(self) -> "Normed | None":
        """The norm that can be taken inside this product."""
        x = self.x
        if self.fixed:
            return None
        if isinstance(x, Normed) and x.result is None and not isinstance(x.x, Deferred) and x.x.shape[0] == 1:
            return x
        return None

    def now(self) -> "Tensor":
        if norm := self.one_normed_row():
            return ops.norm_linear(norm.x, norm.weight, norm.eps, self.weight, self.bias)
        return (ops.fixed_linear if self.fixed else ops.linear)(now(self.x), self.weight, self.bias)

    def __radd__(self, residual: Any) -> Any:
        x = now(self.x)
        if self.bias is None and x.shape[0] == 1 and not self.fixed:
            return ops.linear_add(x, self.weight, residual)
        return Sum(residual, self.now(), None)


class Turned(Deferred):
    """Heads [T, N, H], normed or not, turned by their positions."""

    def __init__(self, x: "Tensor | Deferred", positions: "Tensor", rotation: "Rotation"):
        self.x, self.positions, self.rotation = x, positions, rotation

    def now(self) -> "Tensor":
        cos, sin = ops.rotary_table(self.rotation, self.positions)
        return ops.apply_rotary(now(self.x), cos, sin)


def normed(x: Any, weight: "Tensor", eps: float, out: "dtype") -> Any:
    """`x` [..., D], `weight` [D] fp32 -> its RMSNorm in dtype `out`."""
    if isinstance(x, Deferred) or ops.on_gpu(x):
        return Normed(x, weight, eps, out)
    return ops.rms_norm(x, weight, eps, out)


def product(x: Any, weight: "Tensor", bias: "Tensor | None" = None, fixed: bool = False) -> Any:
    """`x` [T, K], `weight` [N, K], `bias` [N] -> [T, N]. `fixed`: a row's bits do not depend on the others (on a GPU)."""
    if isinstance(x, Deferred) or ops.on_gpu(x):
        return Product(x, weight, bias, fixed)
    return ops.linear(x, weight, bias)


def gated(gate_up: Any, activation: str) -> "Tensor":
    """`gate_up` [T, 2F] -> act(gate) * up, [T, F]."""
    if isinstance(gate_up, Product) and gate_up.bias is None and (norm := gate_up.one_normed_row()):
        return ops.norm_gated_linear(norm.x, norm.weight, norm.eps, gate_up.weight, activation)
    return ops.gated(now(gate_up), activation)


def turned(q: Any, k: Any, positions: "Tensor", rotation: "Rotation") -> tuple[Any, Any]:
    """`q` [T, N, H], `k` [T, K, H] -> both, turned by `positions` [T]."""
    if ops.on_gpu(positions):
        return Turned(q, positions, rotation), Turned(k, positions, rotation)
    cos, sin = ops.rotary_table(rotation, positions)
    return ops.apply_rotary(q, cos, sin), ops.apply_rotary(k, cos, sin)


def untangle(q: Any, k: Any) -> "tuple[Tensor, Tensor, HeadNorms | None, Rotation | None]":
    """What `rotary_and_store` is to do to queries and keys that may be normed, turned, both or neither."""
    rotation = q.rotation if isinstance(q, Turned) else None
    q, k = (x.x if isinstance(x, Turned) else x for x in (q, k))
    if isinstance(q, Normed) and isinstance(k, Normed) and q.eps == k.eps:
        from kvant.kernels.rotary import HeadNorms

        return now(q.x), now(k.x), HeadNorms(q.weight, k.weight, q.eps), rotation
    return now(q), now(k), None, rotation
