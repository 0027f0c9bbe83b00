"""Ways to spoil a file: blindly, byte by byte, and knowingly, by what its format means.

Every function takes a `random.Random`, so that a case is its number. Values are those at which readers break: zero, minus one,
the borders of 32 and 64 bits, not-a-number, another type, something long, something nested.
"""

import json
import random
import struct
from typing import Any

from tests.fuzz.parts import PARTS

NUMBERS = [0, 1, 2, 3, 7, 31, 64, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1]
TEXTS = [
    "",
    " ",
    "\0",
    "x" * 5000,
    "../../etc/passwd",
    "ÿ",
    "▁",
    "<0xZZ>",
    "<0x0A>",
    "\ud7ff",
    "None",
    "0",
    "{{",
    "'s|(",
    "a b",
]
HOSTILE = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch owned') }}",
    "{% for a in range(99999999) %}{% for b in range(99999999) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 999999999 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{" + "(" * 300 + ")" * 300 + "}}",
    "{{ raise_exception(messages) }}",
    "{{ messages | tojson(indent=2**31) }}",
]


def spoil_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four changes: bits, numbers at any place, pieces cut out, doubled or swapped, the end cut off."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out)) if out else 0
        kind = rng.randrange(7)
        if kind == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + 8] = struct.pack("<Q", rng.choice([*NUMBERS, len(out), rng.getrandbits(64)]))
        elif kind == 2:
            out[at : at + 4] = struct.pack("<I", rng.choice([*NUMBERS, rng.getrandbits(32)]) % 2**32)
        elif kind == 3:
            del out[at : at + rng.randint(1, 40)]
        elif kind == 4:
            out[at:at] = out[at : at + rng.randint(1, 40)]
        elif kind == 5:
            other = rng.randrange(len(out)) if out else 0
            out[at : at + 8], out[other : other + 8] = out[other : other + 8], out[at : at + 8]
        elif rng.random() < 0.3:
            del out[at:]
    return bytes(out)


def strange(rng: random.Random, like: Any = None) -> Any:
    """A value that does not belong where `like` is."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return -rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice([0.0, -1.5, 1e-320, 1e308, float("inf"), float("nan")])
    if kind == 3:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice([True, False, None])
    if kind == 5:
        return rng.choice([[], {}, [[]], [None], {"": None}, [0] * 300, [like, like]])
    if kind == 6 and isinstance(like, str):
        return spoil_bytes(like.encode(), rng).decode("utf-8", "replace")
    if kind == 7 and isinstance(like, (int, float)) and not isinstance(like, bool):
        return rng.choice([like + 1, like - 1, like * 2, -like, like / 2, str(like), [like]])
    nested: Any = like
    for _ in range(rng.choice([3, 50, 600])):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def spoil_json(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one to three places changed, removed, renamed, doubled or exchanged."""
    root = [copy(value)]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        container, key = _place(root, rng)
        kind = rng.randrange(6)
        if kind == 0 and container is not root:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[rng.choice([*TEXTS, f"{key}_", *container])] = container.pop(key)
        elif kind == 2:
            other, there = _place(root, rng)
            container[key] = copy(other[there])
        elif kind == 3 and isinstance(container[key], list) and container[key]:
            container[key] = container[key] * rng.choice([2, 3])
        else:
            container[key] = strange(rng, container[key])
    return root[0]


def copy(value: Any) -> Any:
    """A deep copy that recursion cannot stop: what is nested deeper stays shared."""
    try:
        return json.loads(json.dumps(value))
    except RecursionError:
        return value


def spoil_tokenizer(value: dict[str, Any], rng: random.Random) -> Any:
    """A tokenizer.json with one part exchanged, or spoiled like any other JSON."""
    if rng.random() < 0.5:
        return spoil_json(value, rng)
    part = rng.choice(list(PARTS))
    exchanged = value | {part: copy(rng.choice(PARTS[part]))}
    return spoil_json(exchanged, rng) if rng.random() < 0.2 else exchanged


def _place(root: list[Any], rng: random.Random) -> tuple[Any, Any]:
    """A container and a key, found by walking down: a key of the top is as likely as one of ten thousand merges."""
    container, key = root, 0
    while isinstance(container[key], (list, dict)) and container[key] and rng.random() < 0.75:
        container = container[key]
        key = rng.choice(_keys(container))
    return container, key


def _keys(container: Any) -> list[Any]:
    return list(container) if isinstance(container, dict) else list(range(len(container)))


def json_text(value: Any, rng: random.Random) -> bytes:
    """JSON as bytes; now and then with a key twice, spoiled bytes, Python's NaN, or nested too deeply to be written."""
    try:
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b'{"a":' * 100_000
    chance = rng.random()
    if chance < 0.1 and text.startswith(b'{"'):
        return b'{"a":1,"a":2,' + text[1:]
    return spoil_bytes(text, rng) if chance < 0.3 else text


def spoil_template(text: str, rng: random.Random) -> str:
    """A chat template that is broken, hostile, or both."""
    if rng.random() < 0.4:
        at = rng.randrange(len(text) + 1)
        return text[:at] + rng.choice(HOSTILE) + text[at:]
    words = text.replace("{%", "\0{%").replace("{{", "\0{{").split("\0")
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(words))
        words[at] = rng.choice(["", words[at] * 2, rng.choice(words), strange_text(rng, words[at])])
    return "".join(words)


def strange_text(rng: random.Random, like: str) -> str:
    return spoil_bytes(like.encode() or b"x", rng).decode("utf-8", "replace")
