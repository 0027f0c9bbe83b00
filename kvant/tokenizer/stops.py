"""Stop strings: found in the engine, token by token (StopMatcher); kept from the reader, delta by delta (StopTrimmer).

Both walk one automaton (Aho and Corasick, 1975) built from a request's stop strings. Its state after a text is the longest
suffix that is the beginning of a stop string, so one integer answers both questions: is a stop string complete, and how
much of the text is still ambiguous.

    stops "END", "\\n\\n"     text  ... the EN|         held back "EN"
                                   ... the EN|CORE     "ENCORE" was only a beginning: delivered at once
                                   ... the EN|D.       found "END": nothing of it leaves, nor what follows

Which one ends the text: the stop string that is complete first; of several complete at the same character, the longest.
That depends on the text alone, never on how it was cut into tokens. Bytes in the engine and characters at the door agree,
because UTF-8 has no matches that begin inside a character.

`min_tokens`: the engine feeds every token and disregards what is found before the limit, so a string that was completed
earlier is plain text, and one that begins before the limit and ends after it counts, as in vLLM.
"""

from collections.abc import Callable, Hashable, Sequence


class _Automaton:
    """States are numbers, 0 the empty text. `found[s]` is the longest pattern that ends in s, -1 for none."""

    def __init__(self, patterns: Sequence[Sequence[Hashable]]):
        self.next: list[dict[Hashable, int]] = [{}]
        self.fallback = [0]  # the state of the longest proper suffix
        self.depth = [0]
        self.found = [-1]
        for number, pattern in enumerate(patterns):
            self._insert(pattern, number)
        self._link()

    def step(self, state: int, symbol: Hashable) -> int:
        following = self.next
        while state and symbol not in following[state]:
            state = self.fallback[state]
        return following[state].get(symbol, 0)

    def ambiguous(self, state: int) -> int:
        """Length of the longest suffix that may still grow into a pattern."""
        while state and not self.next[state]:
            state = self.fallback[state]
        return self.depth[state]

    def _insert(self, pattern: Sequence[Hashable], number: int) -> None:
        state = 0
        for symbol in pattern:
            if symbol not in self.next[state]:
                self.next[state][symbol] = len(self.next)
                self.depth.append(self.depth[state] + 1)
                self.next.append({})
                self.fallback.append(0)
                self.found.append(-1)
            state = self.next[state][symbol]
        if self.found[state] < 0:
            self.found[state] = number

    def _link(self) -> None:
        """Fallbacks, breadth first: a state's suffixes are shorter and therefore linked already."""
        queue = list(self.next[0].values())
        for state in queue:
            for symbol, child in self.next[state].items():
                self.fallback[child] = self.step(self.fallback[state], symbol)
                if self.found[child] < 0:
                    self.found[child] = self.found[self.fallback[child]]
                queue.append(child)


class StopMatcher:
    """Looks for stop strings in the bytes of one sequence's tokens. `token_bytes` is what each token shows to the reader."""

    def __init__(self, stop: tuple[str, ...], token_bytes: Callable[[int], bytes]):
        self._stop = stop
        self._token_bytes = token_bytes
        self._automaton = _Automaton([text.encode() for text in stop])
        self._state = 0

    def push(self, token_id: int) -> str | None:
        """One more token. Returns the stop string that it completes, if any: the first one in it."""
        automaton, state, first = self._automaton, self._state, -1
        for byte in self._token_bytes(token_id):
            state = automaton.step(state, byte)
            if first < 0:
                first = automaton.found[state]
        self._state = state
        return self._stop[first] if first >= 0 else None

    def fork(self) -> "StopMatcher":
        """A matcher that goes on from here by itself."""
        twin = object.__new__(StopMatcher)
        twin.__dict__.update(self.__dict__)
        return twin


class StopTrimmer:
    """Holds back what may become a stop string. Whether one ended the text is the engine's word, given to `finish`.

    With `include` the stop string belongs to the text, so nothing needs to be held back.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False):
        self._stop = stop
        self._include = include
        self._automaton = _Automaton(stop)
        self._state = 0
        self._held = ""

    def add(self, text: str) -> str:
        """What may be shown now: everything but the ambiguous end."""
        state = self._state
        for character in text:
            state = self._automaton.step(state, character)
        self._state = state
        ambiguous = 0 if self._include else self._automaton.ambiguous(state)
        pending = self._held + text
        shown = len(pending) - ambiguous
        self._held = pending[shown:]
        return pending[:shown]

    def finish(self, text: str = "", stop: str | None = None) -> str:
        """The rest. `text` is the last token's, `stop` the stop string that it completed, if one ended the sequence."""
        pending = self._held + text
        self._held = ""
        if stop is None:
            return pending
        end = self._end_of(stop, text)
        if end is None:
            return pending
        end += len(pending) - len(text)
        return pending[:end] if self._include else pending[: max(0, end - len(stop))]

    def _end_of(self, stop: str, text: str) -> int | None:
        """Where in `text` the stop string is complete for the first time; None: it was spelled by a token not shown."""
        state = self._state
        for index, character in enumerate(text):
            state = self._automaton.step(state, character)
            found = self._automaton.found[state]
            if found >= 0 and self._stop[found] == stop:
                return index + 1
        return None
