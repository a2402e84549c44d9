"""What this node says of itself to the swarm, and what it hears: the shell around scheduler/advert_*.py.

    gossip     one topic a swarm: full adverts and heartbeats, this node's when the pace says so, others' into the book
    exchange   who connects asks for the adverts it lacks; a peer that is heard of but not known is asked for as well
    DHT        this node's advert, and which layers it holds something of, for those that heard no gossip
    neighbours a node with few connections makes some

Nothing here decides: what to believe is the book's, when to speak the pace's, what is wrong the findings'.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog
import trio

from capabilities.advert import ADVERT_BYTES_MAX, INSTANCE_BYTES, Advert, Heartbeat
from capabilities.advert_content import AdvertContent
from capabilities.backbone import Sign, Verify
from capabilities.errors import PeerMistake
from scheduler.advert_book import (
    AdvertBook,
    Heard,
    Ignored,
    PeerState,
    PeerView,
    StateChange,
    advert_message,
    heartbeat_message,
)
from scheduler.advert_findings import Finding, Unreached, findings
from scheduler.advert_pace import LIFETIME_S, AdvertPace, Publication
from scheduler.own_word import OwnWord
from scheduler.rates import TokenBucket
from swarmnode import limits
from swarmnode.net.gossip import Gossip, Verdict
from swarmnode.net.interface import Network, NetworkError, PeerId
from swarmnode.swarm.advert_exchange import AdvertExchange, AgedAdvert
from swarmnode.swarm.dht import AdvertDirectory
from swarmnode.swarm.neighbourhood import Neighbourhood

if TYPE_CHECKING:
    from trio_typing import TaskStatus

_log = structlog.get_logger(__name__)

_TICK_S: Final = 1.0
_ASKS_BURST: Final = 8
_ASKS_PER_S: Final = 1.0
_MEMORY_STEPS: Final = 16
"""A change of used memory counts from a sixteenth of the budget on: it is never the same twice."""

_GOODBYE_S: Final = 0.3
"""For the last word to leave this machine."""

_BLAME: Final = frozenset((Ignored.MALFORMED, Ignored.OVERSIZED, Ignored.SIGNATURE, Ignored.OTHER_SWARM))
"""What no honest node passes on."""

OnChange = Callable[[StateChange], object]


def topic_of(swarm: str) -> str:
    """The swarm's topic for adverts; short, since each message carries it."""
    return f"swarmnode/{swarm[:16]}/adverts"


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who speaks, and whom it believes. `admit` raises PeerMistake for an advert whose peer is no member or is banned.

    `content` says what this node's advert should say now; it is asked every second, so it must be cheap. `load`: how
    busy this node is, 0 to 1000. `wall_s` is the system's clock, in Unix seconds.
    """

    swarm: str
    peer: PeerId
    sign: Sign
    verify: Verify
    admit: Callable[[Advert], None]
    content: Callable[[], AdvertContent]
    load: Callable[[], int]
    wall_s: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Holder:
    """A peer that holds experts of a layer, by its advert. Not `verified`: only the DHT says so."""

    advert: Advert
    verified: bool


@dataclass(frozen=True, slots=True)
class AdvertStatistics:
    """Counters since the start."""

    adverts_sent: int
    heartbeats_sent: int
    accepted: int
    ignored: Mapping[str, int]
    """By reason."""
    exchanges: int
    exchanges_failed: int


class AdvertService:
    """See the file's head. Run `run` in a nursery; everything is on the event loop."""

    def __init__(
        self,
        speaker: Speaker,
        network: Network,
        gossip: Gossip,
        directory: AdvertDirectory | None = None,
        nearby: Callable[[], Mapping[str, Sequence[str]]] = dict,
    ) -> None:
        now = trio.current_time()
        self._speaker = speaker
        self._network = network
        self._gossip = gossip
        self._directory = directory
        own = OwnWord(speaker.peer, secrets.token_bytes(INSTANCE_BYTES), max(1, int(speaker.wall_s())))
        self._own = own
        self._pace = AdvertPace(own, now, secrets.randbelow(1_000) / 1_000)
        self._book = AdvertBook(speaker.swarm, own, speaker.verify, speaker.admit, now)
        self._unreached = Unreached()
        self._neighbourhood = Neighbourhood(network, self.peers, self._unreached, nearby)
        self._exchange = AdvertExchange(network, self._select)
        self._topic = topic_of(speaker.swarm)
        self._content: AdvertContent | None = None
        self._advert: Advert | None = None
        self._had_neighbours = False
        self._wake = trio.Event()
        self._published = trio.Event()
        self._to_ask: dict[PeerId, set[str]] = {}
        self._to_ask_all: set[PeerId] = set()
        self._asked_all: dict[PeerId, float] = {}
        self._left = False
        self._asks = TokenBucket(_ASKS_BURST, _ASKS_PER_S, now)
        self._counts = Counter[str]()
        self._on_change: list[OnChange] = []

    # --- For the rest of the daemon ---

    def on_change(self, callback: OnChange) -> None:
        """Have `callback` called with each change of a peer's state. It must not block."""
        self._on_change.append(callback)

    def changed(self) -> None:
        """What `content` returns is different now. Without this call it takes a second to be noticed."""
        self._wake.set()

    def peers(self) -> dict[str, PeerView]:
        """Everybody that was heard, those that are gone included."""
        return self._book.peers(trio.current_time())

    def advert(self) -> Advert | None:
        """This node's last advert; None before the first."""
        return self._advert

    def findings(self) -> tuple[Finding, ...]:
        """What is wrong around here, by name."""
        content = self._speaker.content()
        return findings(self._book, content.wire, self._unreached, trio.current_time(), content.backends)

    def unreachable(self, peer: PeerId, address: str, reason: str) -> None:
        """A dial elsewhere in this daemon failed: the peer does not answer at an address that it advertises."""
        self._unreached.failed(peer, address, reason)

    def reached(self, peer: PeerId) -> None:
        """A dial elsewhere in this daemon succeeded."""
        self._unreached.reached(peer)

    def found_nearby(self, peer: str) -> None:
        """See Neighbourhood.look."""
        self._neighbourhood.look(peer)

    async def find_holders(self, model: str, layer: int) -> tuple[Holder, ...]:
        """Who holds experts of the layer, by gossip and by the DHT; the verified ones first."""
        heard = {
            view.advert.peer: Holder(view.advert, True)
            for view in self.peers().values()
            if view.state is not PeerState.GONE and _holds(view.advert, model, layer)
        }
        found = await self._directory.holders(model, layer) if self._directory is not None else ()
        unheard = [Holder(advert, False) for advert in found if advert.peer not in heard]
        return (*heard.values(), *unheard)

    def statistics(self) -> AdvertStatistics:
        counts, ignored = self._counts, {str(reason): count for reason, count in self._book.ignored.items()}
        return AdvertStatistics(
            adverts_sent=counts["adverts"],
            heartbeats_sent=counts["heartbeats"],
            accepted=self._book.accepted,
            ignored=ignored,
            exchanges=counts["exchanges"],
            exchanges_failed=counts["exchanges_failed"],
        )

    async def leave(self) -> None:
        """Say goodbye, so that nobody has to wait for this node's silence. Takes a moment."""
        if self._advert is not None and not self._left:
            self._say(self._pace.goodbye())
            self._left = True
            await trio.sleep(_GOODBYE_S)

    def recheck(self) -> None:
        """Who is a member has changed: forget the peers that are none any more."""
        for change in self._book.recheck(trio.current_time()):
            self._tell(change)

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Speak and listen for ever."""
        await self._gossip.subscribe(self._topic, self._hear, bytes_max=ADVERT_BYTES_MAX + 2)
        self._network.on_connection(self._on_connection)
        for peer in self._network.connected_peers():
            self._on_connection(peer, True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._speak)
            nursery.start_soon(self._ask)
            nursery.start_soon(self._neighbourhood.run)
            if self._directory is not None:
                nursery.start_soon(self._keep_in_directory, self._directory)
            task_status.started()

    # --- Speaking ---

    async def _speak(self) -> None:
        while True:
            now = trio.current_time()
            for change in self._book.tick(now):
                self._tell(change)
            self._notice(now)
            publication = self._pace.due(now)
            if publication is not None and not self._left:
                self._say(publication)
            with trio.move_on_at(min(max(self._pace.due_at, now), now + _TICK_S)):
                await self._wake.wait()
            self._wake = trio.Event() if self._wake.is_set() else self._wake

    def _notice(self, now: float) -> None:
        """What calls for a new advert: other content, or the first neighbours to hear it."""
        content = replace(self._speaker.content(), not_reached=self._unreached.peers).bounded()
        if self._content is None or _differs(content, self._content):
            self._content = content
            self._pace.changed(now)
        has_neighbours = bool(self._gossip.neighbours())
        if has_neighbours and not self._had_neighbours:
            self._pace.met(now)
        self._had_neighbours = has_neighbours

    def _say(self, publication: Publication) -> None:
        try:
            message = self._heartbeat(publication) if publication.heartbeat else self._new_advert(publication)
        except ValueError as error:
            _log.error("this node's advert cannot be made", reason=str(error))
            return
        self._counts["heartbeats" if publication.heartbeat else "adverts"] += 1
        self._gossip.publish(self._topic, message)

    def _new_advert(self, publication: Publication) -> bytes:
        speaker, content = self._speaker, self._content or AdvertContent()
        stamp_s = max(0, int(speaker.wall_s()))
        self._advert = Advert.make(
            speaker.swarm,
            speaker.peer,
            self._own.instance,
            publication.sequence,
            stamp_s,
            LIFETIME_S,
            content,
            speaker.sign,
        )
        if content.held and not self._advert.content.held:
            _log.warning("this node's advert is too long: which experts it holds is left out")
        self._published.set()
        return advert_message(self._advert)

    def _heartbeat(self, publication: Publication) -> bytes:
        speaker, content = self._speaker, self._content or AdvertContent()
        heartbeat = Heartbeat.make(
            speaker.swarm,
            speaker.peer,
            self._own.instance,
            publication.sequence,
            publication.heartbeat,
            phase=content.phase,
            policy=content.policy,
            load=speaker.load(),
            sign=speaker.sign,
            leaving=publication.leaving,
        )
        return heartbeat_message(heartbeat)

    # --- Hearing ---

    def _hear(self, message: bytes, neighbour: PeerId) -> Verdict:
        heard = self._book.hear(message, trio.current_time(), self._speaker.wall_s())
        self._after(heard, neighbour)
        if heard.pass_on:
            return Verdict.PASS_ON
        return Verdict.REFUSE if heard.ignored in _BLAME else Verdict.IGNORE

    def _after(self, heard: Heard, source: PeerId) -> None:
        if heard.change is not None:
            self._tell(heard.change)
        if heard.new_process and heard.peer is not None:
            self._unreached.reached(heard.peer)  # dialed before it ran, which tells nothing
        if heard.wanted is not None:
            wanted = self._to_ask.setdefault(source, set())
            if len(wanted) < limits.ADVERTS_WANTED_MAX:
                wanted.add(heard.wanted)
        if heard.ignored is Ignored.OWN:
            self._wake.set()

    def _tell(self, change: StateChange) -> None:
        _log.info("advert.peer", peer=change.peer, before=change.before, after=change.after)
        for callback in self._on_change:
            try:
                callback(change)
            except Exception:
                _log.exception("a callback for changes of peers failed")

    def _on_connection(self, peer: PeerId, up: bool) -> None:
        oldest = trio.current_time() - limits.ADVERTS_ASK_SECONDS_MIN
        self._asked_all = {each: then for each, then in self._asked_all.items() if then > oldest}
        if up and peer not in self._asked_all:
            self._to_ask_all.add(peer)
        elif not up:
            self._to_ask_all.discard(peer)
            self._to_ask.pop(peer, None)

    async def _ask(self) -> None:
        """Ask neighbours for adverts: everything of new ones, and of others what their messages made us want."""
        async with trio.open_nursery() as nursery:
            while True:
                await trio.sleep(_TICK_S / 2)
                for peer in {**dict.fromkeys(self._to_ask_all), **self._to_ask}:
                    if not self._asks.take(trio.current_time()):
                        break
                    wanted, everything = self._to_ask.pop(peer, set()), peer in self._to_ask_all
                    self._to_ask_all.discard(peer)
                    nursery.start_soon(self._ask_one, peer, wanted, everything)

    async def _ask_one(self, peer: PeerId, wanted: set[str], everything: bool) -> None:
        now = trio.current_time()
        known = self._book.sequences(now) | {self._speaker.peer: self._own.sequence}
        if everything:
            self._asked_all[peer] = now
        else:
            known = {each: known.get(each, 0) for each in wanted}
        try:
            adverts = await self._exchange.ask(peer, known, everything=everything)
        except (NetworkError, PeerMistake, trio.TooSlowError) as error:
            self._counts["exchanges_failed"] += 1
            _log.debug("adverts not got", peer=peer, reason=str(error))
            return
        self._counts["exchanges"] += 1
        for advert in adverts:
            await trio.lowlevel.checkpoint()  # each takes a quarter of a millisecond
            self._after(self._book.hear_advert(advert.data, trio.current_time(), age_s=advert.age_s), peer)

    def _select(self, known: Mapping[str, int], everything: bool) -> Iterator[AgedAdvert]:
        """What another node lacks. Of those that are gone only what it has an older word of: it may be one of them."""
        own, me = self._advert, self._speaker.peer
        if own is not None and (everything or me in known) and own.sequence > known.get(me, 0):
            yield AgedAdvert(own.to_bytes(), 0.0)
        for peer, view in self.peers().items():
            asked = peer in known or (everything and view.state is not PeerState.GONE)
            if asked and view.advert.sequence > known.get(peer, 0):
                yield AgedAdvert(view.advert.to_bytes(), view.silent_s)

    # --- The DHT ---

    async def _keep_in_directory(self, directory: AdvertDirectory) -> None:
        """Put each new advert there, not too often; what is provided is repeated with it."""
        while True:
            await self._published.wait()
            pause_s = _TICK_S
            if self._advert is not None and self._network.connected_peers():
                self._published = trio.Event()
                await directory.publish(self._advert)
                pause_s = limits.DHT_PUT_SECONDS_MIN
            await trio.sleep(pause_s)


def _differs(new: AdvertContent, old: AdvertContent) -> bool:
    """Whether it is worth an advert."""
    step = max(1, new.memory_budget // _MEMORY_STEPS)
    return replace(new, memory_used=old.memory_used) != old or abs(new.memory_used - old.memory_used) >= step


def _holds(advert: Advert, model: str, layer: int) -> bool:
    return any(held.model == model and held.experts_of(layer) for held in advert.content.held)
