"""What one rendering of a chat template may cost. A template comes with a model file: it is a stranger's program.

Every loop turn, call, filter, comparison and printed piece ticks; every string or list that is made is paid for by size.
Nothing that runs between two ticks takes longer than some ten milliseconds, so the deadline is kept closely.
"""

import time
from typing import Any

from jinja2.exceptions import SecurityError

MAX_SOURCE = 128 * 1024  # characters of a template; the largest in the wild have some 30k
MAX_STEPS = 500_000  # ticks; a conversation of 2,000 messages takes some 50k
MAX_SECONDS = 2.0  # wall time; real renderings take milliseconds
MAX_TEXT = 16 * 1024 * 1024  # characters of one string, the output included
MAX_WORK = 128 * 1024 * 1024  # characters made in one rendering, dead or alive: bounds memory too
MAX_ELEMENTS = 100_000  # of one list or range
MAX_NODES = 100_000  # elements of a nested container that is printed or compared, all levels together
MAX_DEPTH = 64  # of such a container
ELEMENT_COST = 8  # characters charged per list element: a pointer
MAX_PRODUCT = 100_000_000  # len(text) * len(pattern) where CPython searches naively: backwards, and in strip()


class TemplateLimitError(SecurityError):
    """The template used up what a rendering may cost."""


class Budget:
    """The account of one rendering; never shared between renderings."""

    def __init__(self, seconds: float = MAX_SECONDS):
        self._steps = MAX_STEPS
        self._work = MAX_WORK
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def tick(self) -> None:
        self._steps -= 1
        if self._steps < 0:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS} steps")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError(f"it runs longer than {self._seconds:g} seconds")

    def spend_text(self, size: int, so_far: int = 0) -> None:
        """Pay for `size` characters before they are made; `so_far` is the length of the string they are added to."""
        if size + so_far > MAX_TEXT:
            raise TemplateLimitError(f"it makes a text of more than {MAX_TEXT} characters")
        self._spend(size)

    def spend_elements(self, count: int) -> None:
        """Pay for a list of `count` elements before it is made."""
        if count > MAX_ELEMENTS:
            raise TemplateLimitError(f"it makes a list of more than {MAX_ELEMENTS} elements")
        self._spend(count * ELEMENT_COST)

    def spend_search(self, text: str, pattern: str | None) -> None:
        """Pay for a search whose worst case is the product of the two lengths."""
        if pattern is not None and len(text) * len(pattern) > MAX_PRODUCT:
            raise TemplateLimitError("it searches a long text for a long pattern")

    def spend_container(self, value: Any) -> None:
        """Pay for walking `value` to its leaves, as printing and comparing do.

        `l = [l, l]` forty times is forty small lists in memory and 2**40 leaves for whoever walks them: counted here,
        with the same multiplicity, before C code that cannot be stopped starts the walk.
        """
        nodes, text = 0, 0
        stack: list[tuple[Any, int]] = [(value, 0)]
        while stack:
            item, depth = stack.pop()
            if isinstance(item, str):
                text += len(item)
                continue
            if isinstance(item, dict):
                children = [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple)):
                children = list(item)
            else:
                continue
            nodes += len(children)
            if nodes > MAX_NODES or depth > MAX_DEPTH:
                raise TemplateLimitError(f"it walks a structure of more than {MAX_NODES} elements or {MAX_DEPTH} levels")
            stack.extend((child, depth + 1) for child in children)
        self.spend_text(text + nodes)

    def _spend(self, size: int) -> None:
        self._work -= size
        if self._work < 0:
            raise TemplateLimitError(f"it makes more than {MAX_WORK} characters of intermediate text")
