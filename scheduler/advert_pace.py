"""When a node speaks of itself: the full advert on change and every five minutes, in between a heartbeat each 15 s.

Changes come in bursts (a shard loaded, then the next), so the advert waits a moment for the rest of the burst, and
keeps a distance from the one before. An advert counts as a heartbeat. Nobody hears what is said before there is a
neighbour, so it is said again when the first ones are met. Meeting a higher number of its own calls for an advert as
well; if that goes on, a copy of this identity does the same, so each such advert doubles the distance to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scheduler.own_word import OwnWord

FULL_S: Final = 300.0
HEARTBEAT_S: Final = 15.0
DEBOUNCE_S: Final = 1.0  # GossipSub's own heartbeat, too: by then a new neighbour is in the mesh
DISTANCE_S: Final = 10.0
DISTANCE_S_MAX: Final = 300.0
LIFETIME_S: Final = 120
"""Eight heartbeats: a peer that was cut off for a minute is suspect, and not gone."""


@dataclass(frozen=True, slots=True)
class Publication:
    """What is to be said now: the advert of this sequence, or (`heartbeat` above 0) its heartbeat of that number."""

    sequence: int
    heartbeat: int = 0
    leaving: bool = False


class AdvertPace:
    """Decides; whoever asks signs and sends. `phase` in [0, 1) spreads the heartbeats of peers that start together."""

    def __init__(self, own: OwnWord, now: float, phase: float) -> None:
        self._own = own
        self._distance_s = DISTANCE_S
        self._jumps = 0
        self._published = 0
        self._counter = 0
        self._full_at: float | None = None
        self._met_at: float | None = None
        self._full_due = now
        self._heartbeat_due = now + HEARTBEAT_S * (1 + phase)

    def changed(self, now: float) -> None:
        """What the advert would say is different now."""
        earliest = now + DEBOUNCE_S
        if self._full_at is not None:
            earliest = max(earliest, self._full_at + self._distance_s)
        self._full_due = min(self._full_due, earliest)

    def met(self, now: float) -> None:
        """There are neighbours, and there were none before."""
        if self._met_at is not None and now - self._met_at < DISTANCE_S:
            self.changed(now)
            return
        self._met_at = now
        self._full_due = min(self._full_due, now + DEBOUNCE_S)

    @property
    def due_at(self) -> float:
        """When to call `due` next, if nothing changes before."""
        return min(self._full_due, self._heartbeat_due)

    def due(self, now: float) -> Publication | None:
        """What is to be said now, once."""
        if self._own.sequence > self._published and self._full_at is not None:
            self.changed(now)
        if now >= self._full_due:
            return self._full(now)
        if now >= self._heartbeat_due and self._full_at is not None:
            self._heartbeat_due = max(self._heartbeat_due + HEARTBEAT_S, now + HEARTBEAT_S / 2)
            return self._heartbeat()
        return None

    def _full(self, now: float) -> Publication:
        jumped = self._own.jumps > self._jumps
        self._distance_s = min(2 * self._distance_s, DISTANCE_S_MAX) if jumped else DISTANCE_S
        self._jumps = self._own.jumps
        self._published, self._counter, self._full_at = self._own.next(), 0, now
        self._full_due, self._heartbeat_due = now + FULL_S, now + HEARTBEAT_S
        return Publication(self._published)

    def goodbye(self) -> Publication:
        """The last word, whenever it is."""
        return self._heartbeat(leaving=True)

    def _heartbeat(self, *, leaving: bool = False) -> Publication:
        self._counter += 1
        return Publication(self._published, self._counter, leaving)
