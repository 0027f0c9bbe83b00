"""Which attention runs here: an explicit order, and a refusal that says what was tried."""

from typing import Any

from kvant.errors import ConfigError

BACKENDS = ("triton", "sdpa", "reference")


def backend(name: str, device: str = "cpu") -> Any:
    """The class for `name`. "auto" is triton on a GPU and sdpa on a CPU."""
    if name == "auto":
        name = "triton" if device == "cuda" else "sdpa"
    if name == "triton":
        if device != "cuda":
            raise ConfigError(f"attention backend 'triton' needs a GPU and this is {device!r}; use 'sdpa' or 'reference'")
        from kvant.attention.triton import TritonAttention

        return TritonAttention
    if name == "reference":
        from kvant.attention.reference import ReferenceAttention

        return ReferenceAttention
    if name == "sdpa":
        from kvant.attention.sdpa import SDPAAttention

        return SDPAAttention
    raise ConfigError(f"attention backend {name!r} does not exist; there are: {', '.join(BACKENDS)}")
