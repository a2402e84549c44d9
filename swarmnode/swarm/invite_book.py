"""The invites that this backbone peer has issued: how often each may be used, and by whom it was.

The file holds no secret (invites.py says what it holds instead). A use is counted on disk before anything is given for
it, and under one lock, so an invite for one newcomer admits one, however many ask at the same moment. Who used an
invite may use it again without being counted: the answer may have been lost on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from capabilities.errors import Overloaded, PeerMistake, UsageError
from capabilities.packing import PEER_ID_CHARS_MAX, Fields, OtherFormat, check_not_newer, decode, pack
from scheduler.election_state import DamagedState, NewerState, seal, unseal
from swarmnode import limits
from swarmnode.durable import write_whole
from swarmnode.swarm.blobs import join_blobs, split_blobs
from swarmnode.swarm.errors import NotAdmitted
from swarmnode.swarm.invites import INVITE_ID_BYTES, VERIFIER_BYTES, Invite, duration, moment, proof_fits

KEPT_SECONDS: Final = 31 * 86_400
"""An invite that has ended is remembered so long, so that who comes late learns why it is refused."""

_PEERS_BYTES_MAX: Final = limits.INVITE_USES_MAX * (PEER_ID_CHARS_MAX + 2)
_ENTRY_BYTES_MAX: Final = 256 + _PEERS_BYTES_MAX
_BOOK_BYTES_MAX: Final = 128 + limits.INVITES_MAX * (_ENTRY_BYTES_MAX + 2)
_TIME_MAX: Final = 2**40
_FORMAT: Final = 1
_DAMAGED_HINT: Final = "Move the file away: invites that are open end with it, and new ones can be made."


@dataclass(frozen=True, slots=True)
class Issued:
    """One invite as its issuer keeps it. `used_by` are peer ids, in the order in which they came."""

    invite_id: bytes
    verifier: bytes
    issued_at_s: int
    expires_at_s: int
    uses: int
    revoked: bool = False
    used_by: tuple[str, ...] = ()

    def state(self, now_s: float) -> str:
        """`open`, `revoked`, `expired` or `used_up`."""
        if self.revoked:
            return "revoked"
        if now_s >= self.expires_at_s:
            return "expired"
        return "used_up" if len(self.used_by) >= self.uses else "open"

    def to_json(self, now_s: float) -> dict[str, Any]:
        """For `swarmctl invite --list`."""
        return {
            "id": self.invite_id.hex(),
            "state": self.state(now_s),
            "issued_at_s": self.issued_at_s,
            "expires_at_s": self.expires_at_s,
            "uses": self.uses,
            "used": len(self.used_by),
            "used_by": list(self.used_by),
        }

    def to_bytes(self) -> bytes:
        peers = join_blobs(peer.encode() for peer in self.used_by)
        times = (self.issued_at_s, self.expires_at_s)
        return pack((_FORMAT, self.invite_id, self.verifier, *times, self.uses, self.revoked, peers))

    @classmethod
    def from_bytes(cls, data: object) -> Issued:
        """PeerMistake unless these are the canonical bytes of one."""
        return decode(data, "issued invite", _ENTRY_BYTES_MAX, cls._read)

    @classmethod
    def _read(cls, value: object) -> Issued:
        fields = Fields(value, 8, "issued invite")
        fields.format(_FORMAT)
        return cls(
            fields.blob("id", INVITE_ID_BYTES, INVITE_ID_BYTES),
            fields.blob("verifier", VERIFIER_BYTES, VERIFIER_BYTES),
            fields.integer("issued at", _TIME_MAX),
            fields.integer("expires at", _TIME_MAX),
            fields.integer("uses", limits.INVITE_USES_MAX, 1),
            fields.flag("revoked"),
            tuple(
                blob.decode("ascii", "replace")
                for blob in split_blobs(fields.blob("peers", _PEERS_BYTES_MAX), "peers", limits.INVITE_USES_MAX)
            ),
        )


@dataclass(frozen=True, slots=True)
class _Book:
    """The file's content."""

    swarm: str
    invites: tuple[Issued, ...] = ()

    def to_bytes(self) -> bytes:
        return pack((_FORMAT, self.swarm, join_blobs(invite.to_bytes() for invite in self.invites)))

    @classmethod
    def read(cls, value: object) -> _Book:
        check_not_newer(value, _FORMAT, "invites")
        fields = Fields(value, 3, "invites")
        fields.format(_FORMAT)
        swarm = fields.swarm()
        blobs = split_blobs(fields.blob("invites", _BOOK_BYTES_MAX), "invites", limits.INVITES_MAX)
        return cls(swarm, tuple(map(Issued.from_bytes, blobs)))


class InviteBook:
    """The invites of one swarm and their file. Every method may be called from any thread and waits for the disk."""

    def __init__(self, path: Path, swarm: str) -> None:
        """Reads the file. DamagedState, naming it and what to do, if that cannot be; one of another swarm is empty."""
        self._path = path
        self._swarm = swarm
        self._turn = threading.Lock()
        book = _load(path)
        found = book.invites if book is not None and book.swarm == swarm else ()
        self._invites: Mapping[bytes, Issued] = {invite.invite_id: invite for invite in found}

    def listed(self, now_s: float) -> list[dict[str, Any]]:
        """All that are remembered, the newest first."""
        newest = sorted(self._invites.values(), key=lambda invite: (-invite.issued_at_s, invite.invite_id))
        return [invite.to_json(now_s) for invite in newest]

    def add(self, invite: Invite, now_s: float) -> None:
        """Remember an invite that is about to be given away. Overloaded if too many are open."""
        issued = Issued(invite.invite_id, invite.verifier, invite.issued_at_s, invite.expires_at_s, invite.uses)
        with self._turn:
            kept = {key: one for key, one in self._invites.items() if now_s < one.expires_at_s + KEPT_SECONDS}
            if len(kept) >= limits.INVITES_MAX:
                ended = [one for one in kept.values() if one.state(now_s) != "open"]
                if not ended:
                    hint = "Revoke some: `swarmctl invite --list`, `swarmctl invite --revoke ID`."
                    raise Overloaded(f"{limits.INVITES_MAX} invites are open, which is the most", hint=hint)
                del kept[min(ended, key=lambda one: one.issued_at_s).invite_id]
            self._write({**kept, issued.invite_id: issued})

    def revoke(self, invite_id: bytes, now_s: float) -> dict[str, Any]:
        """End an invite now; members that it made stay members. UsageError if there is none with this id."""
        with self._turn:
            issued = self._invites.get(invite_id)
            if issued is None:
                message = f"no invite {invite_id.hex()[:16]} was issued here"
                raise UsageError(message, hint="`swarmctl invite --list` shows those that were.")
            revoked = replace(issued, revoked=True)
            self._write({**self._invites, invite_id: revoked})
            return revoked.to_json(now_s)

    def redeem(
        self,
        invite_id: bytes,
        newcomer: str,
        issuer: str,
        challenge: bytes,
        proof: bytes,
        clock: Callable[[], float],
        *,
        count: bool = True,
    ) -> Issued:
        """Count a use of an invite, on disk. Only who proves the secret learns more than that it is none.

        count: False only checks whether it could be used.

        Raises:
            NotAdmitted: why.
        """
        with self._turn:
            issued, now_s = self._invites.get(invite_id), clock()
            verifier = bytes(VERIFIER_BYTES) if issued is None else issued.verifier
            if not proof_fits(verifier, proof, challenge, invite_id, newcomer, issuer) or issued is None:
                raise NotAdmitted("the inviting peer does not know this invite", cause="unknown")
            state = issued.state(now_s)
            if state == "revoked":
                raise NotAdmitted("the invite was revoked", cause=state)
            if state == "expired":
                ago = duration(now_s - issued.expires_at_s)
                hint = f"Ask for a new invite. That clock says {moment(now_s)} (UTC); if it is wrong, it must be set."
                raise NotAdmitted(f"the invite expired {ago} ago, by the inviting peer's clock", hint=hint, cause=state)
            if newcomer in issued.used_by:
                return issued
            if state == "used_up":
                raise NotAdmitted(f"the invite was used up: it was for {issued.uses}", cause=state)
            if not count:
                return issued
            counted = replace(issued, used_by=(*issued.used_by, newcomer))
            self._write({**self._invites, invite_id: counted})
            return counted

    def _write(self, invites: Mapping[bytes, Issued]) -> None:
        write_whole(self._path, seal(_Book(self._swarm, tuple(invites.values())).to_bytes()))
        self._invites = invites


def _load(path: Path) -> _Book | None:
    try:
        with path.open("rb") as file:
            data = file.read(_BOOK_BYTES_MAX + 64)
        return decode(unseal(data), "invites", _BOOK_BYTES_MAX, _Book.read)
    except FileNotFoundError:
        return None
    except OSError as error:
        hint = "Check the file's owner and mode."
        raise DamagedState(f"cannot read {path}: {error.strerror}", hint=hint, path=str(path)) from error
    except OtherFormat as other:
        raise NewerState(other.message).of(str(path)) from None
    except (DamagedState, PeerMistake) as error:
        raise DamagedState(error.message).of(str(path), _DAMAGED_HINT) from None
