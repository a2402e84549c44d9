"""When a volunteer's machine works: the decisions, what the machine says, and a swarm in which one pauses."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from types import SimpleNamespace

import psutil
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import UsageError
from scheduler.availability import RETURN_S, Availability, Conditions, Facts, Window, causes
from swarmnode import availability
from swarmnode.availability import AvailabilityWatch
from swarmnode.config import parse_config
from swarmnode.shards.pace import Pace

MONDAY = datetime(2024, 1, 1)
WORKS = Facts(0, 0)


@given(st.integers(0, 6), st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1440))
def test_a_window_is_the_time_from_its_begin_to_its_end(day: int, minute: int, begin: int, end: int) -> None:
    window = Window(frozenset({2}), begin, end)
    length = end - begin if begin < end else end - begin + 1440
    start = MONDAY + timedelta(days=2, minutes=begin)
    now = MONDAY + timedelta(days=day, minutes=minute)
    ages = [(now + timedelta(weeks=week) - start).total_seconds() / 60 for week in (0, 1)]
    assert window.holds(day, minute) is any(0 <= age < length for age in ages)


@pytest.mark.parametrize(
    ("text", "days", "begin", "end"),
    [
        ("22:00-07:00", range(7), 1320, 420),
        ("sat,sun 00:00-24:00", (5, 6), 0, 1440),
        ("Fri-Mon 9:05 - 17:30", (4, 5, 6, 0), 545, 1050),
    ],
)
def test_windows_as_people_write_them(text: str, days: Sequence[int], begin: int, end: int) -> None:
    assert Window.parse(text) == Window(frozenset(days), begin, end)


@pytest.mark.parametrize(
    "text", ["", "22-7", "25:00-07:00", "22:60-07:00", "22:00-24:01", "day 1:00-2:00", "mon- 1:00-2:00"]
)
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        Window.parse(text)
    assert "22:00-07:00" in error.value.hint
    with pytest.raises(UsageError, match=r"\[limits\] hours must be times to work in: .* Write for example [^']*\.$"):
        parse_config(f'[limits]\nhours = ["{text}"]')


@pytest.mark.parametrize(
    ("conditions", "facts", "cause"),
    [
        (Conditions(), WORKS, None),
        (Conditions((Window.parse("22:00-07:00"),)), Facts(0, 12 * 60), "not its hours"),
        (Conditions((Window.parse("22:00-07:00"),)), Facts(0, 23 * 60), None),
        (Conditions(), Facts(0, 0, battery=True), "battery"),
        (Conditions(on_battery=True), Facts(0, 0, battery=True), None),
        (Conditions(), Facts(0, 0, metered=True), "metered"),
        (Conditions(on_metered=True), Facts(0, 0, metered=True), None),
        (Conditions(idle_s=60), Facts(0, 0, idle_s=59), "somebody uses it"),
        (Conditions(idle_s=60), Facts(0, 0, idle_s=60), None),
        (Conditions(idle_s=60), WORKS, "does not tell"),
    ],
)
def test_causes(conditions: Conditions, facts: Facts, cause: str | None) -> None:
    found = causes(conditions, facts)
    assert len(found) == (cause is not None)
    assert cause is None or cause in found[0]


def test_a_pause_begins_at_once_and_ends_after_a_while() -> None:
    state, battery = Availability(Conditions()), Facts(0, 0, battery=True)
    assert not state.observe(WORKS, 0.0)
    assert state.observe(battery, 1.0)
    assert not state.observe(WORKS, 2.0)
    assert state.reasons
    assert not state.observe(battery, 3.0)
    assert not state.observe(WORKS, 4.0)
    assert not state.observe(WORKS, 4.0 + RETURN_S - 1)
    assert state.observe(WORKS, 4.0 + RETURN_S)
    assert not state.reasons


# --- What the machine says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plugged", "expected"), [(True, False), (False, True), (None, None)])
def test_power(monkeypatch: pytest.MonkeyPatch, plugged: bool | None, expected: bool | None) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=plugged), raising=False)
    assert availability.on_battery() is expected
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None, raising=False)
    assert availability.on_battery() is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [("1", True), ("3", True), ("2", False), ("4", False), ("0", None), ("", None), ("junk", None)],
)
def test_network(monkeypatch: pytest.MonkeyPatch, said: str, expected: bool | None) -> None:
    line = f'{{"type":"u","data":{said}}}' if said else ""
    monkeypatch.setattr(availability, "_output", lambda words: line)
    assert availability.on_metered() is expected


@pytest.mark.skipif(sys.platform == "darwin", reason="logind is Linux's")
def test_use(monkeypatch: pytest.MonkeyPatch) -> None:
    since = int((time.time() - 90) * 1e6)
    said = {"IdleHint": '{"type":"b","data":true}', "IdleSinceHint": f'{{"type":"t","data":{since}}}'}
    monkeypatch.setattr(availability, "_output", lambda words: said[words[-1]])
    assert 89 <= (availability.idle_s() or 0) < 120
    said["IdleHint"] = '{"type":"b","data":false}'
    assert availability.idle_s() == 0
    said["IdleHint"] = ""
    assert availability.idle_s() is None


def test_a_machine_without_such_services_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert availability.on_metered() is None
    assert availability.idle_s() is None


async def test_whoever_follows_hears_of_a_pause() -> None:
    facts = [WORKS]
    watch = AvailabilityWatch(Conditions(), lambda _: facts[0])
    await watch.look()
    changed = watch.changed
    assert not changed.is_set()
    facts[0] = Facts(0, 0, battery=True)
    await watch.look()
    assert changed.is_set()
    assert watch.reasons == ("it runs on battery",)


# --- Bandwidth --------------------------------------------------------------------------------------------------------


async def test_bytes_go_at_their_pace(autojump_clock: trio.testing.MockClock) -> None:
    pace, begin = Pace.of_mbit(8), trio.current_time()  # 1,000,000 bytes a second, and a burst of one second
    for _ in range(11):
        await pace.spend(1_000_000)
    assert trio.current_time() - begin == pytest.approx(10, abs=0.01)


async def test_without_a_limit_nothing_waits(autojump_clock: trio.testing.MockClock) -> None:
    begin = trio.current_time()
    await Pace().spend(1 << 40)
    assert trio.current_time() == begin


def test_a_rate_below_which_others_give_up_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        parse_config("[limits]\nupload_mbit = 0.5")
