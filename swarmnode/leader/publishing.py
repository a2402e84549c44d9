"""The routing that the decode thread gets: who answers for what now, how far and how fast each is, which bits it makes.

Two peers are of one numeric class if their measured classes are equal, or if both gave the leader's own bits when they
were probed and their measured classes do not say otherwise: a probe compares some rows, and of two kernels a handful of
rows in 100,000 may differ. Then the leader's own copy is of that class, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from backends.activations import q8_0_is_exact
from backends.manifest import Manifest
from backends.program import ExpertProgram
from capabilities.numeric_class import shown_different
from scheduler.dispatch import UNMEASURED, LayerRouting
from scheduler.layer_cost import PeerSpeed
from swarmnode.leader.coverage import Coverage
from swarmnode.leader.link import PeerLink
from swarmnode.leader.members import Member, Members
from swarmnode.leader.own_experts import OWN_COPY
from swarmnode.leader.routing import OWN_CLASS, Routing
from swarmnode.net.interface import PeerId
from swarmnode.wire import Q8_0_BLOCK_VALUES

ActivationsChoice = Literal["auto", "f32", "q8_0"]


def make_routing(
    coverage: Coverage,
    members: Members,
    known: dict[str, str],
    *,
    q8_layers: frozenset[int],
    ask_f32: frozenset[int],
    partial_sums: bool,
) -> Routing | None:
    """From a coverage that was refreshed; None if no epoch serves. q8_layers: whose activations may go as Q8_0.

    known: the numeric class of each peer that ever had one, brought up to date here: who stands in for a peer that is
    away should be of its class.
    """
    current = coverage.current
    if current is None:
        return None
    answering: dict[str, tuple[Member, PeerLink]] = {}
    for peer in coverage.answering:
        member = members.by_peer[PeerId(peer)]
        assert member.link is not None
        answering[peer] = member, member.link
    for peer, (member, _) in answering.items():
        known.pop(peer, None)  # audits may have shown that what was known of it holds no more
        if (kind := numeric_class(member, members.own_classes())) is not None:
            known[peer] = kind
    classes = {OWN_COPY: OWN_CLASS, **known} if coverage.own_copy else dict(known)
    speeds = {
        peer: PeerSpeed(
            (members.watch.rtt_ms(member.peer) or 0.0) / 1e3,
            link.kernel_rows_per_s or UNMEASURED.rows_per_s,
            0.0,
            classes.get(peer),
        )
        for peer, (member, link) in answering.items()
    }
    holders = coverage.holders
    away = {peer for each in holders.values() for peers in each for peer in peers if peer not in answering}
    fallback = OWN_COPY if coverage.own_copy else None
    return Routing(
        current.term,
        current.epoch,
        {
            layer: LayerRouting(layer, each, away, speeds=speeds, shares_load=not partial_sums, fallback=fallback)
            for layer, each in holders.items()
        },
        {peer: link for peer, (_, link) in answering.items()},
        _quantized(answering, q8_layers),
        ask_f32,
        classes,
        {peer: placement.epoch for peer, placement in coverage.answering.items() if placement is not current},
    )


def quantizable(manifest: Manifest, choice: ActivationsChoice) -> frozenset[int]:
    """The layers whose activations travel as Q8_0."""
    if choice == "f32":
        return frozenset()
    layers = manifest.layers
    if choice == "q8_0":
        return frozenset(layer.layer for layer in layers if layer.n_in % Q8_0_BLOCK_VALUES == 0)
    programs = [ExpertProgram.from_bytes(program) for program in manifest.programs]
    return frozenset(layer.layer for layer in layers if q8_0_is_exact(layer, programs[layer.program]))


def numeric_class(member: Member, own: Collection[str]) -> str | None:
    """None if it is not known. own: what the leader's kernels were measured to be, as far as that is known.

    That the probe found other bits stands over what was measured; that it found none, over what was not.
    """
    measured = member.hello.numeric_class
    differs = any(shown_different(measured, each) for each in own)
    if member.agreement is not None and member.agreement.bit_identical and not differs:
        return OWN_CLASS
    return measured or None


def _quantized(
    answering: Mapping[str, tuple[Member, PeerLink]], q8_layers: frozenset[int]
) -> Mapping[str, frozenset[int]]:
    return {peer: q8_layers for peer, (member, _) in answering.items() if member.hello.q8_0}
