"""The load that a node tells of itself: kernels' seconds a second, whenever it is asked."""

from __future__ import annotations

from swarmnode.worker.load import WINDOW_S, LoadMeter


class Kernels:
    """A clock and a counter that are moved together."""

    def __init__(self) -> None:
        self.now, self.compute_us = 100.0, 7_000_000
        self.meter = LoadMeter(lambda: self.compute_us, lambda: self.now)

    def run(self, seconds: float, busy: float) -> int:
        self.now += seconds
        self.compute_us += int(seconds * busy * 1e6)
        return self.meter()


def test_it_is_the_share_of_the_window_however_often_somebody_asks() -> None:
    kernels = Kernels()
    assert kernels.meter() == 0
    assert kernels.run(10, 0.5) == 500
    for _ in range(200):
        kernels.run(0.1, 1.0)
    assert kernels.meter() == 1000
    for _ in range(4):
        assert 0 <= kernels.run(5, 0.2) < 1000
    assert kernels.meter() == 200


def test_asked_once_a_heartbeat_it_covers_the_time_since_the_last() -> None:
    kernels = Kernels()
    loads = [kernels.run(WINDOW_S, busy) for busy in (0.1, 0.9, 0.9, 0.0, 0.0)]
    assert loads == [100, 900, 900, 0, 0]


def test_a_computation_longer_than_the_window_is_no_more_than_everything() -> None:
    kernels = Kernels()
    kernels.run(WINDOW_S * 2, 0)
    kernels.compute_us += 60_000_000  # counted when it ends
    assert kernels.run(1, 0) == 1000
