"""Every operation by name, loaded when it is first used.

Bricks call `ops.rms_norm(...)`, so that they and the families can be imported, and recorded for the native executor, without
torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "rms_norm": "rms_norm",
    "add_rms_norm": "rms_norm",
    "rotary_table": "rotary",
    "apply_rotary": "rotary",
    "rotary_and_store": "rotary",
    "linear": "linear",
    "norm_linear": "linear",
    "norm_gated_linear": "linear",
    "linear_add": "linear",
    "gated": "gated",
    "soft_cap": "soft_cap",
    "on_gpu": "language",
    "logits": "linear",
    "fixed_linear": "linear",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"there is no operation {name!r}; there are {', '.join(_HOMES)}")
    operation = globals()[name] = getattr(import_module(f"kvant.kernels.{_HOMES[name]}"), name)
    return operation
