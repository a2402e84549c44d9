"""Adverts in the DHT, so that a newcomer finds holders of experts that it never heard.

Under a peer's name lies its advert; under a model's group of layers stands who provides some of it. One record stands
for 16 layers, not for an expert: py-libp2p takes ten a peer in ten seconds. What comes out was checked as far as
signatures go and may be old, or the word of a peer that has died: unverified until somebody has contacted the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
import trio

from capabilities.advert import Advert
from capabilities.backbone import Verify
from capabilities.errors import PeerMistake
from swarmnode import limits
from swarmnode.net.dht import Dht, DhtStatistics, RankValue

_log = structlog.get_logger(__name__)

LAYERS_PER_RECORD: Final = 16
_SWARM_CHARS: Final = 16


def advert_name(swarm: str, peer: str) -> str:
    """The name of a peer's advert."""
    return f"/swarmnode/{swarm[:_SWARM_CHARS]}/{peer}"


def holders_name(swarm: str, model: str, layer: int) -> str:
    """The name that holders of a layer provide, the same for all layers of its group."""
    return f"{swarm}/{model}/{layer // LAYERS_PER_RECORD}"


def advert_rank(swarm: str, verify: Verify, admit: Callable[[Advert], None]) -> RankValue:
    """The rule for values in the DHT of a swarm: a member's own signed advert under its own name, the newest stays."""

    def rank(name: str, value: bytes) -> int:
        advert = Advert.from_bytes(value)
        if advert.swarm != swarm or name != advert_name(swarm, advert.peer):
            raise PeerMistake(f"an advert of {advert.peer} under the name {name:.100}")
        advert.verify(verify)
        admit(advert)
        return advert.sequence

    return rank


class AdvertDirectory:
    """This node's advert in the DHT, and others'."""

    def __init__(self, dht: Dht, swarm: str, me: str) -> None:
        self._dht = dht
        self._swarm = swarm
        self._me = me
        self._provided: dict[str, float] = {}

    async def publish(self, advert: Advert) -> None:
        """Put the advert, and provide what it says is held, unless that was done lately."""
        if not await self._dht.put(advert_name(self._swarm, self._me), advert.to_bytes()):
            _log.debug("nobody else keeps this node's advert in the DHT")
        names = {holders_name(self._swarm, held.model, layer) for held in advert.content.held for layer in held.layers}
        self._provided = {name: then for name, then in self._provided.items() if name in names}
        for name in sorted(names):
            now = trio.current_time()
            due = name not in self._provided or now - self._provided[name] >= limits.DHT_PROVIDE_SECONDS
            if due and await self._dht.provide(name):
                self._provided[name] = now

    async def advert_of(self, peer: str) -> Advert | None:
        """The newest advert of a peer that the DHT knows."""
        value = await self._dht.get(advert_name(self._swarm, peer))
        try:
            return None if value is None else Advert.from_bytes(value)
        except PeerMistake:
            return None

    async def holders(self, model: str, layer: int) -> tuple[Advert, ...]:
        """Adverts of those that claim to hold experts of the layer, as far as the adverts say so, too."""
        claimed = (await self._dht.find_providers(holders_name(self._swarm, model, layer)))[: limits.HOLDERS_ASKED_MAX]
        found: dict[str, Advert] = {}

        async def look_up(peer: str) -> None:
            advert = await self.advert_of(peer)
            if advert is not None and any(
                held.model == model and held.experts_of(layer) for held in advert.content.held
            ):
                found[peer] = advert

        async with trio.open_nursery() as nursery:
            for peer in claimed:
                nursery.start_soon(look_up, peer)
        return tuple(found[peer] for peer in claimed if peer in found)

    def statistics(self) -> DhtStatistics:
        return self._dht.statistics()
