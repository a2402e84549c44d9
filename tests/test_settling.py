"""The policy of when to place anew, by examples and by properties over any set of workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.settling import (
    EXCLUDED_S_MAX,
    MEASURING_S,
    REPLACE_AFTER_S,
    REST_S_MAX,
    UNCOVERED_AFTER_S,
    Decision,
    Present,
    decide,
    exclusion_s,
    rest_s,
)

NOBODY: frozenset[str] = frozenset()
NOW = 1000.0


def ask(
    holders: str = "",
    present: str = "",
    considered: str | None = None,
    lost: dict[str, float] | None = None,
    since_s: float = 0.0,
    expected: int = 0,
    settle_s: float = 3.0,
    barred: str = "",
    uncovered: bool = False,
    outdated: bool = False,
    measuring: str = "",
) -> Decision:
    """Peers are single letters; everyone is present since `since_s`; those barred may hold nothing."""
    return decide(
        frozenset(holders),
        frozenset(holders if considered is None else considered),
        {peer: Present(since_s, peer not in barred, peer in measuring) for peer in present},
        lost or {},
        expected=expected,
        settle_s=settle_s,
        now=NOW,
        uncovered=uncovered,
        outdated=outdated,
    )


def test_who_is_being_measured_is_waited_for() -> None:
    waits = Decision(None, MEASURING_S - 1, "1 of 3 workers to be measured")
    assert ask(present="abc", since_s=NOW - 1, measuring="c", settle_s=0.0) == waits
    assert ask(present="abc", since_s=NOW - 1, measuring="c", expected=3) == waits
    assert ask("ab", "abc", since_s=NOW - 1, measuring="c") == waits
    assert ask(present="abc", since_s=NOW - MEASURING_S, measuring="c").workers == frozenset("abc")
    assert ask("ab", "ab", measuring="b") == Decision(None, None)  # it was placed before, with what was known of it
    assert ask("ab", "ac", measuring="c", since_s=NOW, uncovered=True).workers == frozenset("ac")  # no time for that


def test_examples() -> None:
    assert ask() == Decision(None, None, "workers to join")
    assert ask(present="ab").workers == frozenset("ab")
    assert ask(present="ab", expected=3) == Decision(None, None, "1 of 3 workers to join")
    assert ask(present="abc", expected=3, since_s=NOW).workers == frozenset("abc")  # no need to settle
    assert ask(present="ab", since_s=NOW - 1) == Decision(None, 2.0, "joining to settle")
    assert ask("ab", "ab") == Decision(None, None)
    assert ask("ab", "abc").workers == frozenset("abc")
    assert ask("ab", "abc", considered="abc") == Decision(None, None)  # c has no room for anything
    assert ask("ab", "ac").workers == frozenset("ac")  # b left before anyone remembers
    assert ask("ab", "a", lost={"b": NOW}) == Decision(None, REPLACE_AFTER_S, "1 of 2 workers to come back")
    assert ask("ab", "ac", lost={"b": NOW - 10}).again_s == REPLACE_AFTER_S - 10
    assert ask("ab", "a", lost={"b": NOW - REPLACE_AFTER_S}).workers == frozenset("a")
    assert ask("ab", "", lost=dict.fromkeys("ab", 0.0)) == Decision(None, None, "workers to join")


def test_a_lost_holder_is_no_emergency_while_others_have_copies() -> None:
    lost = {"b": NOW - UNCOVERED_AFTER_S}
    assert ask("ab", "a", lost=lost).again_s == REPLACE_AFTER_S - UNCOVERED_AFTER_S
    assert ask("ab", "a", lost=lost, uncovered=True).workers == frozenset("a")
    assert ask("ab", "a", lost={"b": NOW - 1}, uncovered=True).again_s == UNCOVERED_AFTER_S - 1
    assert ask("ab", "ac", lost=lost, since_s=NOW, uncovered=True).workers == frozenset("ac")  # no time to settle
    assert ask("ab", "ab", uncovered=True) == Decision(None, None)  # nobody left: placing anew adds no copy


def test_a_peer_that_comes_and_goes_does_not_hold_up_the_others() -> None:
    assert ask("abc", "a", lost={"b": NOW - 31, "c": NOW - 1}).again_s == REPLACE_AFTER_S - 1
    assert ask("abc", "a", lost={"b": NOW - 59, "c": NOW - 1}).again_s == 1
    assert ask("abc", "a", lost={"b": NOW - 60, "c": NOW - 1}).workers == frozenset("a")


def test_holders_that_may_hold_nothing_any_more_are_replaced_at_once() -> None:
    assert ask("ab", "ab", barred="b").workers == frozenset("a")
    assert ask("ab", "abc", barred="b", since_s=NOW).workers == frozenset("ac")
    assert ask("ab", "abc", barred="c") == Decision(None, None)  # nor does a newcomer that may not count
    assert ask(present="ab", barred="b", expected=2) == Decision(None, None, "1 of 2 workers to join")
    assert ask("ab", "ab", barred="ab") == Decision(None, None, "workers to join")
    assert ask("ab", "ab", outdated=True).workers == frozenset("ab")
    assert ask("abc", "ab", barred="b", lost={"c": NOW}).again_s == REPLACE_AFTER_S  # one thing at a time


PEERS = st.frozensets(st.sampled_from("abcdef"))
SINCE = st.dictionaries(st.sampled_from("abcdef"), st.floats(0, NOW))


@given(PEERS, PEERS, SINCE, SINCE, st.integers(0, 7), st.floats(0.1, 100))
def test_any_decision_is_sane(
    holders: frozenset[str],
    considered: frozenset[str],
    since: dict[str, float],
    lost: dict[str, float],
    expected: int,
    settle_s: float,
) -> None:
    considered |= holders
    present = {peer: Present(instant) for peer, instant in since.items()}

    def at(now: float) -> Decision:
        return decide(holders, considered, present, lost, expected=expected, settle_s=settle_s, now=now)

    decision = at(NOW)
    assert decision == at(NOW)
    away = holders - present.keys()
    if decision.workers is not None:
        assert decision.workers == present.keys() != NOBODY
        assert away or present.keys() - considered or not holders
        left = [lost.get(peer, 0.0) for peer in away]
        assert not left or max(left) <= NOW - REPLACE_AFTER_S or min(left) <= NOW - 2 * REPLACE_AFTER_S
        assert holders or len(present) >= expected
        return
    if present.keys() == holders == considered:
        assert decision == Decision(None, None, "" if holders else "workers to join")
    if decision.again_s is not None:
        # Whoever looks again then, with nothing changed, is not told to wait again for the same reason.
        assert decision.again_s > 0
        later = at(NOW + decision.again_s + 1e-6)
        assert later.again_s is None or later.waiting_for != decision.waiting_for
    else:
        assert at(NOW + 1e9).workers is None  # nothing but news would change it


@given(st.integers(1, 10**6))
def test_rests_and_exclusions_grow_and_end(times: int) -> None:
    assert 0 < rest_s(times) <= rest_s(times + 1) <= REST_S_MAX
    assert 0 < exclusion_s(times) <= exclusion_s(times + 1) <= EXCLUDED_S_MAX
