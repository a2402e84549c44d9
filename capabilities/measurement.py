"""What was measured of one backend, as a value: kept on disk, told in adverts, read by placement.

Everything is said for each weight type, because kernels differ by type: a CPU that agrees with another bit for bit in
Q4_0 need not in Q4_1. Decoding is bounded and strict, since the bytes may be another peer's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capabilities.errors import PeerMistake
from capabilities.numeric_class import CLASS_CHARS
from capabilities.precision import MeasuredPrecision

FORMAT_VERSION: Final = 1
TYPES_MAX: Final = 64  # ggml knows 28 types of weights
NAME_CHARS_MAX: Final = 64
TYPE_CHARS_MAX: Final = 16
WIDTH_MAX: Final = 1 << 20
ROWS_PER_S_MAX: Final = 1e12
BYTES_MAX: Final = 1 << 50
_NOT_MEASURED: Final = MeasuredPrecision()
_CLASS: Final = re.compile(rf"[0-9a-f]{{{CLASS_CHARS}}}|", re.ASCII)


@dataclass(frozen=True, slots=True)
class TypeMeasurement:
    """One weight type.

    numeric_class: fingerprint of the arithmetic; "" where none was taken or calls do not repeat.
    batch_invariant: a row has the same bits alone and among others.
    repeatable: a call has the same bits twice.
    rows_per_s, batch_rows_per_s: experts' rows computed a second, one at a time and in a batch; 0 if not measured.
    """

    accumulation: MeasuredPrecision = _NOT_MEASURED
    source: MeasuredPrecision = _NOT_MEASURED
    numeric_class: str = ""
    batch_invariant: bool = False
    repeatable: bool = False
    rows_per_s: float = 0.0
    batch_rows_per_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "accumulation": self.accumulation.to_json(),
            "source": self.source.to_json(),
            "numeric_class": self.numeric_class,
            "batch_invariant": self.batch_invariant,
            "repeatable": self.repeatable,
            "rows_per_s": self.rows_per_s,
            "batch_rows_per_s": self.batch_rows_per_s,
        }

    @staticmethod
    def from_json(value: Any) -> TypeMeasurement:
        """PeerMistake unless every field is there and possible."""
        fields = _Fields(value)
        numeric_class = fields.text("numeric_class", CLASS_CHARS)
        if not _CLASS.fullmatch(numeric_class):
            raise PeerMistake(f"a numeric class has {CLASS_CHARS} hexadecimal digits")
        return TypeMeasurement(
            MeasuredPrecision.from_json(fields.get("accumulation")),
            MeasuredPrecision.from_json(fields.get("source")),
            numeric_class,
            fields.flag("batch_invariant"),
            fields.flag("repeatable"),
            fields.number("rows_per_s", ROWS_PER_S_MAX),
            fields.number("batch_rows_per_s", ROWS_PER_S_MAX),
        )


@dataclass(frozen=True, slots=True)
class BackendMeasurement:
    """One backend on one device.

    name: the backend ("ggml-cpu"). device: what the driver calls its device.
    n_in, n_ff: widths of the experts that classes and rates were taken with.
    memory_bytes: what it may use, with what it holds already.
    types: by ggml's name of the weight type ("q4_K"). A type that the backend cannot compute is not there.
    complete: False if the deadline came first; what is missing then says UNKNOWN, "", False or 0.
    """

    name: str
    device: str
    n_in: int
    n_ff: int
    memory_bytes: int
    types: Mapping[str, TypeMeasurement]
    complete: bool = True

    @property
    def accumulation(self) -> MeasuredPrecision:
        """The worst over the weight types."""
        return MeasuredPrecision.worst(t.accumulation for t in self.types.values())

    @property
    def source(self) -> MeasuredPrecision:
        """The worst over the weight types."""
        return MeasuredPrecision.worst(t.source for t in self.types.values())

    @property
    def batch_invariant(self) -> bool:
        return bool(self.types) and all(t.batch_invariant for t in self.types.values())

    @property
    def repeatable(self) -> bool:
        return bool(self.types) and all(t.repeatable for t in self.types.values())

    def to_json(self) -> dict[str, Any]:
        """Ready for JSON or msgpack; 400 bytes a weight type as JSON."""
        return {
            "v": FORMAT_VERSION,
            "name": self.name,
            "device": self.device,
            "n_in": self.n_in,
            "n_ff": self.n_ff,
            "memory_bytes": self.memory_bytes,
            "types": {name: measured.to_json() for name, measured in self.types.items()},
            "complete": self.complete,
        }

    @staticmethod
    def from_json(value: Any) -> BackendMeasurement:
        """PeerMistake unless this is a measurement of this format, within the bounds above."""
        fields = _Fields(value)
        types = fields.get("types")
        if fields.get("v") != FORMAT_VERSION or not isinstance(types, dict) or len(types) > TYPES_MAX:
            raise PeerMistake("this is no measurement of a backend, or one of another version")
        if not all(isinstance(name, str) and 0 < len(name) <= TYPE_CHARS_MAX for name in types):
            raise PeerMistake("a weight type has a short name")
        return BackendMeasurement(
            fields.text("name", NAME_CHARS_MAX),
            fields.text("device", NAME_CHARS_MAX),
            fields.integer("n_in", WIDTH_MAX),
            fields.integer("n_ff", WIDTH_MAX),
            fields.integer("memory_bytes", BYTES_MAX),
            {name: TypeMeasurement.from_json(measured) for name, measured in types.items()},
            fields.flag("complete"),
        )


class _Fields:
    """A mapping from outside, read field by field."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise PeerMistake("a measurement is a mapping")
        self._value: dict[Any, Any] = value

    def get(self, name: str) -> Any:
        if name not in self._value:
            raise PeerMistake(f"a measurement says {name}")
        return self._value[name]

    def text(self, name: str, longest: int) -> str:
        value = self.get(name)
        if not isinstance(value, str) or len(value) > longest:
            raise PeerMistake(f"{name} of a measurement has at most {longest} characters")
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if not isinstance(value, bool):
            raise PeerMistake(f"{name} of a measurement is true or false")
        return value

    def number(self, name: str, largest: float) -> float:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= largest:
            raise PeerMistake(f"{name} of a measurement is a number up to {largest:g}")
        return float(value)

    def integer(self, name: str, largest: int) -> int:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
            raise PeerMistake(f"{name} of a measurement is a whole number up to {largest}")
        return value
