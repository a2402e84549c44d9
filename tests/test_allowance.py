"""How much of a volunteer's time comparisons may take: no pattern of asking gets more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.allowance import Allowance, Rate

ALL, EACH = Rate(20.0, 0.5), Rate(10.0, 0.1)


def test_an_asker_gets_its_burst_and_then_waits_for_its_debt() -> None:
    allowance = Allowance(ALL, EACH, 4, 0.0)
    assert allowance.wait_s("a", 0.0) == 0
    allowance.charge("a", 12.0, 0.0)  # one piece of work may overdraw
    assert allowance.wait_s("a", 0.0) == 25.0
    assert allowance.wait_s("b", 0.0) == 0
    assert allowance.wait_s("a", 24.0) > 0
    assert allowance.wait_s("a", 25.0) == 0


def test_many_askers_get_no_more_than_all_may_together() -> None:
    allowance = Allowance(ALL, EACH, 4, 0.0)
    for asker in ("a", "b", "c"):
        allowance.charge(asker, 7.0, 0.0)
    assert allowance.wait_s("new", 0.0) == 3.0


def test_who_was_forgotten_is_still_bound_by_what_all_have() -> None:
    allowance = Allowance(ALL, EACH, 2, 0.0)
    for asker in ("a", "b", "c"):
        allowance.charge(asker, 10.0, 0.0)
    assert allowance.wait_s("a", 0.0) == 21.0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0, 5), st.floats(0, 3)), max_size=80))
def test_nobody_gets_more_than_burst_and_rate(asked: list[tuple[str, float, float]]) -> None:
    allowance, now, spent = Allowance(ALL, EACH, 3, 0.0), 0.0, 0.0
    for asker, pause, seconds in asked:
        now += pause
        if allowance.wait_s(asker, now) == 0:
            allowance.charge(asker, seconds, now)
            spent += seconds
    assert spent <= ALL.burst_s + ALL.per_s * now + 3.0 + 1e-6  # the last piece may overdraw
