"""The arithmetic of the network, one operation per file: story, plain torch reference, fast version, the function that chooses.

The operations are resolved when first used (`kernels.rms_norm(...)`), so that bricks and families can be imported, and
recorded for the native executor, without torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "rms_norm": "rms_norm",
    "rotary_table": "rotary",
    "apply_rotary": "rotary",
    "gated": "gated",
    "soft_cap": "soft_cap",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"kvant.kernels.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kvant.kernels' has no operation {name!r}")
