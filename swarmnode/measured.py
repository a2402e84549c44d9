"""What this node's backends were measured to do, as one value, in the forms that others ask for.

Nothing was measured in the first seconds of a daemon. Until then every answer is the careful one: no claim in an
advert, `unknown` in the status, no numeric class, and no F32 for output ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from backends.gguf_types import GGML_TYPES
from capabilities.advert_content import BackendAdvert, WeightSpeed
from capabilities.measurement import BackendMeasurement, TypeMeasurement
from capabilities.numeric_class import joined
from capabilities.precision import MeasuredPrecision, Precision

_STATUS_WORDS: Final = {Precision.BF16: Precision.Q8}
"""bfloat16 keeps eight bits, as Q8_0 does: the status has one word for both."""


@dataclass(frozen=True)
class Measured:
    """`backend` is None until it is measured, and where that failed: `error` then says why.

    `name` and `device` are what the configuration chose.
    """

    name: str
    device: str
    backend: BackendMeasurement | None = None
    error: str = ""

    @property
    def complete(self) -> bool:
        """Whether everything was measured that was asked for."""
        return self.backend is not None and self.backend.complete

    @property
    def rows_per_s(self) -> float:
        """Rows of experts a second, one at a time, for the slowest of the weight types; 0 if not measured."""
        return min((measured.rows_per_s for measured in self._types if measured.rows_per_s > 0), default=0.0)

    def numeric_class(self, kinds: Iterable[int] = ()) -> str:
        """One word for the arithmetic over ggml types of weights (all measured ones if none are named).

        "" if one of them has no class. Equal words: the same bits for the same rows, until shown otherwise.
        """
        backend, found = self.backend, self._of(kinds)
        if backend is None or any(each is None for each in found.values()):
            return ""
        return joined((name, each.numeric_class) for name, each in found.items() if each is not None)

    def accumulates_f32(self, kinds: Iterable[int] = ()) -> bool:
        """Whether sums are seen to be in F32 when a dispatch asks for it, for all these ggml types of weights."""
        found = self._of(kinds)
        return bool(found) and all(
            each is not None and each.accumulation.measured_when_asked is Precision.F32 for each in found.values()
        )

    def adverts(self) -> tuple[BackendAdvert, ...]:
        """What an advert may say. Nothing before the measurement: a claim alone is none."""
        if self.backend is None:
            return ()
        weights = tuple(
            WeightSpeed(name, each.numeric_class, int(each.rows_per_s)) for name, each in self.backend.types.items()
        )
        return (
            BackendAdvert(
                name=self.backend.name,
                device=self.backend.device or self.device,
                accumulation=self.backend.accumulation,
                source=self.backend.source,
                batch_invariant=self.backend.batch_invariant,
                repeatable=self.backend.repeatable,
                weights=weights,
            ).bounded(),
        )

    def backends_json(self) -> list[dict[str, Any]]:
        """`backends` of a peer in the status: see docs/status.md."""
        backend = self.backend
        return [
            {
                "name": self.name,
                "device": self.device,
                "accumulation": _words(MeasuredPrecision() if backend is None else backend.accumulation),
                "source": _words(MeasuredPrecision() if backend is None else backend.source),
                "numeric_class": self.numeric_class() or None,
                "types": [] if backend is None else sorted(backend.types),
                "batch_invariant": None if backend is None else backend.batch_invariant,
                "repeatable": None if backend is None else backend.repeatable,
                "rows_per_s": round(self.rows_per_s, 1) or None,
                "error": self.error or None,
            }
        ]

    @property
    def _types(self) -> Iterable[TypeMeasurement]:
        return () if self.backend is None else self.backend.types.values()

    def _of(self, kinds: Iterable[int]) -> dict[str, TypeMeasurement | None]:
        types = {} if self.backend is None else self.backend.types
        names = [GGML_TYPES[kind].name if kind in GGML_TYPES else str(kind) for kind in kinds] or list(types)
        return {name: types.get(name) for name in names}


def _words(precision: MeasuredPrecision) -> dict[str, str]:
    values = {
        "declared": precision.declared,
        "measured": precision.measured,
        "measured_when_asked": precision.measured_when_asked,
    }
    return {name: str(_STATUS_WORDS.get(value, value)) for name, value in values.items()}


def backends_json(backends: Iterable[BackendAdvert]) -> list[dict[str, Any]]:
    """The same of another peer, as its advert says it."""
    return [
        {
            "name": each.name,
            "device": each.device,
            "accumulation": _words(each.accumulation),
            "source": _words(each.source),
            "numeric_class": class_of(each) or None,
            "types": sorted(weight.weight for weight in each.weights),
            "batch_invariant": each.batch_invariant,
            "repeatable": each.repeatable,
            "rows_per_s": min((weight.rows_per_s for weight in each.weights if weight.rows_per_s), default=0) or None,
            "error": None,
        }
        for each in backends
    ]


def class_of(backend: BackendAdvert) -> str:
    """`Measured.numeric_class` over all weight types of another peer's backend."""
    return joined((weight.weight, weight.numeric_class) for weight in backend.weights)
