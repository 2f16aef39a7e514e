"""The automaton agrees with a plain search, never shows text too early, and holds back no more than it must."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.frontend.stop_strings import Match, StopAutomaton, StopMatcher

WORDS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)
PARTS = st.lists(st.text("ab", max_size=4), max_size=8)


def first_match(text: str, stops: list[str]) -> tuple[str, str] | None:
    """By brute force: the earliest end, and there the longest stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return None


@given(stops=WORDS, parts=PARTS)
@settings(max_examples=200, deadline=None)
def test_it_finds_what_a_plain_search_finds(stops: list[str], parts: list[str]) -> None:
    matcher = StopMatcher(StopAutomaton(stops))
    shown, so_far = "", ""
    for part in parts:
        so_far += part
        result = matcher.feed(part)
        wanted = first_match(so_far, stops)
        if isinstance(result, Match):
            assert (shown + result.text, result.stop) == wanted
            return
        assert wanted is None
        shown += result
        held = so_far[len(shown) :]
        assert so_far.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops), "held without need"
    assert shown + matcher.flush() == so_far


@given(stops=WORDS, text=st.text("ab", max_size=12))
@settings(max_examples=100, deadline=None)
def test_peek_agrees_with_feed(stops: list[str], text: str) -> None:
    matcher = StopMatcher(StopAutomaton(stops))
    peeked = matcher.peek(text)
    assert peeked == isinstance(matcher.feed(text), Match)


def test_a_stop_string_does_not_count_before_it_is_enabled() -> None:
    matcher = StopMatcher(StopAutomaton(["END"]))
    assert matcher.feed("one END two E", enabled=False) == "one END two "
    result = matcher.feed("ND three")
    assert isinstance(result, Match)
    assert (result.text, result.stop) == ("", "END")


def test_one_that_ends_before_it_is_enabled_stays_uncounted() -> None:
    matcher = StopMatcher(StopAutomaton(["aa"]))
    shown, rest = matcher.feed("aa", enabled=False), matcher.feed("b")
    assert isinstance(shown, str) and isinstance(rest, str)
    assert shown + rest == "aab"


def test_the_longest_of_those_that_end_together() -> None:
    result = StopMatcher(StopAutomaton(["c", "bc", "abc"])).feed("xxabc")
    assert result == Match("xx", "abc")
