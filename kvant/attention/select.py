"""Which attention runs here: an explicit order, and a refusal that says what was tried."""

from importlib.util import find_spec
from typing import Any, NamedTuple

from kvant.attention.storage import KVStorage
from kvant.errors import ConfigError, UnsupportedError

BACKENDS = ("triton", "sdpa", "reference")


class Chosen(NamedTuple):
    """The class that runs a step's attention, and what the user should know about the choice."""

    backend: Any
    notice: str = ""


def choose(name: str, storage: KVStorage, deterministic: bool = False) -> Chosen:
    """The backend `name` over `storage`. "auto" is triton on a GPU, where it can run, and sdpa elsewhere.

    `deterministic`: a token's bits must not depend on what else is computed; on a GPU only triton's can promise that.

    A backend that is named and cannot run is refused: `ConfigError`, `UnsupportedError`.
    """
    if deterministic:
        return _deterministic(name, storage)
    on_gpu = storage.keys[0][0].is_cuda
    if name == "auto":
        if not on_gpu:
            return _load("sdpa", storage)
        try:
            return _load("triton", storage)
        except (ConfigError, UnsupportedError) as error:
            return Chosen(_load("sdpa", storage).backend, f"attention runs on torch's kernels, which are slower: {error}")
    if name not in BACKENDS:
        raise ConfigError(f"attention backend {name!r} does not exist; there are: {', '.join(BACKENDS)}")
    return _load(name, storage)


def _deterministic(name: str, storage: KVStorage) -> Chosen:
    if name not in ("auto", "triton"):
        raise ConfigError(f"deterministic needs attention backend 'triton', not {name!r}; leave it at auto")
    _load("triton", storage)
    from kvant.attention.triton import DeterministicAttention

    return Chosen(DeterministicAttention)


def _load(name: str, storage: KVStorage) -> Chosen:
    if name == "reference":
        from kvant.attention.reference import ReferenceAttention

        return Chosen(ReferenceAttention)
    if name == "sdpa":
        from kvant.attention.sdpa import SDPAAttention

        return Chosen(SDPAAttention)
    if find_spec("triton") is None:
        raise ConfigError("attention backend 'triton' needs the package triton; pip install 'kvant[gpu]'")
    if not storage.keys[0][0].is_cuda:
        raise ConfigError("attention backend 'triton' needs a GPU; use 'sdpa' or 'reference'")
    from kvant.attention.triton import TritonAttention, refuse_unsupported

    refuse_unsupported(storage)
    return Chosen(TritonAttention)
