"""The owner's decisions: making a swarm, and who is in its backbone. What is signed here others check.

Founding takes two: the owner's key signs the first backbone set, in which this peer is the only member; the peer's own
key signs its membership. The command line has the one, the daemon the other, and `Founding` is what passes between.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from capabilities.backbone import MEMBERS_MAX, VOTE_FILE_BYTES, BackboneSet, Enactment, Member, Sign
from capabilities.errors import UsageError
from capabilities.membership_certificate import MembershipCertificate
from scheduler.election_state import HardState
from swarmnode.swarm.owner_key import OwnerKey
from swarmnode.swarm.ownership import SALT_BYTES, OwnerChain
from swarmnode.swarm.record import PSK_BYTES, SwarmRecord, check_name
from swarmnode.swarm.store import SwarmStore
from swarmnode.swarm.vote_file import write_vote_file


@dataclass(frozen=True, slots=True)
class Founding:
    """A swarm as its owner signed it, before anybody belongs to it."""

    name: str
    chain: OwnerChain
    backbone: BackboneSet

    @classmethod
    def draft(cls, name: str, peer: str, key: OwnerKey) -> Founding:
        """A new swarm with `peer` as the whole backbone. UsageError for a name that is none."""
        check_name(name)
        chain = OwnerChain(key.public, secrets.token_bytes(SALT_BYTES))
        member = Member(peer, secrets.token_bytes(VOTE_FILE_BYTES))
        return cls(name, chain, BackboneSet.make(chain.swarm, [member], key.sign))


def found(store: SwarmStore, peer: str, sign: Sign, founding: Founding, now_s: int) -> SwarmRecord:
    """Make this peer the first member: its vote file, then the record that says so.

    Raises:
        UsageError: this node belongs to a swarm.
        PeerMistake: the owner's key did not sign this for this peer.
    """
    store.check_free()
    swarm, enactment = founding.chain.swarm, Enactment.of_first(founding.backbone)
    founding.backbone.verify(swarm, founding.chain.verify)
    if founding.backbone.peers != (peer,):
        raise UsageError("the first backbone is not this peer alone", hint="Run `swarmctl init` again.")
    certificate = MembershipCertificate.issue(swarm, peer, peer, sign, issued_at_s=now_s)
    psk = secrets.token_bytes(PSK_BYTES)
    record = SwarmRecord(check_name(founding.name), psk, founding.chain, enactment, certificate)
    write_vote_file(store.files.votes, HardState(swarm, founding.backbone.members[0].vote_file, enactment=enactment))
    store.enter(record)
    return record


def with_member(acting: BackboneSet, peer: str, vote_file: bytes, sign_as_owner: Sign) -> BackboneSet:
    """The version after `acting`, with `peer` in it.

    Raises:
        UsageError: it is in it already, with this vote file or with one that it has lost.
    """
    member = Member(peer, vote_file)
    if member in acting.members:
        raise UsageError(f"{peer} is in the backbone already", hint="`swarmctl backbone list` shows who is.")
    if peer in acting.peers:
        hint = f"Run `swarmctl backbone remove {peer}` first, then add it again: so it cannot vote twice in one term."
        raise UsageError(f"{peer} has lost the vote file that it had when it was added", hint=hint)
    if len(acting.members) == MEMBERS_MAX:
        raise UsageError(f"a backbone has {MEMBERS_MAX} members at most", hint="Remove one first.")
    return BackboneSet.make(acting.swarm, [*acting.members, member], sign_as_owner, acting)


def without_member(acting: BackboneSet, peer: str, sign_as_owner: Sign) -> BackboneSet:
    """The version after `acting`, without `peer`. UsageError if it is not in it, or is all of it."""
    if peer not in acting.peers:
        raise UsageError(f"{peer} is not in the backbone", hint="`swarmctl backbone list` shows who is.")
    if len(acting.members) == 1:
        raise UsageError("a backbone needs one member at least", hint="Add another peer first.")
    members = [member for member in acting.members if member.peer != peer]
    return BackboneSet.make(acting.swarm, members, sign_as_owner, acting)
