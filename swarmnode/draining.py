"""Whether this node holds experts and leads: as its user says, and as its machine may work now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from capabilities.advert_content import Policy
from swarmnode.availability import AvailabilityWatch
from swarmnode.candidate import Candidate
from swarmnode.worker.service import Worker


class Draining:
    """stop_leading: lead no longer than until another peer does. changed: called when the policy may be another."""

    def __init__(
        self,
        availability: AvailabilityWatch,
        worker: Worker,
        candidate: Candidate,
        stop_leading: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._availability = availability
        self._worker = worker
        self._candidate = candidate
        self._stop_leading = stop_leading
        self._changed = changed
        self._asked = False

    @property
    def policy(self) -> Policy:
        availability = self._availability
        return Policy(
            draining=self._asked or bool(availability.reasons),
            battery=availability.last.battery is True,
            metered=availability.last.metered is True,
        )

    async def drain(self, on: bool) -> bool:
        """Hold nothing more, and lead no longer than until another peer does, if one can; or take part again.

        Whether it drains now.
        """
        self._asked = on
        await self._apply()
        return self.policy.draining

    async def follow_availability(self) -> None:
        """Let go of experts while this machine is not to work, and take them back after. Never ends."""
        applied = False
        while True:
            changed, paused = self._availability.changed, bool(self._availability.reasons)
            if paused is not applied:
                applied = paused
                await self._apply()
            await changed.wait()

    async def _apply(self) -> None:
        on = self.policy.draining
        self._worker.set_draining(on)
        self._candidate.set_draining(on)
        if on:
            await self._stop_leading()
        self._changed()
