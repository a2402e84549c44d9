"""A table that all peers of a swarm keep together: values under names, and who provides something.

kademlia.py runs py-libp2p's Kademlia on real libp2p; `DhtHub` here is the same within one process, for tests.

Everything in it was brought by strangers. A value is checked by the rule that both the keeper and the finder apply; a
provider is a claim and no more, until somebody has asked that peer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from capabilities.errors import PeerMistake
from swarmnode.net import limits
from swarmnode.net.interface import PeerId

RankValue = Callable[[str, bytes], int]
"""A value's name and bytes -> its rank: of two good values of a name the higher one stays. PeerMistake if it is bad."""


@dataclass(frozen=True, slots=True)
class DhtStatistics:
    """Counters since the start, except the first three, which are what is now."""

    known_peers: int
    values_kept: int
    providers_kept: int
    lookups: int
    values_refused: int
    """Values of others that the rule, or a bound, did not let in; found or brought."""
    streams_refused: int
    """Streams of peers over their limit, or that took too long."""
    dials: int
    """Connections that look-ups tried to make."""


class Dht(Protocol):
    """This node's part in the table. Every call ends by itself after DHT_LOOKUP_SECONDS_MAX, and none raises.

    Names are up to 96 characters; providers' keys are hashes of them.
    """

    async def put(self, name: str, value: bytes) -> bool:
        """Store an own value with the peers closest to its name. False if nobody else took it.

        Raises PeerMistake if the rule refuses it.
        """
        ...

    async def get(self, name: str) -> bytes | None:
        """The best value that the network has now; what is kept here only if nobody else knows one."""
        ...

    async def provide(self, name: str) -> bool:
        """Tell the peers closest to `name` that this one provides it. False if nobody else took it."""
        ...

    async def find_providers(self, name: str) -> tuple[PeerId, ...]:
        """Who claims to provide it, each once, without this node. The dead may be among them."""
        ...

    def statistics(self) -> DhtStatistics: ...


class DhtHub:
    """The one table of all nodes in a process."""

    def __init__(self, rank: RankValue) -> None:
        self.rank = rank
        self.values: dict[str, bytes] = {}
        self.providers: dict[str, dict[PeerId, None]] = {}

    def join(self, peer: PeerId) -> MemoryDht:
        return MemoryDht(self, peer)


class MemoryDht:
    """One node of a hub: see Dht."""

    def __init__(self, hub: DhtHub, peer: PeerId) -> None:
        self._hub = hub
        self._peer = peer
        self._lookups = 0

    async def put(self, name: str, value: bytes) -> bool:
        """See Dht."""
        if len(value) > limits.DHT_VALUE_BYTES_MAX:
            raise PeerMistake(f"a value of {len(value):,} bytes")
        rank = self._hub.rank(name, value)
        kept = self._hub.values.get(name)
        if kept is None or rank >= self._hub.rank(name, kept):
            self._hub.values[name] = value
        return True

    async def get(self, name: str) -> bytes | None:
        """See Dht."""
        self._lookups += 1
        return self._hub.values.get(name)

    async def provide(self, name: str) -> bool:
        """See Dht."""
        self._hub.providers.setdefault(name, {})[self._peer] = None
        return True

    async def find_providers(self, name: str) -> tuple[PeerId, ...]:
        """See Dht."""
        self._lookups += 1
        return tuple(peer for peer in self._hub.providers.get(name, ()) if peer != self._peer)

    def statistics(self) -> DhtStatistics:
        return DhtStatistics(0, len(self._hub.values), len(self._hub.providers), self._lookups, 0, 0, 0)
