"""The engine's half (StopMatcher, bytes) and the reader's half (StopTrimmer, text) against a search of the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvant.tokenizer.stops import StopMatcher, StopTrimmer


def naive(text: str, stops: tuple[str, ...], after: int = 0) -> tuple[str, int, int] | None:
    """(stop, start, end) of the match that is complete first, and only after character `after`; the longest of equals."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, after - len(stop) + 1))
        if start >= 0:
            found.append((start + len(stop), -len(stop), stop))
    if not found:
        return None
    end, negative, stop = min(found)
    return stop, end + negative, end


def run(tokens: list[str], stops: tuple[str, ...], *, include=False, min_tokens=0, per_delta=1) -> tuple[list[str], str | None]:
    """An engine and a door: tokens until one completes a stop string, then the trimmed deltas and the stop."""
    matcher = StopMatcher(stops, lambda number: tokens[number].encode())
    trimmer = StopTrimmer(stops, include)
    deltas, pending = [], ""
    for number, token in enumerate(tokens):
        found = matcher.push(number)
        if found is not None and number + 1 >= min_tokens:
            if pending:
                deltas.append(trimmer.add(pending))
            return [*deltas, trimmer.finish(token, found)], found
        pending += token
        if (number + 1) % per_delta == 0:
            deltas.append(trimmer.add(pending))
            pending = ""
    return [*deltas, trimmer.finish(pending)], None


LETTERS = st.text(alphabet="abé😀\n", max_size=24)
STOPS = st.lists(st.text(alphabet="abé😀\n", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@st.composite
def cut_texts(draw) -> list[str]:
    """A text in tokens of any size; empty tokens (skipped special ones) among them."""
    text = draw(LETTERS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(tokens=cut_texts(), stops=STOPS, include=st.booleans(), per_delta=st.integers(1, 4))
@settings(max_examples=600, deadline=None)
def test_R07_any_cut_gives_the_text_of_the_whole_string_search(tokens, stops, include, per_delta):
    text = "".join(tokens)
    deltas, found = run(tokens, stops, include=include, per_delta=per_delta)
    expected = naive(text, stops)
    if expected is None:
        assert ("".join(deltas), found) == (text, None)
    else:
        stop, start, end = expected
        assert ("".join(deltas), found) == (text[: end if include else start], stop)


@given(tokens=cut_texts(), stops=STOPS, min_tokens=st.integers(0, 8))
@settings(max_examples=400, deadline=None)
def test_R08_min_tokens_disregards_what_is_complete_before(tokens, stops, min_tokens):
    text = "".join(tokens)
    before = len("".join(tokens[: max(0, min_tokens - 1)]))  # the limit's own token is the first that counts
    deltas, found = run(tokens, stops, min_tokens=min_tokens)
    expected = naive(text, stops, before)
    assert found == (expected[0] if expected else None)
    assert "".join(deltas) == (text[: expected[1]] if expected else text)


@given(tokens=cut_texts(), stops=STOPS)
@settings(max_examples=300, deadline=None)
def test_R07_no_more_than_the_ambiguous_suffix_is_held(tokens, stops):
    trimmer = StopTrimmer(stops)
    text = shown = ""
    for token in tokens:
        text += token
        shown += trimmer.add(token)
        ambiguous = max(
            (k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])),
            default=0,
        )
        assert shown == text[: len(text) - ambiguous]


def test_R07_stop_string_never_leaks_and_lookalikes_are_delivered():
    deltas, found = run(["Answer", ": the EN", "CORE and the E", "N", "D", " and more"], ("END",))
    assert deltas == ["Answer", ": the ", "ENCORE and the ", "", ""]
    assert found == "END"


def test_R07_a_lookalike_at_the_very_end_is_delivered():
    assert run(["the EN"], ("END",)) == (["the ", "EN"], None)


def test_R07_text_after_the_stop_in_the_same_token_is_dropped():
    assert "".join(run(["ab\n\ncd"], ("\n\n",))[0]) == "ab"
    assert "".join(run(["ab\n\ncd"], ("\n\n",), include=True)[0]) == "ab\n\n"


def test_overlapping_stops_the_first_complete_wins_then_the_longest():
    assert run(["xabcd"], ("abcd", "c"))[1] == "c"
    assert "".join(run(["xab"], ("b", "ab"))[0]) == "x"
    assert run(["aab"], ("ab", "aab"))[1] == "aab"


def test_R08_a_match_across_the_limit_counts():
    deltas, found = run(["STOP", " ST", "OP"], ("STOP",), min_tokens=3)
    assert ("".join(deltas), found) == ("STOP ", "STOP")


def test_with_include_nothing_is_held_back():
    assert run(["the EN", "D"], ("END",), include=True)[0] == ["the EN", "D"]


def test_a_stop_string_spelled_by_a_token_not_shown_trims_nothing():
    trimmer = StopTrimmer(("<|im_end|>",))
    assert trimmer.add("Hi") + trimmer.finish("", "<|im_end|>") == "Hi"


def test_forks_go_on_by_themselves():
    tokens = [b"E", b"N", b"D", b"x"]
    first = StopMatcher(("END",), lambda number: tokens[number])
    first.push(0)
    second = first.fork()
    assert [first.push(n) for n in (1, 2)] == [None, "END"]
    assert [second.push(n) for n in (3, 1, 2)] == [None, None, None]


def test_without_stops_everything_passes():
    matcher, trimmer = StopMatcher((), lambda number: b"a"), StopTrimmer(())
    assert matcher.push(0) is None and trimmer.add("abc") == "abc" and trimmer.finish("d") == "d"


def test_a_long_stop_string_costs_nothing_per_token():
    """64 stops of 1,000 characters: a step is a look-up, whatever their length."""
    import time

    stops = tuple(chr(97 + n % 26) * 999 + str(n) for n in range(64))
    matcher = StopMatcher(stops, lambda number: b"aaaa")
    started = time.perf_counter()
    for number in range(5000):
        matcher.push(number)
    assert time.perf_counter() - started < 1.0
