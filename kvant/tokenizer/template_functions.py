"""What a chat template may call: string methods, filters, functions. What is not listed is refused by name.

Each entry does three things at once: what jinja2 or str would do, keep the spans of template-written text
(`template_text.py`), and pay the budget before it makes anything (`template_budget.py`).
"""

import functools
import itertools
import json
import re
import string
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Undefined
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_environment

from kvant.tokenizer import template_text as tt
from kvant.tokenizer.template_budget import MAX_ELEMENTS, Budget

Function = Callable[..., Any]

LOOKING_METHODS = frozenset({  # of str: they make no text
    "startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalpha", "isdigit", "isdecimal", "isnumeric",
    "isalnum", "isspace", "isupper", "islower", "istitle", "isascii", "isidentifier",
})  # fmt: skip
CONTAINER_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"index", "count"}),
    tuple: frozenset({"index", "count"}),
}

# Filters and tests taken from jinja2 as they are: they neither make text nor loop beyond their input.
PLAIN_FILTERS = (
    "abs", "count", "d", "default", "first", "float", "int", "items", "last", "length", "map", "reject", "rejectattr",
    "reverse", "select", "selectattr",
)  # fmt: skip
COMPARING_FILTERS = ("max", "min", "sort", "unique")
COMPARING_TESTS = frozenset(
    {"eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "gt", "greaterthan", ">", "le", "<=", "ge", ">=", "in"}
)

MAX_INDENT = 8
_WIDE = re.compile(r"\d{4}")  # a width or precision of thousands is a bomb, not a format
_PERCENT = re.compile(r"%(?:\((?P<key>[^)]*)\))?(?P<spec>[#0\- +]*\d*(?:\.\d+)?)(?P<kind>[diouxXeEfFgGcs%])")


class Refusal(Exception):
    """The template's own raise_exception: the conversation does not suit it."""


class SafeNamespace(Namespace):
    """jinja2's namespace without underscore names, which reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        if any(str(name).startswith("_") for name in values):
            raise SecurityError("namespace() with a name that starts with an underscore")
        Namespace.__init__(self, values)


class Functions:
    """The tables for one rendering: `methods` of str, `filters`, `tests`, `functions`; all charge `budget`."""

    def __init__(self, budget: Budget):
        self.budget = budget
        self.methods: dict[str, Function] = {
            "strip": self._strip,
            "lstrip": functools.partial(self._strip, right=False),
            "rstrip": functools.partial(self._strip, left=False),
            "split": self._split,
            "rsplit": functools.partial(self._split, from_right=True),
            "splitlines": self._splitlines,
            "partition": self._partition,
            "rpartition": functools.partial(self._partition, from_right=True),
            "removeprefix": lambda text, affix: text[len(affix) :] if text.startswith(affix) else text,
            "removesuffix": lambda text, affix: text[: len(text) - len(affix)] if text.endswith(affix) else text,
            "replace": self.replace,
            "join": self._join_method,
            "format": self.format_braces,
            **{name: functools.partial(self._recase, name) for name in ("upper", "lower", "capitalize", "title", "swapcase")},
        }
        self.filters: dict[str, Function] = {
            **{name: self._ticking(FILTERS[name]) for name in PLAIN_FILTERS},
            **{name: self._comparing(FILTERS[name]) for name in COMPARING_FILTERS},
            "dictsort": self._dictsort,
            "list": self._list,
            "join": pass_environment(functools.partial(self._join_filter)),
            "string": self.text,
            "safe": self.text,
            "trim": lambda value, chars=None: self._strip(self.text(value), chars),
            "replace": lambda value, old, new, count=-1: self.replace(self.text(value), self.text(old), self.text(new), count),
            "format": lambda value, *args, **kwargs: self.format_percent(self.text(value), kwargs or args),
            "indent": self._indent,
            "tojson": self._tojson,
            **{name: self._case_filter(name) for name in ("upper", "lower", "capitalize", "title")},
        }
        self.tests: dict[str, Function] = {name: self._test(name, test) for name, test in TESTS.items()}
        self.functions: dict[str, Function] = {
            "range": self._range,
            "dict": self._dict,
            "namespace": SafeNamespace,
            "raise_exception": self._raise_exception,
            "strftime_now": self._strftime_now,
        }

    # --- text ------------------------------------------------------------------------------------------------------------

    def text(self, value: Any) -> str:
        """What `{{ value }}` prints. Only plain data has a text; functions and namespaces are the template's mistake."""
        self.budget.tick()
        if isinstance(value, str):
            return value
        if isinstance(value, (list, tuple, dict)):
            self.budget.spend_container(value)
        elif not isinstance(value, (int, float, Undefined, type(None))):
            raise SecurityError(f"it prints an object of type {type(value).__name__}")
        text = str(value)
        self.budget.spend_text(len(text))
        return text

    def concat(self, parts: Iterable[Any]) -> str:
        """All parts as text in a row: what a template, a macro or `~` returns."""
        pieces, size = [], 0
        for part in parts:
            piece = self.text(part)
            self.budget.spend_text(len(piece), size)
            size += len(piece)
            pieces.append(piece)
        return tt.concat(pieces)

    def join(self, separator: str, parts: Iterable[Any]) -> str:
        pieces, size = [], 0
        for part in parts:
            piece = self.text(part)
            self.budget.spend_text(len(piece) + len(separator), size)
            size += len(piece) + len(separator)
            pieces.append(piece)
        return tt.join(separator, pieces)

    def repeat(self, text: str, times: int) -> str:
        self.budget.spend_text(len(text) * max(times, 0))
        return tt.repeat(text, times)

    def replace(self, text: str, old: str, new: str, count: int | None = -1) -> str:
        limit = -1 if count is None else count
        found = text.count(old)
        found = found if limit < 0 else min(found, limit)
        self.budget.spend_text(len(text) + found * len(new))
        if found > MAX_ELEMENTS:
            return str.replace(text, old, new, limit)  # too many pieces to keep track of
        return tt.replace(text, old, new, limit)

    def format_percent(self, text: str, values: Any) -> str:
        """`text % values` for the conversions of C's printf, without stars and with widths below 1000."""
        if _WIDE.search(text) or "*" in text:
            raise SecurityError("a % format with a width of thousands or a star")
        literal = tt.literal if tt.all_written(text) else str
        arguments = iter(values if isinstance(values, tuple) else (values,))
        pieces: list[str] = []
        position = 0
        for match in _PERCENT.finditer(text):
            pieces.append(literal(text[position : match.start()]))
            position = match.end()
            key, spec, kind = match["key"], match["spec"], match["kind"]
            if kind == "%":
                pieces.append(literal("%"))
                continue
            value = values[key] if key is not None else next(arguments)
            pieces.append(self.text(value) if kind == "s" and not spec else f"%{spec}{kind}" % (value,))
        pieces.append(literal(text[position:]))
        return self.concat(pieces)

    def format_braces(self, text: str, *args: Any, **kwargs: Any) -> str:
        """`text.format(...)` with plain fields: no attributes, no indices, no nested or wide formats."""
        literal = tt.literal if tt.all_written(text) else str
        pieces: list[str] = []
        automatic = iter(args)
        for before, field, spec, conversion in string.Formatter().parse(text):
            pieces.append(literal(before))
            if field is None:
                continue
            if (
                not re.fullmatch(r"\w*", field)
                or conversion not in (None, "s")
                or "{" in (spec or "")
                or _WIDE.search(spec or "")
            ):
                raise SecurityError(f"format field {field!r} with attributes, conversions or a width of thousands")
            value = next(automatic) if not field else args[int(field)] if field.isdigit() else kwargs[field]
            pieces.append(format(self.text(value) if conversion else value, spec) if spec else self.text(value))
        return self.concat(pieces)

    def _recase(self, how: str, text: str) -> str:
        self.budget.spend_text(len(text))
        return tt.recased(text, getattr(str, how)(text))

    def _case_filter(self, how: str) -> Function:
        return lambda value: self._recase(how, self.text(value))

    def _strip(self, text: str, chars: str | None = None, *, left: bool = True, right: bool = True) -> str:
        self.budget.spend_search(text, chars)
        self.budget.spend_text(len(text))
        return tt.strip(text, chars, left=left, right=right)

    def _split(self, text: str, sep: str | None = None, maxsplit: int = -1, *, from_right: bool = False) -> list[str]:
        if from_right:
            self.budget.spend_search(text, sep)
        self.budget.spend_text(len(text))
        pieces = tt.split(text, sep, min(maxsplit, MAX_ELEMENTS) if maxsplit >= 0 else MAX_ELEMENTS, from_right=from_right)
        self.budget.spend_elements(len(pieces))
        return pieces

    def _splitlines(self, text: str, keepends: bool = False) -> list[str]:
        self.budget.spend_elements(len(str.splitlines(text)))
        lines, position = [], 0
        for line, body in zip(str.splitlines(text, True), str.splitlines(text), strict=True):
            lines.append(tt.cut(text, position, position + len(line if keepends else body)))
            position += len(line)
        self.budget.spend_text(len(text))
        return lines

    def _partition(self, text: str, separator: str, *, from_right: bool = False) -> tuple[str, str, str]:
        self.budget.spend_search(text, separator if from_right else None)
        self.budget.spend_text(len(text))
        before, middle, _ = (str.rpartition if from_right else str.partition)(text, separator)
        first, second = len(before), len(before) + len(middle)
        return tt.cut(text, 0, first), tt.cut(text, first, second), tt.cut(text, second, len(text))

    def _join_method(self, separator: str, parts: Iterable[Any]) -> str:
        parts = list(parts)
        if not all(isinstance(part, str) for part in parts):
            raise TypeError("join() takes strings only")
        return self.join(separator, parts)

    # --- filters ---------------------------------------------------------------------------------------------------------

    def _ticking(self, filter_function: Function) -> Function:
        """A filter of jinja2 with its calling convention (`jinja_pass_arg`) kept."""

        @functools.wraps(filter_function)
        def ticking(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            return filter_function(*args, **kwargs)

        return ticking

    def _comparing(self, filter_function: Function) -> Function:
        """One that compares the elements of its input: (environment, value, ...)."""

        @functools.wraps(filter_function)
        def comparing(environment: Any, value: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
            return filter_function(environment, self._list(value), *args, **kwargs)

        return comparing

    def _test(self, name: str, test: Any) -> Function:
        @functools.wraps(test)
        def ticking(*args: Any, **kwargs: Any) -> Any:
            self.budget.tick()
            if name in COMPARING_TESTS:
                self.budget.spend_container(args)
            return test(*args, **kwargs)

        return ticking

    def _list(self, value: Iterable[Any]) -> list[Any]:
        self.budget.tick()
        elements = list(itertools.islice(value, MAX_ELEMENTS + 1))
        self.budget.spend_elements(len(elements))
        self.budget.spend_container(elements)
        return elements

    def _dictsort(self, value: Mapping[str, Any], case_sensitive: bool = False, by: str = "key", reverse: bool = False) -> Any:
        self.budget.tick()
        self.budget.spend_container(value)
        return FILTERS["dictsort"](value, case_sensitive, by, reverse)

    def _join_filter(self, environment: Any, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(environment, attribute), value)
        return self.join(self.text(d), value)

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        """Puts `width` spaces (or that string) before every line but the first; empty lines only with `blank`."""
        prefix = width if isinstance(width, str) else " " * min(width, 64)
        lines = self._splitlines(self.text(value), keepends=True)
        self.budget.spend_text(len(lines) * len(prefix))
        return tt.concat(
            piece
            for index, line in enumerate(lines)
            for piece in ((prefix, line) if (index or first) and (blank or line.strip()) else (line,))
        )

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON without HTML escapes, as templates are written for. The result counts as content."""
        self.budget.tick()
        self.budget.spend_container(value)
        if indent is not None and not 0 <= int(indent) <= MAX_INDENT:
            raise SecurityError(f"tojson with an indent above {MAX_INDENT}")
        if separators is not None and sum(map(len, separators)) > MAX_INDENT:
            raise SecurityError(f"tojson with separators of more than {MAX_INDENT} characters")
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        self.budget.spend_text(len(text))
        return text

    # --- functions -------------------------------------------------------------------------------------------------------

    def _range(self, *args: int) -> range:
        numbers = range(*args)
        if len(numbers) > MAX_ELEMENTS:
            raise SecurityError(f"range() of more than {MAX_ELEMENTS} numbers")
        return numbers

    def _dict(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        self.budget.spend_container((args, kwargs))
        return dict(*args, **kwargs)

    def _raise_exception(self, message: Any) -> str:
        raise Refusal(self.text(message))

    def _strftime_now(self, format: str) -> str:
        if len(format) > 256 or re.search(r"%[^a-zA-Z%]*\d{3}", format):
            raise SecurityError("strftime_now() with a very long format")
        return datetime.now().strftime(format)
