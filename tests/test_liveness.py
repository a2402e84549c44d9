"""The failure detector: two seconds of silence, but never for a silence that was ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import Overloaded
from scheduler.liveness import (
    FAILED_S,
    PEERS_MAX,
    PING_INTERVAL_S,
    PINGS_OPEN_MAX,
    STRETCH_S,
    SUSPECT_S,
    TICK_S,
    FailureDetector,
    PeerState,
    Transition,
)

ALIVE, SUSPECT, FAILED = PeerState.ALIVE, PeerState.SUSPECT, PeerState.FAILED


class Loop:
    """The daemon's ping loop on a simulated clock: peers answer after `rtt` while they are `up`."""

    def __init__(self, *peers: str, rtt: float = 0.02) -> None:
        self.now = 50.0
        self.detector = FailureDetector(self.now)
        self.rtt = rtt
        self.up = set(peers)
        self.peers = peers
        self.ping = 0
        self.unread: list[tuple[float, str, int]] = []
        self.changes: list[tuple[float, Transition]] = []
        for peer in peers:
            self.detector.add(peer, self.now)

    def run(self, seconds: float) -> list[Transition]:
        first = len(self.changes)
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.step()
        return [change for _, change in self.changes[first:]]

    def step(self) -> None:
        for arrival, peer, number in [pong for pong in self.unread if pong[0] <= self.now]:
            self.unread.remove((arrival, peer, number))
            self.detector.pong(peer, number, self.now)
        if round(self.now / TICK_S) % round(PING_INTERVAL_S / TICK_S) == 0:
            for peer in self.peers:
                self.ping += 1
                self.detector.sent(peer, self.ping, self.now)
                if peer in self.up:
                    self.unread.append((self.now + self.rtt, peer, self.ping))
        self.changes += [(self.now, change) for change in self.detector.tick(self.now)]


def test_peers_that_answer_stay_alive() -> None:
    loop = Loop("a", "b")
    assert loop.run(60) == []
    assert loop.detector.rtt_s("a") == pytest.approx(TICK_S, abs=0.01)  # answers are read once a tick here


def test_a_vanished_peer_is_suspect_then_failed_and_the_other_is_not() -> None:
    loop = Loop("a", "b")
    loop.run(10)
    vanished = loop.now
    loop.up.remove("a")
    loop.run(10)
    assert [(c.peer, c.before, c.after) for _, c in loop.changes] == [("a", ALIVE, SUSPECT), ("a", SUSPECT, FAILED)]
    (suspected, _), (failed, last) = loop.changes
    assert suspected - vanished <= SUSPECT_S + PING_INTERVAL_S + TICK_S
    assert FAILED_S <= failed - vanished <= FAILED_S + PING_INTERVAL_S + TICK_S < 3
    assert last.silent_s >= FAILED_S
    loop.up.add("a")
    assert [c.after for c in loop.run(2)] == [ALIVE]


def test_one_lost_ping_condemns_nobody() -> None:
    loop = Loop("a")
    loop.run(10)
    loop.up.clear()
    loop.run(PING_INTERVAL_S)
    loop.up.add("a")
    assert loop.run(10) == []


def test_a_long_way_is_no_silence() -> None:
    assert Loop("a", rtt=0.9).run(60) == []


@pytest.mark.parametrize("asleep_s", [3, 60, 86_400])
def test_our_own_sleep_is_not_their_silence(asleep_s: float) -> None:
    loop = Loop("a", "b")
    loop.run(10)
    loop.now += asleep_s
    # The tick may come before the pongs that lie in the socket are read.
    assert loop.detector.tick(loop.now) == []
    assert loop.run(10) == []


def test_a_peer_that_vanished_while_we_slept_is_still_noticed() -> None:
    loop = Loop("a", "b")
    loop.run(10)
    loop.up.remove("a")
    loop.now += 60
    loop.unread.clear()
    woke = loop.now
    loop.run(10)
    assert [(c.peer, c.after) for _, c in loop.changes] == [("a", SUSPECT), ("a", FAILED)]
    assert loop.changes[-1][0] - woke <= FAILED_S + PING_INTERVAL_S + TICK_S


def test_a_machine_that_is_always_late_still_notices() -> None:
    detector = FailureDetector(0)
    detector.add("a", 0)
    detector.sent("a", 1, 0)
    late = 3 * STRETCH_S
    changes = [change for n in range(1, 5) for change in detector.tick(n * late)]
    assert changes[-1].after == FAILED


def test_a_peer_that_was_not_asked_is_not_silent() -> None:
    detector = FailureDetector(0)
    detector.add("a", 0)
    for n in range(100):
        assert detector.tick(n * TICK_S) == []
    detector.sent("a", 1, 25.0)
    assert detector.state("a", 25.0) == ALIVE


def test_answers_that_answer_nothing_count_for_nothing() -> None:
    detector = FailureDetector(0)
    detector.add("a", 0)
    assert not detector.pong("a", 1, 0)  # ahead of the ping
    detector.sent("a", 1, 0)
    assert detector.pong("a", 1, 0.1)
    assert not detector.pong("a", 1, 0.2)  # again
    detector.sent("a", 2, 0.25)
    detector.sent("a", 3, 0.5)
    assert detector.pong("a", 3, 0.6)
    assert not detector.pong("a", 2, 0.7)  # an older one, after a newer
    assert not detector.pong("stranger", 3, 0.7)
    detector.sent("a", 4, 0.75)
    for n in range(4, 20):
        detector.pong("a", 3, n * TICK_S)
        detector.tick(n * TICK_S)
    assert detector.state("a", 5.0) == FAILED


def test_a_late_pong_does_not_answer_for_the_pings_after_it() -> None:
    detector = FailureDetector(0)
    detector.add("a", 0)
    detector.sent("a", 1, 0.0)
    detector.sent("a", 2, 0.5)
    detector.tick(0.5)
    assert detector.pong("a", 1, 0.5)
    for n in range(3, 20):
        detector.tick(n * TICK_S)
    assert detector.state("a", 4.75) == FAILED


def test_the_least_round_trip_is_the_distance_however_busy_a_machine_was() -> None:
    detector = FailureDetector(0)
    detector.add("a", 0)
    assert detector.rtt_least_s("a") is None
    times = [0.3, 0.02, 0.4, 0.021, *[0.1] * 8]  # until each pong; the last eight are what is left
    least: list[float | None] = []
    for number, rtt_s in enumerate(times):
        detector.sent("a", number, number)
        detector.tick(number + 0.001)
        assert detector.pong("a", number, number + rtt_s)
        for wait in (0.45, 0.9):
            detector.tick(number + wait)
        least.append(detector.rtt_least_s("a"))
    assert least[0] is None
    assert least[1:9] == pytest.approx([0.02] * 8)
    assert least[-2:] == pytest.approx([0.021, 0.1])


def test_peers_come_and_go() -> None:
    detector = FailureDetector(0)
    assert detector.state("a", 0) == FAILED
    detector.add("a", 0)
    assert detector.state("a", 0) == ALIVE
    assert detector.rtt_s("a") is None
    detector.sent("a", 1, 0)
    detector.add("a", 0.1)  # it reconnected: old pings are void
    assert not detector.pong("a", 1, 0.2)
    detector.remove("a")
    detector.remove("a")
    detector.sent("a", 2, 0.3)
    assert detector.tick(10) == []
    assert detector.rtt_s("a") is None


def test_everything_is_bounded() -> None:
    detector = FailureDetector(0)
    for n in range(PEERS_MAX):
        detector.add(str(n), 0)
    with pytest.raises(Overloaded):
        detector.add("one more", 0)
    detector.add("0", 0)
    for number in range(PINGS_OPEN_MAX + 5):
        detector.sent("0", number, 0)
    assert not detector.pong("0", 4, 0)  # forgotten
    assert detector.pong("0", 5, 0)


@given(st.lists(st.tuples(st.floats(0, 0.5), st.booleans()), max_size=60))
def test_failed_is_exactly_two_counted_seconds_without_an_answer(steps: list[tuple[float, bool]]) -> None:
    """While calls come at least every half second the detector's time is the clock."""
    detector = FailureDetector(0)
    detector.add("a", 0)
    now, asked_since = 0.0, None
    for number, (pause, answered) in enumerate(steps):
        now += pause
        detector.sent("a", number, now)
        asked_since = now if asked_since is None else asked_since
        if answered:
            assert detector.pong("a", number, now)
            asked_since = None
        silence = 0.0 if asked_since is None else now - asked_since
        expected = FAILED if silence >= FAILED_S else SUSPECT if silence >= SUSPECT_S else ALIVE
        if min(abs(silence - FAILED_S), abs(silence - SUSPECT_S)) > 1e-6:
            assert detector.state("a", now) == expected


@given(st.lists(st.floats(-1e6, 1e6), max_size=30))
def test_a_clock_that_jumps_breaks_nothing(instants: list[float]) -> None:
    detector = FailureDetector(0)
    detector.add("a", 0)
    for number, now in enumerate(instants):
        detector.sent("a", number, now)
        detector.tick(now)
    detector.pong("a", len(instants) - 1, 0)
    rtt = detector.rtt_s("a")
    assert rtt is None or rtt >= 0
