"""The rows of peers that the leader does not answer for: what adverts say, what is heard, what a node holds itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from capabilities.advert_content import AdvertContent, Phase
from scheduler.advert_book import PeerState, PeerView
from swarmnode.measured import Measured
from swarmnode.mesh import SwarmMesh
from swarmnode.net.interface import NetworkStatistics
from swarmnode.status import NodeFacts, NoMesh
from swarmnode.status_service import NodeStatus


def mesh(states: dict[str, PeerState], backbone: tuple[str, ...], heard: set[str]) -> SwarmMesh:
    def view(name: str) -> PeerView:
        content = AdvertContent(name=name)
        advert: Any = SimpleNamespace(content=content)
        return PeerView(advert, states[name], Phase.READY, content.policy, 0, 0.0)

    adverts: Any = SimpleNamespace(peers=lambda: {name: view(name) for name in states}, findings=list)
    record = SimpleNamespace(backbone=SimpleNamespace(peers=backbone))
    store: Any = SimpleNamespace(record=record)
    return SwarmMesh(
        "me",
        store,
        adverts=lambda: adverts,
        measured=lambda: Measured("ggml-cpu", "a processor"),
        leader=lambda: None,
        load=lambda: 0,
        paused=list,
        cannot_vote=dict,
        verdict_of=lambda peer: None,
        is_heard=heard.__contains__,
        connected=lambda: heard,
    )


def test_a_peer_that_is_not_heard_is_suspect_whatever_its_advert_says() -> None:
    states = dict.fromkeys(("backbone", "killed", "worker", "stopped"), PeerState.JOINING) | {"left": PeerState.GONE}
    backbone, heard = ("me", "backbone", "killed"), {"backbone", "worker"}
    rows = mesh(states, backbone, heard).others(())
    found = {row["name"]: row["state"] for row in rows}
    away = {"killed": "suspect", "stopped": "suspect", "left": "gone"}
    assert found == {"backbone": "joining", "worker": "joining", **away}
    rows = mesh(states, backbone[1:], heard).others(())
    assert {row["name"]: row["state"] for row in rows} == {**found, "stopped": "joining"}, "it has no part in workers"


@pytest.mark.parametrize("phase", list(Phase))
async def test_without_a_leader_a_worker_says_how_far_it_is_itself(phase: Phase) -> None:
    membership = SimpleNamespace(state=SimpleNamespace(phase=None))
    numbers = SimpleNamespace(dispatches=0, rows=0, refused=0, last_refusal="", rows_per_s=0.0)
    worker: Any = SimpleNamespace(
        phase=phase, serving=None, bytes_held=0, membership=membership, load=lambda: 0,
        experts=SimpleNamespace(statistics=numbers),
    )  # fmt: skip
    network: Any = SimpleNamespace(peer_id="me", addresses=(), statistics=lambda: NetworkStatistics(*[0] * 10))
    view: Any = SimpleNamespace(leader=None, reason="an election is under way")
    facts = NodeFacts("attic", "ggml-cpu", "a processor", 1, 0, 0.0)
    status = await NodeStatus(network, view, facts, NoMesh(), worker, lambda: 3).view()
    (own,) = status["peers"]
    assert (own["state"], status["leader"], status["term"]) == (phase.value, None, 3)
