"""Who is in the swarm, by what peers say of themselves: the newest word of each, and how long ago it was heard.

Intuition: a peer's adverts are numbered by itself, so the highest number that it signed is its newest word, whoever
brings it and however late; all else is ignored and counted. A peer is alive while it is heard: after three missed
heartbeats it is suspect, after its advert's lifetime gone, at once if it said goodbye. All that runs on this process's
own time (own_time.py), so a peer is never blamed for our sleep.

The book keeps the last word of those that are gone, or a replay of it would bring them back to life. Its own peer is
not in it: from others it only hears whether somebody else speaks in its name (own_word.py).

    hear(message, now, wall)     each gossip message -> whether to pass it on, whose advert is wanted, what changed
    hear_advert(data, now, age)  adverts that were asked for
    tick(now)                    regularly, every TICK_S -> changes of state
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from capabilities.advert import ADVERT_BYTES_MAX, Advert, Heartbeat, swarm_prefix
from capabilities.advert_content import Phase, Policy
from capabilities.backbone import Verify
from capabilities.errors import PeerMistake
from scheduler.own_time import OwnTime
from scheduler.own_word import OwnWord
from scheduler.rates import TokenBucket

TICK_S: Final = 1.0
STRETCH_S: Final = 2.0  # a tick that came one tick late counts in full
STEADY_S: Final = 10.0  # after our own sleep, messages are older than they look
SUSPECT_S: Final = 50.0  # three heartbeats of 15 s missed, and five seconds of grace
PEERS_MAX: Final = 1_024
INSTANCES_MAX: Final = 4  # earlier ones of a peer, remembered to tell a restart from a clone
CLONED_S: Final = 900.0  # a clone that was not heard for so long is no news

MESSAGES_BURST: Final = 6
"""Of one peer. A start gives an advert, a few changes, a heartbeat; a flood of signed words ends at its neighbours."""

MESSAGES_PER_S: Final = 0.2
"""Three times what a peer sends that changes all the time: an advert each 10 s and a heartbeat each 15 s."""

MESSAGE_FORMAT: Final = 1
_ADVERT, _HEARTBEAT = 0, 1
_FORMATS_MAX: Final = 16  # beyond, it is junk rather than a later version


class PeerState(StrEnum):
    JOINING = "joining"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    GONE = "gone"


class Ignored(StrEnum):
    """Why a message changed nothing."""

    MALFORMED = "malformed"
    OVERSIZED = "oversized"
    OTHER_FORMAT = "other_format"
    OTHER_SWARM = "other_swarm"
    SIGNATURE = "signature"
    NOT_A_MEMBER = "not_a_member"
    OLDER = "older"
    REPLAY = "replay"
    EXPIRED = "expired"
    CONFLICT = "conflict"
    TOO_OFTEN = "too_often"
    UNKNOWN_PEER = "unknown_peer"
    FULL = "full"
    OWN = "own"


@dataclass(frozen=True, slots=True)
class StateChange:
    """A peer's state is another than it was; `before` is None for a peer that was not known."""

    peer: str
    before: PeerState | None
    after: PeerState


@dataclass(frozen=True, slots=True)
class Heard:
    """What a message came to. `wanted`: the peer whose full advert should be asked for.

    `tells_owner`: it changes nothing here, but who uses the same identity elsewhere must hear of it.
    `new_process`: the peer is heard for the first time, or has started anew.
    """

    ignored: Ignored | None = None
    peer: str | None = None
    wanted: str | None = None
    change: StateChange | None = None
    tells_owner: bool = False
    new_process: bool = False

    @property
    def pass_on(self) -> bool:
        """Whether others should get the message from here, too."""
        return self.ignored is None or self.tells_owner


@dataclass(frozen=True, slots=True)
class PeerView:
    """What the book knows of a peer. `phase`, `policy` and `load` are newer than what `advert.content` says of them."""

    advert: Advert
    state: PeerState
    phase: Phase
    policy: Policy
    load: int
    silent_s: float


@dataclass(slots=True)
class PeerNotes:
    """One peer of the book. Times are own time; `newest` is the highest (sequence, heartbeat) that counted."""

    advert: Advert
    heard: float
    newest: tuple[int, int]
    phase: Phase
    policy: Policy
    bucket: TokenBucket
    load: int = 0
    left: bool = False
    skew_s: int | None = None
    cloned: float | None = None
    instances: list[bytes] = field(default_factory=list)
    told: PeerState | None = None


class AdvertBook:
    """Adverts of one swarm as one node hears them.

    `verify` checks a peer's signature; `admit` raises PeerMistake for an advert whose peer does not belong (its
    membership certificate, bans). Instants are seconds of one monotonic clock, `wall_s` Unix seconds.
    """

    def __init__(self, swarm: str, own: OwnWord, verify: Verify, admit: Callable[[Advert], None], now: float) -> None:
        self.swarm = swarm
        self.own = own
        self.ignored: Counter[Ignored] = Counter()
        self.accepted = 0
        self.other_formats: Counter[int] = Counter()
        self._prefix = swarm_prefix(swarm)
        self._verify = verify
        self._admit = admit
        self._clock = OwnTime(now, STRETCH_S)
        self._peers: dict[str, PeerNotes] = {}

    # --- Hearing ---

    def hear(self, message: bytes, now: float, wall_s: float | None = None) -> Heard:
        """One message of the swarm's gossip: see `advert_message` and `heartbeat_message`."""
        if len(message) > ADVERT_BYTES_MAX + 2:
            return self._ignore(Ignored.OVERSIZED)
        if len(message) < 2 or message[0] != MESSAGE_FORMAT or message[1] not in (_ADVERT, _HEARTBEAT):
            return self._ignore_format(message)
        if message[1] == _HEARTBEAT:
            return self._hear_heartbeat(message[2:], now)
        return self.hear_advert(message[2:], now, wall_s=wall_s, gossip=True)

    def hear_advert(
        self, data: bytes, now: float, *, age_s: float = 0.0, wall_s: float | None = None, gossip: bool = False
    ) -> Heard:
        """An advert by itself: one that was asked for, unless `gossip`. It was heard `age_s` ago by who brought it."""
        time = self._clock.at(now)
        if len(data) > ADVERT_BYTES_MAX:
            return self._ignore(Ignored.OVERSIZED)
        try:
            advert = Advert.from_bytes(data)
        except PeerMistake:
            return self._ignore(Ignored.MALFORMED)
        peer = advert.peer
        if advert.swarm != self.swarm:
            return self._ignore(Ignored.OTHER_SWARM)
        if peer == self.own.peer:
            return self._hear_own(advert, (advert.sequence, 0), time)
        known = self._peers.get(peer)
        if known is not None and advert.sequence <= known.advert.sequence:
            return self._hear_known(advert, known, now, time)
        if age_s >= advert.lifetime_s:
            return self._ignore(Ignored.EXPIRED, peer)
        refused = self._refusal(advert)
        if refused is not None:
            return self._ignore(refused, peer)
        if gossip and known is not None and not known.bucket.take(now):
            return self._ignore(Ignored.TOO_OFTEN, peer)
        new_process = known is None or known.advert.instance != advert.instance
        if known is None:
            if len(self._peers) >= PEERS_MAX and not self._forget_one(time):
                return self._ignore(Ignored.FULL, peer)
            known = self._peers[peer] = _new_notes(advert, now)
        self._take(advert, known, time - age_s, time)
        if wall_s is not None and self._clock.steady_s > STEADY_S:
            known.skew_s = round(advert.stamp_s - wall_s)
        self.accepted += 1
        return Heard(peer=peer, change=self._change(peer, known, time), new_process=new_process)

    def _hear_known(self, advert: Advert, known: PeerNotes, now: float, time: float) -> Heard:
        """An advert whose number is not above the one that we have."""
        if advert.sequence < known.advert.sequence:
            return self._ignore(Ignored.OLDER, advert.peer)
        if advert.to_bytes() == known.advert.to_bytes():
            gone = self._state(known, time) is PeerState.GONE
            return self._ignore(Ignored.EXPIRED if gone else Ignored.REPLAY, advert.peer)
        return self._conflict(advert, known, now, time)

    def _signed(self, word: Advert | Heartbeat) -> bool:
        try:
            word.verify(self._verify)
        except PeerMistake:
            return False
        return True

    def _refusal(self, advert: Advert) -> Ignored | None:
        """What is wrong with who says it."""
        if not self._signed(advert):
            return Ignored.SIGNATURE
        return Ignored.NOT_A_MEMBER if self._refuses(advert) else None

    def _refuses(self, advert: Advert) -> bool:
        try:
            self._admit(advert)
        except PeerMistake:
            return True
        return False

    def _take(self, advert: Advert, known: PeerNotes, heard: float, time: float) -> None:
        """`advert` is the peer's newest word now."""
        before = known.advert.instance
        if advert.instance != before:
            if advert.instance in known.instances:
                known.cloned = time
            else:
                known.instances = [*known.instances, before][-INSTANCES_MAX:]
        known.advert = advert
        if (advert.sequence, 0) > known.newest or known.told is None:
            known.newest = (advert.sequence, 0)
            known.phase, known.policy, known.left = advert.content.phase, advert.content.policy, False
            known.heard = max(known.heard, heard) if known.told is not None else heard

    def _hear_heartbeat(self, data: bytes, now: float) -> Heard:
        time = self._clock.at(now)
        try:
            heartbeat = Heartbeat.from_bytes(data)
        except PeerMistake:
            return self._ignore(Ignored.MALFORMED)
        peer, number = heartbeat.peer, (heartbeat.sequence, heartbeat.counter)
        if heartbeat.swarm_prefix != self._prefix:
            return self._ignore(Ignored.OTHER_SWARM)
        if peer == self.own.peer:
            return self._hear_own(heartbeat, number, time)
        known = self._peers.get(peer)
        if known is not None and number[0] == known.advert.sequence and heartbeat.instance != known.advert.instance:
            return self._conflict(heartbeat, known, now, time)
        if known is not None and number <= known.newest:
            return self._ignore(Ignored.OLDER if number[0] < known.newest[0] else Ignored.REPLAY, peer)
        if not self._signed(heartbeat):
            return self._ignore(Ignored.SIGNATURE, peer)
        if known is None:
            return self._ignore(Ignored.UNKNOWN_PEER, peer, wanted=peer)
        if not known.bucket.take(now) and (known.left or not heartbeat.leaving):
            return self._ignore(Ignored.TOO_OFTEN, peer)
        known.newest, known.heard, known.left = number, time, heartbeat.leaving
        known.phase, known.policy, known.load = heartbeat.phase, heartbeat.policy, heartbeat.load
        self.accepted += 1
        wanted = peer if number[0] > known.advert.sequence else None
        return Heard(peer=peer, wanted=wanted, change=self._change(peer, known, time))

    def _conflict(self, word: Advert | Heartbeat, known: PeerNotes, now: float, time: float) -> Heard:
        """One number, two words: if the peer signed both, two processes use its key.

        Each of the two must hear the other, or it would take it for the only one; so such words go on, within bounds.
        """
        if not self._signed(word):
            return self._ignore(Ignored.SIGNATURE, word.peer)
        known.cloned = time
        return replace(self._ignore(Ignored.CONFLICT, word.peer), tells_owner=known.bucket.take(now))

    def _hear_own(self, word: Advert | Heartbeat, number: tuple[int, int], time: float) -> Heard:
        if word.instance != self.own.instance and self._signed(word):
            self.own.hear_other(word.instance, number, time)
        return self._ignore(Ignored.OWN)

    def _ignore_format(self, message: bytes) -> Heard:
        if len(message) < 2 or message[0] == MESSAGE_FORMAT or not 0 < message[0] <= _FORMATS_MAX:
            return self._ignore(Ignored.MALFORMED)
        self.other_formats[message[0]] += 1
        return self._ignore(Ignored.OTHER_FORMAT)

    def _ignore(self, reason: Ignored, peer: str | None = None, wanted: str | None = None) -> Heard:
        self.ignored[reason] += 1
        return Heard(ignored=reason, peer=peer, wanted=wanted)

    # --- Time ---

    def tick(self, now: float) -> list[StateChange]:
        """The changes of state since the last call that told of a peer, in the order in which peers were met."""
        time = self._clock.at(now)
        changes = (self._change(peer, known, time) for peer, known in self._peers.items())
        return [change for change in changes if change is not None]

    def recheck(self, now: float) -> list[StateChange]:
        """Forget the peers that `admit` refuses by now."""
        time = self._clock.at(now)
        refused = [peer for peer, known in self._peers.items() if self._refuses(known.advert)]
        states = {peer: self._state(self._peers.pop(peer), time) for peer in refused}
        return [
            StateChange(peer, state, PeerState.GONE) for peer, state in states.items() if state is not PeerState.GONE
        ]

    def _change(self, peer: str, known: PeerNotes, time: float) -> StateChange | None:
        before, after = known.told, self._state(known, time)
        known.told = after
        return None if before is after else StateChange(peer, before, after)

    def _state(self, known: PeerNotes, time: float) -> PeerState:
        silent_s = time - known.heard
        if known.left or silent_s >= known.advert.lifetime_s:
            return PeerState.GONE
        if silent_s >= SUSPECT_S:
            return PeerState.SUSPECT
        return PeerState.DRAINING if known.policy.draining else PeerState(known.phase)

    def _forget_one(self, time: float) -> bool:
        """Make room: whoever is gone longest. False if nobody is gone."""
        gone = [peer for peer, known in self._peers.items() if self._state(known, time) is PeerState.GONE]
        if gone:
            del self._peers[min(gone, key=lambda peer: self._peers[peer].heard)]
        return bool(gone)

    # --- Reading ---

    def peers(self, now: float) -> dict[str, PeerView]:
        """Everybody but this node, by peer id, those that are gone included."""
        time = self._clock.at(now)
        return {peer: self._view(known, time) for peer, known in self._peers.items()}

    def peer(self, peer: str, now: float) -> PeerView | None:
        known = self._peers.get(peer)
        return None if known is None else self._view(known, self._clock.at(now))

    def sequences(self, now: float) -> dict[str, int]:
        """The number of each peer's advert, without those that are gone."""
        time = self._clock.at(now)
        alive = {peer: known for peer, known in self._peers.items() if self._state(known, time) is not PeerState.GONE}
        return {peer: known.advert.sequence for peer, known in alive.items()}

    def own_is_cloned(self, now: float) -> bool:
        """Whether another process uses this node's identity."""
        return self.own.cloned(self._clock.at(now))

    def notes(self, now: float) -> Iterable[tuple[str, PeerNotes]]:
        """The peers that are not gone, as the book keeps them: for advert_findings.py, to read only."""
        time = self._clock.at(now)
        for peer, known in self._peers.items():
            if known.cloned is not None and time - known.cloned > CLONED_S:
                known.cloned = None
            if self._state(known, time) is not PeerState.GONE:
                yield peer, known

    def _view(self, known: PeerNotes, time: float) -> PeerView:
        state = self._state(known, time)
        return PeerView(known.advert, state, known.phase, known.policy, known.load, time - known.heard)


def _new_notes(advert: Advert, now: float) -> PeerNotes:
    bucket = TokenBucket(MESSAGES_BURST, MESSAGES_PER_S, now)
    bucket.take(now)
    content = advert.content
    return PeerNotes(advert, 0.0, (advert.sequence, 0), content.phase, content.policy, bucket)


def advert_message(advert: Advert) -> bytes:
    """An advert as a gossip message."""
    return bytes((MESSAGE_FORMAT, _ADVERT)) + advert.to_bytes()


def heartbeat_message(heartbeat: Heartbeat) -> bytes:
    """A heartbeat as a gossip message."""
    return bytes((MESSAGE_FORMAT, _HEARTBEAT)) + heartbeat.to_bytes()
