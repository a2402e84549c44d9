"""What a node says of itself: everything in its place, and nothing computed twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from trio.testing import MockClock

from capabilities.advert_content import Phase, Policy, Role
from capabilities.held_experts import HeldExperts
from swarmnode import self_description
from swarmnode.measured import Measured
from swarmnode.member_messages import WIRE_VERSION
from swarmnode.self_description import ADDRESSES_CACHED_SECONDS, Memory, SelfDescription
from swarmnode.version import VERSION
from tests.advert_tools import MODEL, Speaking
from tests.test_measuring import measured_type, measurement


class Sources:
    """What the rest of a daemon would know, and how often it is asked."""

    def __init__(self) -> None:
        self.held: Mapping[int, tuple[int, ...]] = {layer: tuple(range(10, 42)) for layer in range(48)}
        self.measured = Measured("ggml-cpu", "a processor")
        self.address = "/ip4/192.0.2.1/tcp/4100/p2p/x"
        self.looked_up = 0

    def addresses(self) -> tuple[str, ...]:
        self.looked_up += 1
        return (self.address,)

    def describe(self) -> SelfDescription:
        return SelfDescription(
            name="attic",
            host="0123456789abcdef",
            addresses=self.addresses,
            roles=lambda: {Role.WORKER, Role.BACKBONE},
            phase=lambda: Phase.LOADING,
            memory=lambda: Memory(5, 9),
            held=lambda: [(MODEL, self.held)],
            measured=lambda: self.measured,
            policy=lambda: Policy(draining=True),
        )


async def test_everything_is_in_its_place(autojump_clock: MockClock) -> None:
    sources = Sources()
    content = sources.describe()()
    assert (content.name, content.host, content.roles) == ("attic", "0123456789abcdef", (Role.BACKBONE, Role.WORKER))
    assert (content.version, content.wire) == (VERSION, WIRE_VERSION)
    assert (content.phase, content.policy) == (Phase.LOADING, Policy(draining=True))
    assert (content.memory_used, content.memory_budget) == (5, 9)
    assert content.held == (HeldExperts.of(MODEL, sources.held),)
    assert content.addresses == (sources.address,)
    assert content.backends == (), "nothing is claimed before it is measured"
    assert content.bounded() == content
    assert Speaking("PeerA", content=content).make(1).content == content


async def test_what_changes_is_noticed_and_the_rest_is_kept(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = Sources()
    describe = sources.describe()
    first = describe()
    counted: list[object] = []
    of = HeldExperts.of

    class Counting(HeldExperts):
        @classmethod
        def of(cls, model: str, experts: Mapping[int, object]) -> HeldExperts:  # type: ignore[override]
            counted.append(experts)
            return of(model, experts)  # type: ignore[arg-type]

    monkeypatch.setattr(self_description, "HeldExperts", Counting)
    assert describe() == first
    assert not counted
    sources.held = {0: (1,)}
    sources.measured = replace(sources.measured, backend=measurement(q8_0=measured_type()))
    changed = describe()
    assert changed.held[0].count == 1
    assert [backend.name for backend in changed.backends] == ["ggml-cpu"]
    sources.held = {}
    assert describe().held == ()
    assert len(counted) == 2

    sources.address = "/ip4/192.0.2.2/tcp/4100/p2p/x"
    assert describe().addresses == first.addresses
    assert sources.looked_up == 1
    autojump_clock.jump(ADDRESSES_CACHED_SECONDS)
    assert describe().addresses == (sources.address,)
