"""The model that a leader serves, with everything that serves it, and what that counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from backends.llama import LlamaModel
from backends.manifest import Manifest
from swarmnode.config_sections import Combine
from swarmnode.leader.engine import DecodeEngine
from swarmnode.leader.placer import Placer
from swarmnode.leader.prompts import PromptService
from swarmnode.leader.remote_experts import RemoteExperts
from swarmnode.models import OpenModel


@dataclass(eq=False)
class ActiveModel:
    """Everything that serves one model."""

    open: OpenModel
    model: LlamaModel
    engine: DecodeEngine
    remote: RemoteExperts
    placer: Placer
    prompts: PromptService
    combine: Combine

    @property
    def manifest(self) -> Manifest:
        return self.open.manifest

    def time_callbacks(self, timed: bool) -> None:
        if self.model.hook is not None:
            self.model.hook.timed = timed

    def statistics(self) -> dict[str, Any]:
        """Counters since the start: steps of the engine, layers of the executor, and each link."""
        engine = self.engine.statistics()
        return {
            "steps": engine.steps,
            "decode_s": engine.decode_s,
            "callback_s": 0.0 if self.model.hook is None else self.model.hook.python_s,
            "layers": asdict(self.remote.timing),
            "failover": asdict(self.remote.failover),
            "audits": self.placer.auditing.totals(),
            "links": [
                {"peer": str(m.peer), "name": m.name, **asdict(m.link.statistics)}
                for m in self.placer.members.present()
                if m.link is not None
            ],
        }
