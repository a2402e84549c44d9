"""Founded swarms for tests: real keys and real files, and a network in memory among real peer ids."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scheduler.placement import LayerSpec, WorkerSpec
from swarmnode.identity import Identity
from swarmnode.net.interface import Network
from swarmnode.net.memory import MemoryHub, MemoryNetwork
from swarmnode.outline import Outline
from swarmnode.swarm import owner_key
from swarmnode.swarm.admission import AdmissionService
from swarmnode.swarm.bans import Ban
from swarmnode.swarm.founding import Founding, found
from swarmnode.swarm.invites import Invite, new_invite_id, new_secret
from swarmnode.swarm.owner_key import OwnerKey
from swarmnode.swarm.record import SwarmRecord, ban_news
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from swarmnode.swarm.vote_file import open_vote_file

NOW_S = 1_800_000_000
PASSPHRASE = "correct horse battery"


@contextmanager
def quick_keys() -> Iterator[None]:
    """Owner keys that take no time to seal and unlock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner_key, "SCRYPT_LOG2_N", 4)
        patch.setattr(owner_key, "SCRYPT_P", 1)
        yield


@dataclass
class Founder:
    """The first peer of a swarm, with the owner's key at hand."""

    identity: Identity
    key: OwnerKey
    store: SwarmStore

    @classmethod
    def make(cls, folder: Path, name: str = "attic") -> Founder:
        folder.mkdir(parents=True, exist_ok=True)
        identity, key = Identity.generate(), OwnerKey.generate()
        store = SwarmStore.open(SwarmFiles(folder))
        found(store, identity.peer_id, identity.sign, Founding.draft(name, identity.peer_id, key), NOW_S)
        return cls(identity, key, store)

    @property
    def record(self) -> SwarmRecord:
        return self.store.need()

    def ban(self, peer: str, banned: bool = True) -> bytes:
        """A piece of news, taken in here already."""
        ban = Ban.make(self.record.swarm, peer, self.record.bans.next_sequence, banned, self.key.sign)
        self.store.hear([ban_news(ban)])
        return ban_news(ban)

    def invite(
        self, address: str, *, uses: int = 1, lifetime_s: int = 3_600, now_s: float = NOW_S, stored: bool = True
    ) -> Invite:
        """An invite to this peer at one address."""
        record = self.record
        invite = Invite(
            swarm=record.swarm,
            name=record.name,
            owner_key=record.chain.current,
            psk=record.psk,
            issuer=record.peer,
            addresses=(address,),
            invite_id=new_invite_id(),
            secret=new_secret(),
            issued_at_s=int(now_s),
            expires_at_s=int(now_s) + lifetime_s,
            uses=uses,
        )
        if stored:
            self.store.invites().add(invite, now_s)
        return invite

    def serve(self, network: Network, clock: Callable[[], float] = lambda: NOW_S) -> AdmissionService:
        """Admit newcomers on `network`."""
        record = self.record
        service = AdmissionService(
            self.store,
            self.identity.sign,
            addresses=lambda: network.addresses,
            seat=lambda: open_vote_file(self.store.files.votes, record.swarm, record.enactment).vote_file,
            outline=outline_of_three,
            clock=clock,
        )
        service.register(network)
        return service


OUTLINE = Outline("tiny", (LayerSpec(0, 4, 100), LayerSpec(1, 4, 100)), (2, 2), (8,), (32, 64),
                  tuple(WorkerSpec(f"worker-{i}", 500, host=f"host-{i}") for i in range(3)), 2, 1.5)  # fmt: skip


async def outline_of_three() -> dict[str, Any]:
    """What a newcomer is told before it joins."""
    return OUTLINE.to_json()


def join_hub(hub: MemoryHub, identity: Identity) -> MemoryNetwork:
    """A peer of the network in memory, under the id of its key."""
    return hub.join(identity.peer_id)


def hub_opener(hub: MemoryHub) -> Callable[[Identity, bytes], AbstractAsyncContextManager[Network]]:
    """For SwarmCommands: a network of its own for each conversation."""

    @asynccontextmanager
    async def open_network(identity: Identity, psk: bytes) -> AsyncIterator[Network]:
        yield join_hub(hub, identity)

    return open_network
