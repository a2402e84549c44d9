"""What can be compared: a backend of this machine, by the name that the command line knows it by."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from backends.device import Device, list_devices
from backends.experts import ExpertBackend, GgmlExperts
from backends.numpy_reference import Accumulate, NumpyExperts
from backends.row_operators import GgmlRows, NumpyRows, RowOperators
from capabilities.errors import UsageError
from swarmnode.compute import load_factory

ROUNDING: Final = "activation rounding"
ACCUMULATION: Final = "accumulation"

_FACTORY: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_RESERVED: Final = ("peer", "reference")  # no modules, whatever stands behind the colon
_THREADS: Final = 1


@dataclass(frozen=True, slots=True)
class Target:
    """One side of a comparison.

    rows: softmax and norms, None where a target computes experts alone.
    switches: what would be said of it with one thing changed, by the cause that this changes.
    """

    name: str
    make: Callable[[], ExpertBackend]
    rows: RowOperators | None = None
    switches: Mapping[str, Target] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Reference:
    """A NumPy target: sums in `accumulate`, activations rounded as ggml's CPU kernels do or not at all."""

    accumulate: Accumulate
    rounds: bool

    @property
    def name(self) -> str:
        return next((name for name, known in _REFERENCES.items() if known == self), f"numpy {self}")

    def target(self, *, switched: bool = False) -> Target:
        switches = {}
        if not switched:
            switches[ROUNDING] = _Reference(self.accumulate, not self.rounds).target(switched=True)
            if self.accumulate != "float64":
                switches[ACCUMULATION] = _Reference("float64", self.rounds).target(switched=True)
        rows = NumpyRows(np.float64 if self.accumulate == "float64" else np.float32)
        return Target(
            self.name, lambda: NumpyExperts(self.accumulate, quantize_activations=self.rounds), rows, switches
        )


_REFERENCES: Final = {
    "reference": _Reference("float64", False),
    "reference:q8": _Reference("float64", True),
    "reference:f32": _Reference("float32", False),
    "reference:f16": _Reference("float16", False),
}
EXACT: Final = "reference"
ROUNDED: Final = "reference:q8"


def find_target(name: str) -> Target:
    """A target by its name.

    Raises:
        UsageError: there is no such target here, or the factory cannot be loaded.
    """
    if known := _REFERENCES.get(name):
        return known.target()
    devices = {f"ggml-{info.name.lower()}": info.name for info in list_devices()}
    if name in devices:
        device = Device(devices[name], threads=_THREADS)
        return Target(name, lambda: GgmlExperts(device), GgmlRows(device))
    if _FACTORY.fullmatch(name) and name.partition(":")[0] not in _RESERVED:
        make = load_factory(name)
        return Target(name, lambda: make(threads=_THREADS))
    raise UsageError(
        f"there is no {name} to compare with",
        hint=f"Choose from: {', '.join([*devices, *_REFERENCES])}, or a class of your own as module:Class.",
    )
