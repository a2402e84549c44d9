"""A swarm in outline: the model's layers, and its workers without their names, to predict one's own part from.

The leader tells it to members and, through the inviting peer, to those that hold an invite (`swarmctl predict`). It has
nothing of any request, and of a worker what placement knows of it and no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

from backends.manifest import Manifest
from capabilities.errors import PeerMistake
from capabilities.verdict import Fitness
from scheduler.placement import LayerSpec, WorkerSpec
from scheduler.prediction import anonymous

LAYERS_MAX: Final = 1024
WORKERS_MAX: Final = 4096
EXPERTS_MAX: Final = 1 << 16
KINDS_MAX: Final = 16
BYTES_MAX: Final = 1 << 50
WIDTH_MAX: Final = 1 << 20
REPLICAS_MAX: Final = 8

Json = Any


@dataclass(frozen=True, slots=True)
class Outline:
    """used: experts of a token in each layer. kinds: ggml types of the experts' weights. widths: their n_in and n_ff.

    layer_ms: of one token alone, as the leader measured it lately; None before the first.
    """

    model: str
    layers: tuple[LayerSpec, ...]
    used: tuple[int, ...]
    kinds: tuple[int, ...]
    widths: tuple[int, int]
    workers: tuple[WorkerSpec, ...]
    replicas: int
    layer_ms: float | None = None

    @classmethod
    def of_model(cls, manifest: Manifest, workers: Sequence[WorkerSpec], replicas: int) -> Outline:
        from backends.measure import Request

        request = Request.of_model(manifest)
        return cls(
            manifest.name,
            tuple(LayerSpec(layer.layer, layer.n_expert, layer.expert_bytes) for layer in manifest.layers),
            tuple(layer.n_used for layer in manifest.layers),
            tuple(request.kinds),
            (request.n_in, request.n_ff),
            tuple(anonymous(workers)),
            replicas,
        )

    def to_json(self) -> dict[str, Json]:
        return {
            "model": self.model,
            "layers": [
                [spec.layer, spec.n_expert, spec.expert_bytes, used]
                for spec, used in zip(self.layers, self.used, strict=True)
            ],
            "kinds": list(self.kinds),
            "widths": list(self.widths),
            "replicas": self.replicas,
            "layer_ms": self.layer_ms,
            "workers": [
                {
                    "budget_bytes": worker.budget_bytes,
                    "host": worker.host,
                    "rows_per_s": worker.rows_per_s,
                    "rtt_ms": worker.rtt_ms,
                    "fitness": worker.fitness,
                    "accumulates_f32": worker.accumulates_f32,
                    "draining": worker.draining,
                }
                for worker in self.workers
            ],
        }

    @classmethod
    def from_json(cls, value: Json) -> Outline:
        """Of a peer. PeerMistake if it is none."""
        try:
            rows = [tuple(_whole(n, BYTES_MAX) for n in row) for row in _list(value["layers"], LAYERS_MAX)]
            layers = tuple(LayerSpec(layer, _whole(n, EXPERTS_MAX, 1), max(1, size)) for layer, n, size, _ in rows)
            width, inner = (_whole(n, WIDTH_MAX, 1) for n in value["widths"])
            if len({spec.layer for spec in layers}) < len(layers) or not layers:
                raise ValueError("layers")
            return cls(
                str(value["model"])[:128],
                layers,
                tuple(min(used, spec.n_expert) for spec, (*_, used) in zip(layers, rows, strict=True)),
                tuple(_whole(kind, 1 << 10) for kind in _list(value["kinds"], KINDS_MAX)),
                (width, inner),
                tuple(_worker(i, one) for i, one in enumerate(_list(value["workers"], WORKERS_MAX))),
                _whole(value["replicas"], REPLICAS_MAX, 1),
                None if value["layer_ms"] is None else _positive(value["layer_ms"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PeerMistake(f"a swarm's outline is malformed: {error!s:.100}") from None


def _worker(number: int, value: Mapping[str, Json]) -> WorkerSpec:
    if value["fitness"] not in get_args(Fitness):
        raise ValueError(f"{value['fitness']!r:.40} is no fitness")
    return WorkerSpec(
        f"worker-{number}",
        _whole(value["budget_bytes"], BYTES_MAX),
        host=str(value["host"])[:64],
        rows_per_s=_positive(value["rows_per_s"]),
        rtt_ms=_positive(value["rtt_ms"]),
        fitness=value["fitness"],
        accumulates_f32=value["accumulates_f32"] is True,
        draining=value["draining"] is True,
    )


def _whole(value: Json, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r:.40} is no number from {least} to {most}")
    return value


def _positive(value: Json) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{value!r:.40} is no positive number")
    return float(value)


def _list(value: Json, most: int) -> list[Json]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"no list of up to {most}")
    return value
