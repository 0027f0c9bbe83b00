"""How a model stretches its positions: `rope_scaling`, or `rope_parameters` as newer files say, read and made complete.

    default   nothing is stretched
    linear    every position divided by `factor`                                  (Chen et al., 2023)
    dynamic   a larger base once a context is longer than the trained one         (NTK-aware; bloc97, emozilla, 2023)
    yarn      long waves divided, short ones kept, a ramp between                 (Peng et al., 2023)
    longrope  a divisor per frequency, one list for short contexts, one for long  (Ding et al., 2024; "su" in older files)
    llama3    long waves divided, short ones kept, a blend between                (Llama 3.1)

What a file leaves out is filled in here as transformers does it, so that the arithmetic (`layers/frequencies.py`) meets
numbers only. A type that is not in this list is refused by name.
"""

import math
from dataclasses import dataclass
from typing import Any

from kvant.errors import CheckpointError, UnsupportedError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
LARGEST = 1e9  # of any number here: far beyond sense, and powers of it are still finite
MAX_PAIRS = 4096  # of a list of divisors: a lying file must not make it long


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """`rope_type` names the rule; numbers that it does not use keep their defaults.

    `attention_factor` is what cosines and sines are multiplied by, `original_max_position_embeddings` the context that the
    model was trained in before it was stretched.
    """

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3: waves turning less often than this in the original context are long
    high_freq_factor: float = 4.0  # llama3: those turning more often than this are short
    beta_fast: float = 32.0  # yarn: the same two, as the ramp's ends
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the ramp begins and ends at whole frequencies
    short_factor: tuple[float, ...] = ()  # longrope: divisors of the frequencies
    long_factor: tuple[float, ...] = ()

    @classmethod
    def from_dict(cls, raw: Any, max_position_embeddings: int, original: int | None = None) -> "RopeScaling":
        """Reads `raw`, in either spelling. `original` is the config's own `original_max_position_embeddings`, which wins.

        Raises `UnsupportedError` for a type that is not built here, `CheckpointError` for numbers that make no sense.
        """
        if not raw:
            return cls()
        if not isinstance(raw, dict):
            raise CheckpointError(f"the model's rope_scaling is {str(raw)[:40]!r}, not a table of keys")
        kind = _kind(raw)
        if kind == "default":
            return cls()
        trained = max_position_embeddings
        if kind in ("yarn", "longrope", "llama3"):
            trained = _count(
                "original_max_position_embeddings", original or raw.get("original_max_position_embeddings", trained)
            )
        # Phi-3's files leave the factor out: it is how much longer the context became.
        implied = max_position_embeddings / trained if kind in ("yarn", "longrope") else None
        factor = _number(raw, "factor", implied)
        ends = _ENDS.get(kind, ())
        lists = ("short_factor", "long_factor") if kind == "longrope" else ()
        numbers: dict[str, Any] = {key: _number(raw, key, _DEFAULTS[key]) for key in ends}
        numbers |= {key: _divisors(raw, key) for key in lists}
        scaling = cls(
            rope_type=kind,
            factor=factor,
            original_max_position_embeddings=trained,
            attention_factor=_attention_factor(kind, raw, factor, trained),
            truncate=bool(raw.get("truncate", True)),
            **numbers,
        )
        if kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
            raise CheckpointError("the model's rope_scaling has a high_freq_factor that is not above its low_freq_factor")
        return scaling


_ENDS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_fast", "beta_slow")}
_DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}


def _kind(raw: dict[str, Any]) -> str:
    kind = raw.get("rope_type", raw.get("type", "default"))  # both spellings occur in the wild
    if kind == "su" or (kind == "yarn" and "long_factor" in raw):  # what Phi-3's first files called it
        kind = "longrope"
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UnsupportedError(
            f"rope_scaling type {str(kind)[:40]!r} is not built here; supported: {', '.join(ROPE_TYPES)} (see docs/models.md)"
        )
    return kind


def _attention_factor(kind: str, raw: dict[str, Any], factor: float, trained: int) -> float:
    """What the file says, or what the type's paper advises."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    if raw.get("attention_factor") is not None:
        return _number(raw, "attention_factor", None)
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    mscale, mscale_all_dim = raw.get("mscale"), raw.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn(factor, _number(raw, "mscale", 1.0)) / _yarn(factor, _number(raw, "mscale_all_dim", 1.0))
    return _yarn(factor, 1.0)


def _yarn(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _number(raw: dict[str, Any], key: str, default: float | None) -> float:
    """A positive number; null and absent mean the default, and where there is none the key must be there."""
    value = raw.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < LARGEST:
        raise CheckpointError(f"the model's rope_scaling needs a positive number for {key}, not {str(value)[:40]!r}")
    return float(value)


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 < value < 2**31:
        raise CheckpointError(f"the model's {key} must be a whole number above 1, not {str(value)[:40]!r}")
    return value


def _divisors(raw: dict[str, Any], key: str) -> tuple[float, ...]:
    values = raw.get(key)
    if not isinstance(values, (list, tuple)) or not 0 < len(values) <= MAX_PAIRS:
        raise CheckpointError(f"the model's rope_scaling needs a list of numbers for {key}, not {str(values)[:40]!r}")
    return tuple(_number({key: value}, key, None) for value in values)
