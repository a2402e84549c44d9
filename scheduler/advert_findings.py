"""What is wrong around here, by name, as far as adverts show it: for `status` and `doctor` of both sides.

A fault between two peers shows on both: each sees the other's wire version and clock, and who could not dial a peer's
addresses says so in its own advert, so that the peer hears of it. Nothing here is enforced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from capabilities.advert_content import NOT_REACHED_MAX, BackendAdvert
from scheduler.advert_book import AdvertBook, PeerNotes

SKEW_S: Final = 60  # a message may be underway for seconds; certificates and logs mind minutes
CLOCKS_MIN: Final = 3  # of others, before their majority says that this node's clock is the wrong one
CLONED_HINT: Final = (
    "A data folder was copied: on one of the machines, stop the daemon, remove identity.key and join again."
)
_UNREACHED_MAX: Final = 256
_TEXT_CHARS_MAX: Final = 200


class FindingKind(StrEnum):
    CLONED_IDENTITY = "cloned_identity"
    SKEWED_CLOCK = "skewed_clock"
    WIRE_VERSION = "wire_version"
    UNREACHABLE = "unreachable"
    PRECISION = "precision"
    MULTICAST = "multicast"
    """Of this node's own network: peers on it cannot find each other by themselves."""
    BANNED = "banned"
    """This node itself, by the owner's word."""
    NO_VOTE = "no_vote"
    """A backbone peer that can neither vote nor lead."""
    PAUSED = "paused"
    """This node itself, by its configuration's limits."""
    HTTP_ADDRESS = "http_address"
    """This node's HTTP interface cannot listen."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `peer` is whose fault it is, this node's own id included; None if that is not known."""

    kind: FindingKind
    peer: str | None
    message: str
    hint: str

    def to_json(self) -> dict[str, str | None]:
        return {"kind": str(self.kind), "peer": self.peer, "message": self.message, "hint": self.hint}


class Unreached:
    """The peers that this node could not dial at the addresses they advertise, and why. The last try counts."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def failed(self, peer: str, address: str, reason: str) -> None:
        if peer in self._reasons or len(self._reasons) < _UNREACHED_MAX:
            self._reasons[peer] = f"{address}: {reason}"[:_TEXT_CHARS_MAX]

    def reached(self, peer: str) -> None:
        self._reasons.pop(peer, None)

    @property
    def peers(self) -> tuple[str, ...]:
        """As many as an advert names, sorted."""
        return tuple(sorted(self._reasons)[:NOT_REACHED_MAX])

    def reason(self, peer: str) -> str | None:
        return self._reasons.get(peer)


def findings(
    book: AdvertBook, wire: int, unreached: Unreached, now: float, backends: Iterable[BackendAdvert] = ()
) -> tuple[Finding, ...]:
    """Everything that is wrong now. `wire`, `backends`: the version that this node speaks, and what it says it has."""
    peers = dict(book.notes(now))
    return (
        *_clones(book, peers, now),
        *_clocks(book.own.peer, peers),
        *_versions(book, peers, wire),
        *_addresses(book.own.peer, peers, unreached),
        *_claims(book.own.peer, backends),
        *(finding for peer, known in peers.items() for finding in _claims(peer, known.advert.content.backends)),
    )


def _clones(book: AdvertBook, peers: dict[str, PeerNotes], now: float) -> Iterator[Finding]:
    if book.own_is_cloned(now):
        message = "another daemon uses this node's identity at the same time"
        yield Finding(FindingKind.CLONED_IDENTITY, book.own.peer, message, CLONED_HINT)
    for peer, known in peers.items():
        if known.cloned is not None:
            message = "two daemons use this peer's identity in turn"
            yield Finding(FindingKind.CLONED_IDENTITY, peer, message, CLONED_HINT)


def _clocks(me: str, peers: dict[str, PeerNotes]) -> Iterator[Finding]:
    hint = "Set the machine's clock, best by NTP (`timedatectl set-ntp true`)."
    skews = {peer: known.skew_s for peer, known in peers.items() if known.skew_s is not None}
    usual = sorted(skews.values())[len(skews) // 2] if len(skews) >= CLOCKS_MIN else 0
    own_skew = usual if abs(usual) > SKEW_S else 0
    if own_skew:
        message = f"this node's clock is {_seconds(-own_skew)} most peers' clocks"
        yield Finding(FindingKind.SKEWED_CLOCK, me, message, hint)
    for peer, skew_s in skews.items():
        if abs(skew_s - own_skew) > SKEW_S:
            whose = "most peers' clocks" if own_skew else "this node's clock"
            message = f"its clock is {_seconds(skew_s - own_skew)} {whose}"
            yield Finding(FindingKind.SKEWED_CLOCK, peer, message, hint)


def _seconds(skew_s: float) -> str:
    return f"{abs(skew_s):,.0f} s {'ahead of' if skew_s > 0 else 'behind'}"


def _versions(book: AdvertBook, peers: dict[str, PeerNotes], wire: int) -> Iterator[Finding]:
    hint = "Bring all peers to one version of swarmnode; `swarmctl status` shows each peer's."
    for peer, known in peers.items():
        content = known.advert.content
        if content.wire != wire:
            message = f"it speaks wire version {content.wire} (swarmnode {content.version}), this node speaks {wire}"
            yield Finding(FindingKind.WIRE_VERSION, peer, message, hint)
    for number, count in book.other_formats.most_common(1):
        message = f"some peer speaks of itself in format {number}, which this node cannot read ({count} messages)"
        yield Finding(FindingKind.WIRE_VERSION, None, message, hint)


def _addresses(me: str, peers: dict[str, PeerNotes], unreached: Unreached) -> Iterator[Finding]:
    hint = "Workers need no inbound connections. Others: open the port in firewalls, or correct node.listen."
    complaints = [peer for peer, known in peers.items() if me in known.advert.content.not_reached]
    if complaints:
        message = f"{len(complaints)} peers cannot reach the addresses of this node, {complaints[0]} for one"
        yield Finding(FindingKind.UNREACHABLE, me, message, hint)
    for peer in peers:
        reason = unreached.reason(peer)
        if reason is not None:
            yield Finding(FindingKind.UNREACHABLE, peer, f"this node cannot reach it at {reason}", hint)


def _claims(peer: str, backends: Iterable[BackendAdvert]) -> Iterator[Finding]:
    """Claims of precision that the peer's own probe contradicts."""
    hint = "What was measured counts. Correct what the backend declares; another driver or version may compute better."
    for backend in backends:
        for what, precision in (("accumulation", backend.accumulation), ("source", backend.source)):
            if precision.contradicted:
                seen = f"{precision.measured} was measured, and {precision.measured_when_asked} with F32 asked for"
                message = f"{backend.name} declares {precision.declared} for its {what}, but {seen}"
                yield Finding(FindingKind.PRECISION, peer, message, hint)
