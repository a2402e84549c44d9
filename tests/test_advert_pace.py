"""When a node speaks: at once, each 15 s, on change, every five minutes; and not more than that."""

from __future__ import annotations

import itertools
import math

import pytest

from scheduler.advert_pace import DEBOUNCE_S, DISTANCE_S, FULL_S, HEARTBEAT_S, AdvertPace, Publication
from scheduler.own_word import OwnWord

START = 500.0


class Loop:
    """A shell that calls `due` whenever it is time, and every second besides."""

    def __init__(self, phase: float = 0.0) -> None:
        self.own = OwnWord("Me", b"mine", 1_000)
        self.now = START
        self.pace = AdvertPace(self.own, self.now, phase)
        self.said: list[tuple[float, Publication]] = []

    def run(self, seconds: float, step: float = 1.0) -> list[tuple[float, Publication]]:
        first, end = len(self.said), self.now + seconds
        while self.now < end:
            publication = self.pace.due(self.now)
            if publication is not None:
                self.said.append((self.now, publication))
            self.now = min(max(self.pace.due_at, self.now + 0.01), self.now + step, end)
        return self.said[first:]


def test_an_advert_at_once_a_heartbeat_each_15_s_an_advert_each_five_minutes() -> None:
    said = Loop(phase=0.4).run(2 * FULL_S + 1)
    fulls = [when - START for when, publication in said if not publication.heartbeat]
    assert fulls == pytest.approx([0, FULL_S, 2 * FULL_S], abs=0.05)
    moments = [when for when, _ in said]
    assert max(later - earlier for earlier, later in itertools.pairwise(moments)) <= HEARTBEAT_S + 0.05
    assert len(said) == round(2 * FULL_S / HEARTBEAT_S) + 1


def test_heartbeats_count_from_one_for_each_advert() -> None:
    loop = Loop()
    said = [publication for _, publication in loop.run(50)]
    assert said == [Publication(1_001), Publication(1_001, 1), Publication(1_001, 2), Publication(1_001, 3)]
    loop.pace.changed(loop.now)
    said = [publication for _, publication in loop.run(20)]
    assert said == [Publication(1_002), Publication(1_002, 1)]


def test_a_burst_of_changes_is_one_advert_and_constant_change_is_one_each_ten_seconds() -> None:
    loop = Loop()
    loop.run(100)
    changed = loop.now
    for _ in range(9):
        loop.pace.changed(loop.now)
        assert loop.run(0.1) == []
    said = loop.run(DISTANCE_S)
    assert [publication for _, publication in said if not publication.heartbeat] == [Publication(1_002)]
    assert said[0][0] - changed == pytest.approx(DEBOUNCE_S, abs=0.05)
    first = loop.now
    for _ in range(100):
        loop.pace.changed(loop.now)
        loop.run(1)
    fulls = [when for when, publication in loop.said if not publication.heartbeat and when >= first]
    assert len(fulls) <= 100 / DISTANCE_S + 1


def test_the_first_neighbours_are_told_soon_and_a_flapping_connection_is_no_reason_to_shout() -> None:
    loop = Loop()
    loop.run(3)
    met = loop.now
    loop.pace.met(loop.now)
    assert [when for when, _ in loop.run(5)] == pytest.approx([met + DEBOUNCE_S], abs=0.05)
    first = loop.now
    for _ in range(100):
        loop.pace.met(loop.now)
        loop.run(1)
    fulls = [when for when, publication in loop.said if not publication.heartbeat and when >= first]
    assert len(fulls) <= 100 / DISTANCE_S + 1


def test_a_higher_number_is_jumped_past_soon_and_heartbeats_never_bear_it() -> None:
    loop = Loop()
    loop.run(40)
    loop.own.hear_other(b"dead", (5_000, 3), 0.0)
    said = [publication for _, publication in loop.run(3)]
    assert said == [Publication(5_001)]
    assert [publication.sequence for _, publication in loop.run(60)] == [5_001] * 4


def test_a_copy_that_jumps_as_well_does_not_drive_the_pace() -> None:
    loop = Loop()
    loop.run(20)
    theirs, began = 5_000, loop.now
    while loop.now < began + 3_600:
        theirs = max(theirs, loop.own.sequence) + 1
        loop.own.hear_other(b"copy", (theirs, 0), loop.now)
        loop.run(1)
    fulls = [when for when, publication in loop.said if not publication.heartbeat and when > began]
    assert len(fulls) <= 3_600 / FULL_S + math.log2(FULL_S / DISTANCE_S) + 2


def test_after_a_sleep_one_heartbeat_is_due_and_not_all_that_were_missed() -> None:
    loop = Loop()
    loop.run(40)
    loop.now += 200
    said = loop.run(5)
    assert len(said) == 1


def test_the_goodbye_is_the_newest_heartbeat() -> None:
    loop = Loop()
    loop.run(20)
    assert loop.pace.goodbye() == Publication(1_001, 2, leaving=True)
