"""This node's whole part in telling and hearing who is in the swarm: adverts, the owner's news, and where peers are.

    async with open_swarm_adverts(network, store, identity, describe, load, open_dht=..., lan=True) as swarm:
        swarm.peers()                  # who is there, by what they say
        swarm.addresses_of(peer)       # where to dial it
        swarm.spread(news)             # what the owner has said, to everybody
        await swarm.leave()            # goodbye; before the block is left, or nobody hears it

    gossip      GossipSub over the network: a topic for adverts and one for news
    DHT         adverts and holders, for those that heard no gossip
    adverts     this node's, and the book of the others'; only members' count
    news        bans, rotations, backbones: into the store, then for everybody that wants to know
    mDNS        peers on this local network

A banned peer is cut off as soon as the ban is known here, and refused from then on.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

import structlog
import trio

from capabilities.advert import Advert
from capabilities.advert_content import AdvertContent
from capabilities.errors import PeerMistake, SwarmError
from capabilities.membership_certificate import MembershipCertificate
from scheduler.advert_book import PeerState, PeerView
from scheduler.advert_findings import Finding, FindingKind
from swarmnode import limits
from swarmnode.identity import Identity, verify
from swarmnode.net.dht import Dht, DhtStatistics, RankValue
from swarmnode.net.gossip import Gossip, GossipStatistics
from swarmnode.net.gossipsub import GossipSubNode, open_gossipsub
from swarmnode.net.groups import without_groups
from swarmnode.net.interface import Network, PeerId
from swarmnode.swarm.adverts import AdvertService, AdvertStatistics, Holder, OnChange, Speaker
from swarmnode.swarm.dht import AdvertDirectory, advert_rank
from swarmnode.swarm.mdns import LanDiscovery, LanState
from swarmnode.swarm.news import RecordNews, news_channel
from swarmnode.swarm.record import SwarmRecord, peer_of
from swarmnode.swarm.spreading import OnPieces, Spreading, SpreadingStatistics
from swarmnode.swarm.store import SwarmStore

_log = structlog.get_logger(__name__)

_WATCH_SECONDS: Final = 1.0

OpenDht = Callable[[RankValue], AbstractAsyncContextManager[Dht]]


@dataclass(frozen=True, slots=True)
class SwarmAdvertsStatistics:
    adverts: AdvertStatistics
    news: SpreadingStatistics
    gossip: GossipStatistics
    dht: DhtStatistics | None


class SwarmAdverts:
    """See the file's head; made by `open_swarm_adverts`."""

    def __init__(
        self,
        network: Network,
        store: SwarmStore,
        identity: Identity,
        describe: Callable[[], AdvertContent],
        load: Callable[[], int],
        gossip: GossipSubNode,
        nursery: trio.Nursery,
        wall_s: Callable[[], float],
    ) -> None:
        self._network = network
        self._store = store
        self._peer = identity.peer_id
        self._describe = describe
        self._gossip = gossip
        self._nursery = nursery
        self._record = store.need()
        self._on_news: list[OnPieces] = []
        self._dht: Dht | None = None
        self._lan: LanDiscovery | None = None
        self._speaker = Speaker(
            swarm=self._record.swarm,
            peer=identity.peer_id,
            sign=identity.sign,
            verify=verify,
            admit=self.admit,
            content=self._content,
            load=load,
            wall_s=wall_s,
        )
        self._service: AdvertService
        self._news = Spreading(
            news_channel(self._record.swarm), RecordNews(store), network, gossip, self._after_news
        )

    async def start(self, dht: Dht | None, lan: LanDiscovery | None) -> None:
        """Begin to speak and to listen."""
        self._dht, self._lan = dht, lan
        directory = None if dht is None else AdvertDirectory(dht, self._record.swarm, self._peer)
        self._service = AdvertService(self._speaker, self._network, self._gossip, directory, self._nearby)
        self._network.refuse(self._store.is_banned)
        self._network.on_connection(self._on_connection)
        self._cut_banned()
        await self._nursery.start(self._news.run)
        await self._nursery.start(self._service.run)
        self._nursery.start_soon(self._watch_record)
        self._nursery.start_soon(self._remember_backbone)
        if lan is not None:
            self._nursery.start_soon(lan.run)

    # --- Who is there ---

    @property
    def gossip(self) -> Gossip:
        """The swarm's gossip, for topics of other parts."""
        return self._gossip

    def peers(self) -> dict[str, PeerView]:
        """Everybody that was heard, those that are gone included, without this node."""
        return self._service.peers()

    def advert(self) -> Advert | None:
        """This node's own; None before the first."""
        return self._service.advert()

    def on_change(self, callback: OnChange) -> None:
        """Have `callback` called with each change of a peer's state. It must not block."""
        self._service.on_change(callback)

    def changed(self) -> None:
        """What `describe` says is different now: do not wait a second to notice."""
        self._service.changed()

    async def find_holders(self, model: str, layer: int) -> tuple[Holder, ...]:
        """See AdvertService."""
        return await self._service.find_holders(model, layer)

    def findings(self) -> tuple[Finding, ...]:
        """What is wrong around here, by name, as far as it shows."""
        found = list(self._service.findings())
        if self._store.is_banned(self._peer):
            hint = "Only its owner can lift that. `swarmctl leave` frees this node for another swarm."
            found.append(Finding(FindingKind.BANNED, self._peer, "this node is banned from the swarm", hint))
        if self._lan is not None and self._lan.state is LanState.BLOCKED:
            message = f"multicast is blocked, so peers on this local network do not find this node: {self._lan.reason}"
            hint = "Let UDP port 5353 pass the firewall, or rely on invites and on the addresses that peers tell."
            found.append(Finding(FindingKind.MULTICAST, self._peer, message, hint))
        return tuple(found)

    def statistics(self) -> SwarmAdvertsStatistics:
        dht = None if self._dht is None else self._dht.statistics()
        return SwarmAdvertsStatistics(
            self._service.statistics(), self._news.statistics(), self._gossip.statistics(), dht
        )

    async def leave(self) -> None:
        """Say goodbye. Takes a moment, in which this node must still be running."""
        await self._service.leave()

    # --- Dialing ---

    def addresses_of(self, peer: str) -> tuple[str, ...]:
        """Where the peer may be reached, the nearest first: seen on this network, told by itself, remembered."""
        nearby = () if self._lan is None else self._lan.found().get(peer, ())
        view = self._service.peers().get(peer)
        told = () if view is None else view.advert.content.addresses
        own = tuple(address for address in told if peer_of(address) == peer)
        remembered = tuple(address for address in self._current().addresses if peer_of(address) == peer)
        return tuple(dict.fromkeys((*nearby, *own, *remembered)))

    def reached(self, peer: PeerId) -> None:
        """A dial elsewhere in this daemon succeeded."""
        self._service.reached(peer)

    def unreachable(self, peer: PeerId, address: str, reason: str) -> None:
        """A dial elsewhere in this daemon failed: the peer does not answer at an address that it advertises."""
        self._service.unreachable(peer, address, reason)

    def _nearby(self) -> Mapping[str, Sequence[str]]:
        """Whom to connect to first: those on this network; and while there is nobody, those that are remembered."""
        found: dict[str, Sequence[str]] = {}
        if not self._network.connected_peers():
            for address in self._current().addresses:
                found[peer_of(address)] = (*found.get(peer_of(address), ()), address)
        found |= {} if self._lan is None else self._lan.found()
        return {peer: addresses for peer, addresses in found.items() if not self._store.is_banned(peer)}

    def found_nearby(self, peer: str) -> None:
        self._service.found_nearby(peer)

    # --- The owner's word ---

    def on_news(self, callback: OnPieces) -> None:
        """Have `callback` called with news that has just been taken in. It must not block."""
        self._on_news.append(callback)

    def spread(self, news: Sequence[bytes]) -> None:
        """Tell everybody what the owner has said; the store here knows it already. It acts here, too."""
        self._news.spread(news)
        self._after_news(tuple(news))

    def recheck(self) -> None:
        """Who is a member has changed in the store: forget, and cut off, those that are none any more."""
        self._service.recheck()
        self._cut_banned()

    def _after_news(self, new: tuple[bytes, ...]) -> None:
        self.recheck()
        for callback in self._on_news:
            try:
                callback(new)
            except Exception:
                _log.exception("a callback for news failed")

    def _cut_banned(self) -> None:
        for peer in self._network.connected_peers():
            self._on_connection(peer, True)

    def _on_connection(self, peer: PeerId, up: bool) -> None:
        if up and self._store.is_banned(peer):
            _log.warning("swarm.banned_cut", peer=peer)
            self._nursery.start_soon(self._network.disconnect, peer)

    # --- For the parts ---

    def admit(self, advert: Advert) -> None:
        """PeerMistake unless the advert's peer is a member of the swarm and not banned."""
        record = self._current()
        if advert.swarm != record.swarm:
            raise PeerMistake(f"{advert.peer} speaks of another swarm")
        record.verify_member(advert.peer, MembershipCertificate.from_bytes(advert.content.membership))

    def _content(self) -> AdvertContent:
        return replace(self._describe(), membership=self._current().certificate.to_bytes())

    def _current(self) -> SwarmRecord:
        """The record as it is; its last state while this node is leaving the swarm."""
        self._record = self._store.record or self._record
        return self._record

    async def _watch_record(self) -> None:
        """Who is a member changes whoever heard of it: other parts of the daemon take in news as well."""
        seen = self._current()
        while True:
            await trio.sleep(_WATCH_SECONDS)
            if (record := self._current()) is not seen:
                if (record.bans, record.issuers) != (seen.bans, seen.issuers):
                    self.recheck()
                seen = record

    async def _remember_backbone(self) -> None:
        """Keep where the backbone is for the next start."""
        known: tuple[str, ...] = ()
        while True:
            await trio.sleep(limits.REMEMBER_ADDRESSES_SECONDS)
            views, backbone = self._service.peers(), self._current().backbone.peers
            found = tuple(
                address
                for peer in backbone
                if peer in views and views[peer].state is not PeerState.GONE
                for address in views[peer].advert.content.addresses
            )
            if found and found != known:
                try:
                    await trio.to_thread.run_sync(self._store.learn_addresses, found)
                    known = found
                except (SwarmError, OSError) as error:
                    _log.warning("swarm.addresses_not_kept", reason=str(error))


@asynccontextmanager
async def open_swarm_adverts(
    network: Network,
    store: SwarmStore,
    identity: Identity,
    describe: Callable[[], AdvertContent],
    load: Callable[[], int],
    *,
    open_dht: OpenDht | None = None,
    lan: bool = True,
    lan_interfaces: Sequence[str] | None = None,
    wall_s: Callable[[], float] = time.time,
) -> AsyncIterator[SwarmAdverts]:
    """A running part in the swarm that the store names; once in a network's life.

    `describe` says what this node's advert should say now (self_description.py), its certificate excepted; `load` how
    busy it is, 0 to 1000: both are asked each second. `open_dht`: for example
    `lambda rank: open_kademlia(network, rank, server=True)`; None takes no part in the DHT. `lan`: find peers by mDNS.

    Raises:
        NotInSwarm: this node belongs to no swarm.
    """
    with without_groups():
        async with AsyncExitStack() as stack:
            gossip = await stack.enter_async_context(open_gossipsub(network))
            nursery = await stack.enter_async_context(trio.open_nursery())
            made = SwarmAdverts(network, store, identity, describe, load, gossip, nursery, wall_s)
            dht = None
            if open_dht is not None:
                rank = advert_rank(store.need().swarm, verify, made.admit)
                dht = await stack.enter_async_context(open_dht(rank))
            discovery = None
            if lan:
                psk, me = store.need().psk, identity.peer_id
                discovery = LanDiscovery(
                    psk, me, lambda: network.addresses, made.found_nearby, interfaces=lan_interfaces
                )
            await made.start(dht, discovery)
            try:
                yield made
            finally:
                nursery.cancel_scope.cancel()
