"""A swarm founded on one machine, for daemons whose data folders all belong to whoever makes it.

What `swarmctl init`, `join` and `backbone add` do between machines is done here at once, with the same records: the
owner's key signs the first backbone, the first node admits the others. The key is then forgotten.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from capabilities.backbone import VOTE_FILE_BYTES, BackboneSet, Enactment, Member
from capabilities.membership_certificate import MembershipCertificate
from scheduler.election_state import HardState
from swarmnode.identity import Identity, load_or_create_identity, lock_data_folder
from swarmnode.paths import find_paths
from swarmnode.swarm.owner_key import OwnerKey
from swarmnode.swarm.ownership import SALT_BYTES, OwnerChain
from swarmnode.swarm.record import PSK_BYTES, SwarmRecord
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from swarmnode.swarm.vote_file import write_vote_file


@dataclass(frozen=True)
class LocalFounding:
    """A founded swarm, whose members are still to be told (`enter`)."""

    name: str
    psk: bytes
    chain: OwnerChain
    enactment: Enactment
    founder: Identity

    @classmethod
    def of(cls, name: str, backbone: Sequence[Path]) -> LocalFounding:
        """A swarm with the nodes of these data folders as its backbone; their keys and vote files are made."""
        key = OwnerKey.generate()
        chain = OwnerChain(key.public, secrets.token_bytes(SALT_BYTES))
        identities = [_identity(folder) for folder in backbone]
        members = [Member(identity.peer_id, secrets.token_bytes(VOTE_FILE_BYTES)) for identity in identities]
        enactment = Enactment.of_first(BackboneSet.make(chain.swarm, members, key.sign))
        for folder, member in zip(backbone, members, strict=True):
            state = HardState(chain.swarm, member.vote_file, enactment=enactment)
            write_vote_file(_files(folder).votes, state)
        return cls(name, secrets.token_bytes(PSK_BYTES), chain, enactment, identities[0])

    def enter(self, folder: Path, addresses: Sequence[str] = ()) -> None:
        """Make the node of a data folder a member that finds the swarm at these addresses."""
        peer, founder = _identity(folder).peer_id, self.founder
        certificate = MembershipCertificate.issue(
            self.chain.swarm, peer, founder.peer_id, founder.sign, issued_at_s=int(time.time())
        )
        record = SwarmRecord(self.name, self.psk, self.chain, self.enactment, certificate)
        SwarmStore.open(_files(folder)).enter(record.with_addresses(addresses))


def _files(folder: Path) -> SwarmFiles:
    return SwarmFiles(find_paths(folder).data)


def _identity(folder: Path) -> Identity:
    paths = find_paths(folder)
    paths.make()
    with lock_data_folder(paths.data):
        return load_or_create_identity(paths.data)
