"""What a daemon has of its machine, whatever swarm it is in: kernels, memory, cache, and what was measured of them."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

import psutil
import trio

from capabilities.numeric_class import TRUNK_KERNELS
from swarmnode.availability import AvailabilityWatch, conditions
from swarmnode.compute import Compute, choose_compute
from swarmnode.config import Config
from swarmnode.machine import machine_name
from swarmnode.measuring import Measuring
from swarmnode.member_messages import WIRE_VERSION, Hello
from swarmnode.models import Models
from swarmnode.paths import Paths, shared_cache_folder
from swarmnode.shards.pace import Pace
from swarmnode.shards.store import ShardCache, bytes_in
from swarmnode.status import NodeFacts
from swarmnode.version import VERSION

_HOST_CHARS = 16


@dataclass(frozen=True)
class MachineParts:
    """`budget_bytes` is for experts in memory; `host` names the machine, the same for all its daemons; `instance` this
    process, anew at each start."""

    paths: Paths
    threads: int
    compute: Compute
    cache: ShardCache
    measuring: Measuring
    facts: NodeFacts
    host: str
    availability: AvailabilityWatch
    instance: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    async def open(cls, config: Config, paths: Paths, threads: int) -> MachineParts:
        """Read the cache, choose the backend. UsageError where the configured one cannot be had."""
        compute = choose_compute(config.compute, threads)
        budget = config.node.memory_bytes(psutil.virtual_memory().available)
        held = await trio.to_thread.run_sync(lambda: bytes_in(paths.shards) + Models(paths.models).trunk_bytes())
        disk = config.node.disk_bytes(psutil.disk_usage(str(paths.shards)).free, held)
        downloads = Pace.of_mbit(config.limits.download_mbit)
        cache = await trio.to_thread.run_sync(ShardCache, paths.shards, disk, downloads)
        folder = shared_cache_folder() / "measurements"
        return cls(
            paths,
            threads,
            compute,
            cache,
            Measuring(config.compute, compute, threads, folder, fast=config.leader.fast),
            NodeFacts.of(config, compute.name, compute.device, threads, budget),
            config.node.host or await trio.to_thread.run_sync(machine_name, paths.data),
            AvailabilityWatch(conditions(config.limits)),
        )

    @property
    def budget_bytes(self) -> int:
        return self.facts.memory_budget_bytes

    @property
    def own_classes(self) -> tuple[str, ...]:
        """Numeric classes of ggml's kernels on this processor; none if others were measured here, or nothing yet."""
        return self.measuring.classes if self.compute.name == TRUNK_KERNELS else ()

    def host_in(self, swarm: str) -> str:
        """A word for the machine that means nothing outside of the swarm."""
        return hashlib.sha256(f"{swarm} {self.host}".encode()).hexdigest()[:_HOST_CHARS]

    def hello(self, *, certificate: bytes = b"", swarm: str = "") -> Hello:
        """What a worker says of itself; it follows a leader with what it holds."""
        measured = self.measuring.current
        return Hello(
            name=self.facts.name,
            version=VERSION,
            wire=WIRE_VERSION,
            backend=self.compute.name,
            device=self.compute.device,
            threads=self.threads,
            memory_budget_bytes=self.budget_bytes,
            q8_0=self.compute.rounds_as_ggml_cpu,
            certificate=certificate,
            host=self.host_in(swarm),
            numeric_class=measured.numeric_class(),
            accumulates_f32=measured.accumulates_f32(),
            measuring=measured.backend is None and self.measuring.busy,
            instance=self.instance,
        )
