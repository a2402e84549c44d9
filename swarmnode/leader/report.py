"""`swarmctl placement` at the leader: its placement as JSON, with what falls short and what a loss would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from capabilities.errors import NotReady, UsageError
from scheduler.placement_report import Loss, PeerShare
from swarmnode.leader.placer import Placer
from swarmnode.net.interface import PeerId

Json = dict[str, Any]


def placement_json(placer: Placer, lost: str | None) -> Json:
    """Who holds what now. `lost`: the name or the peer id of a worker, whose loss is described under `without`.

    Raises:
        NotReady: there is no placement.
        UsageError: no worker has that name, or several have.
    """
    report, placement = placer.describe(), placer.coverage.current or placer.coverage.wanted
    if report is None or placement is None:
        raise NotReady(f"there is no placement yet: it waits for {placer.coverage.waiting_for}")
    loss = None
    if lost is not None:
        peer = _peer(placer, lost)
        if (cost := placer.without(peer)) is not None:
            loss = _loss(cost, placer.coverage.name(peer))
    return {
        "term": placement.term,
        "epoch": placement.epoch,
        "coverage": {
            "min_copies": report.coverage.min_copies,
            "missing": [{"layer": layer, "expert": expert} for layer, expert in report.coverage.missing],
        },
        "copies": [{"copies": copies, "experts": experts} for copies, experts in report.copies.items()],
        "degraded": list(report.degraded),
        "single_points": list(report.single_points),
        "mixed_classes": report.mixed,
        "token_ms": round(report.token_ms, 3),
        "peers": [_share(share, placer.coverage.name(share.peer)) for share in report.peers],
        "without": loss,
    }


def _peer(placer: Placer, named: str) -> str:
    members = placer.members.by_peer
    if PeerId(named) in members:
        return named
    found = [str(peer) for peer, member in members.items() if member.name == named or peer.endswith(named)]
    if len(found) == 1:
        return found[0]
    hint = "`swarmctl status` shows the peers; `swarmctl status --json` has their whole ids."
    raise UsageError(f"{'no worker is' if not found else 'several workers are'} called {named!r}", hint=hint)


def _share(share: PeerShare, name: str) -> Json:
    return {
        "peer_id": share.peer,
        "name": name,
        "experts": share.experts,
        "bytes": share.nbytes,
        "budget_bytes": share.budget_bytes,
        "held": _layers(share.held),
        "why_no_output_rank": share.why_no_output or None,
    }


def _loss(loss: Loss, name: str) -> Json:
    return {
        "peer_id": loss.peer,
        "name": name,
        "no_copy": _layers(loss.no_copy),
        "one_copy": _layers(loss.one_copy),
        "bytes_to_move": loss.bytes_to_move,
        "token_ms_before": round(loss.token_ms_before, 3),
        "token_ms_after": None if loss.token_ms_after is None else round(loss.token_ms_after, 3),
        "slowdown": None if loss.slowdown is None else round(loss.slowdown, 3),
        "impossible": loss.impossible or None,
    }


def _layers(experts: Mapping[int, Sequence[int]]) -> list[Json]:
    return [{"layer": layer, "experts": list(some)} for layer, some in sorted(experts.items())]
