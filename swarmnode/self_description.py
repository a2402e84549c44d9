"""What this node says of itself, put together from those who know: cheap enough to be asked each second.

    describe = SelfDescription(name="attic", host=machine_name(data), addresses=lambda: network.addresses, ...)
    describe()                             # an AdvertContent

What takes time is kept as long as its source is the same object: which experts are held, as the bits of an advert, and
the backends' measurements. Addresses are asked of the system now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import trio

from capabilities.advert_content import AdvertContent, BackendAdvert, Phase, Policy, Role
from capabilities.held_experts import HeldExperts
from swarmnode.measured import Measured
from swarmnode.member_messages import WIRE_VERSION
from swarmnode.version import VERSION

ADDRESSES_CACHED_SECONDS: Final = 10.0


class Memory(NamedTuple):
    """Bytes of experts that are held, and that may be."""

    used_bytes: int
    budget_bytes: int


Held = tuple[str, Mapping[int, Collection[int]]]
"""A model's id, and experts of its layers. The mapping is not changed in place: other experts, another mapping."""


@dataclass
class SelfDescription:
    """Called without arguments it gives the content of this node's advert now, but for its membership certificate.

    `addresses`: where others may dial this node, best first. `phase`: joining until this node has what it should
    have, then ready; loading in between. `host`: machine.machine_name's.
    """

    name: str
    host: str
    addresses: Callable[[], Sequence[str]]
    roles: Callable[[], Collection[Role]]
    phase: Callable[[], Phase]
    memory: Callable[[], Memory]
    held: Callable[[], Sequence[Held]]
    measured: Callable[[], Measured]
    policy: Callable[[], Policy] = Policy

    def __post_init__(self) -> None:
        self._addresses: tuple[str, ...] = ()
        self._addresses_until = float("-inf")
        self._of_held: dict[str, tuple[Mapping[int, Collection[int]], HeldExperts]] = {}
        self._of_measured: tuple[Measured | None, tuple[BackendAdvert, ...]] = (None, ())

    def __call__(self) -> AdvertContent:
        memory = self.memory()
        return AdvertContent(
            name=self.name,
            roles=tuple(sorted(self.roles())),
            version=VERSION,
            wire=WIRE_VERSION,
            phase=self.phase(),
            policy=self.policy(),
            addresses=self._current_addresses(),
            backends=self._backends(),
            memory_budget=memory.budget_bytes,
            memory_used=memory.used_bytes,
            held=self._held(),
            host=self.host,
        )

    def _current_addresses(self) -> tuple[str, ...]:
        if trio.current_time() >= self._addresses_until:
            self._addresses = tuple(self.addresses())
            self._addresses_until = trio.current_time() + ADDRESSES_CACHED_SECONDS
        return self._addresses

    def _backends(self) -> tuple[BackendAdvert, ...]:
        measured = self.measured()
        if measured is not self._of_measured[0]:
            self._of_measured = measured, measured.adverts()
        return self._of_measured[1]

    def _held(self) -> tuple[HeldExperts, ...]:
        kept, self._of_held = self._of_held, {}
        for model, experts in self.held():
            source, found = kept.get(model, (None, None))
            if source is not experts or found is None:
                found = HeldExperts.of(model, experts)
            self._of_held[model] = experts, found
        return tuple(found for _, (_, found) in sorted(self._of_held.items()) if found.count)
