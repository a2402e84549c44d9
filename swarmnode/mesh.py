"""The peers of a swarm as `status` shows them: rows from adverts and the record, for what a leader knows nothing of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from capabilities.advert import LOAD_MAX
from capabilities.verdict import Verdict
from scheduler.advert_book import PeerState, PeerView
from scheduler.advert_findings import Finding, FindingKind
from swarmnode.measured import Measured, backends_json
from swarmnode.status import Status, peer_row, verdict_fields
from swarmnode.swarm.advert_node import SwarmAdverts
from swarmnode.swarm.record import SwarmRecord
from swarmnode.swarm.store import SwarmStore


class SwarmMesh:
    """See status.Mesh. `adverts` gives None until they run."""

    def __init__(
        self,
        me: str,
        store: SwarmStore,
        adverts: Callable[[], SwarmAdverts | None],
        measured: Callable[[], Measured],
        leader: Callable[[], str | None],
        load: Callable[[], int],
        paused: Callable[[], Sequence[str]],
        cannot_vote: Callable[[], Mapping[str, str]],
        verdict_of: Callable[[str], Verdict | None],
        is_heard: Callable[[str], bool],
        connected: Callable[[], Collection[str]],
    ) -> None:
        """`is_heard`: whether a backbone peer speaks. `connected`: the peers that are."""
        self._me = me
        self._store = store
        self._adverts = adverts
        self._measured = measured
        self._leader = leader
        self._load = load
        self._paused = paused
        self._cannot_vote = cannot_vote
        self._verdict_of = verdict_of
        self._is_heard = is_heard
        self._connected = connected

    @property
    def swarm(self) -> Status:
        record = self._store.record
        return {"id": None, "name": None} if record is None else {"id": record.swarm, "name": record.name}

    def roles(self, peer: str, *, leads: bool, works: bool) -> list[str]:
        return roles(self._store.record, peer, leads=leads, works=works)

    def backends(self, peer: str) -> list[Status]:
        if peer == self._me:
            return self._measured().backends_json()
        view = self._views().get(peer)
        return [] if view is None else backends_json(view.advert.content.backends)

    def load(self, peer: str) -> float | None:
        if peer == self._me:
            return self._load() / LOAD_MAX
        view = self._views().get(peer)
        return None if view is None else view.load / LOAD_MAX

    def others(self, known: Collection[str]) -> list[Status]:
        return [self._row(peer, view) for peer, view in sorted(self._views().items()) if peer not in known]

    def findings(self) -> list[Status]:
        adverts = self._adverts()
        found = [_no_vote(peer, why) for peer, why in self._cannot_vote().items()]
        if why := self._paused():
            message = f"it holds no experts and does not lead now: {'; '.join(why)}"
            hint = "It takes part again by itself. [limits] in its configuration says when; prompts can be asked."
            found.append(Finding(FindingKind.PAUSED, self._me, message, hint))
        if adverts is not None:
            found += adverts.findings()
        return [dict(finding.to_json()) for finding in found]

    def _views(self) -> dict[str, PeerView]:
        adverts = self._adverts()
        return {} if adverts is None else adverts.peers()

    def _is_away(self, peer: str) -> bool:
        """Whether a peer that should be connected is not, whatever its advert says.

        Everybody keeps a connection to every backbone peer, and this node may be one.
        """
        backbone = () if self._store.record is None else self._store.record.backbone.peers
        if peer in backbone:
            return not self._is_heard(peer)
        return self._me in backbone and peer not in self._connected()

    def _row(self, peer: str, view: PeerView) -> Status:
        said = view.advert.content
        return peer_row(
            peer,
            said.name,
            str(PeerState.SUSPECT if view.state is not PeerState.GONE and self._is_away(peer) else view.state),
            backends_json(said.backends),
            roles=self.roles(peer, leads=peer == self._leader(), works="worker" in said.roles),
            experts_held=sum(held.count for held in said.held),
            memory={"used_bytes": said.memory_used, "budget_bytes": said.memory_budget},
            version=said.version,
            load=view.load / LOAD_MAX,
            **verdict_fields(self._verdict_of(peer)),
        )


def _no_vote(peer: str, why: str) -> Finding:
    hint = (
        "Mend its disk, if that is full or broken, and restart it. If the file is lost or damaged, delete what is left"
        f" of it, restart, and by the owner: `swarmctl backbone remove {peer}`, then `swarmctl backbone add {peer}`."
    )
    return Finding(FindingKind.NO_VOTE, peer, why.replace("this peer", "it", 1), hint)


def roles(record: SwarmRecord | None, peer: str, *, leads: bool, works: bool) -> list[str]:
    """What a peer is in its swarm, as `status` names it."""
    backbone = record is not None and peer in record.backbone.peers
    named = {"leader": leads, "backbone": backbone, "worker": works}
    return [name for name, is_so in named.items() if is_so]
