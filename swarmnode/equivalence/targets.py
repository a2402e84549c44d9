"""What can be compared, by the name that the command line knows it by: a backend of this machine, or a peer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Final

import numpy as np

from backends.device import Device, list_devices
from backends.experts import F32, ExpertBackend, GgmlExperts
from backends.measure import measure_precision
from backends.numpy_reference import Accumulate, NumpyExperts
from backends.row_operators import GgmlRows, NumpyRows, RowOperators
from backends.switched import Setting
from backends.variant_process import KernelProcess
from capabilities.errors import UsageError
from capabilities.precision import Verdict
from swarmnode.compute import load_factory
from swarmnode.equivalence.peers import PREFIX, PeerRow, RemotePeer, Swarm, no_swarm
from swarmnode.equivalence.recipes import Recipe, Sizes, compute, type_of
from swarmnode.equivalence.restarts import RestartedExperts, RestartedRows, Restarts
from swarmnode.kernels.store import KernelTarget, kernels_called, launch_of

_FACTORY: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_RESERVED: Final = ("reference",)  # no module, whatever stands behind the colon
_THREADS: Final = 1
USUAL: Final = Sizes()
RESULTS_KEPT: Final = 128  # of references, 200 KB each: two of them for every usual weight type and length
PRECISION_WIDTHS: Final = (1, 33, 512)  # at which a side's own rounding is measured


@dataclass(frozen=True, slots=True)
class Target:
    """One side of a comparison.

    make: its kernels, on this machine. rows: softmax and norms, None where a target computes experts alone.
    results: what both compute, where that is kept. setting: what the reference is switched to, for one of those.
    afar: the peer that computes in place of this machine; `make` is then what stands in for experts that it lacks.
    restarts: of its process, where it has one of its own.
    """

    name: str
    make: Callable[[], ExpertBackend]
    rows: RowOperators | None = None
    afar: RemotePeer | None = None
    results: Callable[[Recipe], list[F32]] | None = None
    setting: Setting | None = None
    restarts: Restarts = field(default_factory=Restarts)

    @property
    def computes_rows(self) -> bool:
        return self.rows is not None if self.afar is None else self.afar.computes_rows

    def outputs(self, recipe: Recipe) -> list[F32]:
        """One result for each batch width. UnsupportedModel if it does not know the weight type."""
        if self.afar is not None:
            return self.afar.outputs(recipe)
        return compute(recipe, self.make, self.rows) if self.results is None else self.results(recipe)

    def precision(self, kind: str) -> Verdict:
        """How its products over weights of a type round, as measured. UnsupportedModel likewise."""
        if self.afar is not None:
            return self.afar.precision(kind)
        backend = self.make()
        try:
            return measure_precision(backend, type_of(kind), PRECISION_WIDTHS)
        finally:
            backend.close()


@dataclass(frozen=True, slots=True)
class _Reference:
    """A NumPy target: sums in `accumulate`, activations rounded as ggml's CPU kernels do or not at all."""

    accumulate: Accumulate
    rounds: bool

    @property
    def name(self) -> str:
        return next((name for name, known in _REFERENCES.items() if known == self), f"numpy {self}")

    def target(self) -> Target:
        setting = Setting("with vectors" if self.rounds else "", sums=self.accumulate)
        return Target(self.name, self.make, self.rows, results=partial(_reference_results, self), setting=setting)

    def make(self) -> NumpyExperts:
        return NumpyExperts(self.accumulate, quantize_activations=self.rounds)

    @property
    def rows(self) -> NumpyRows:
        return NumpyRows(np.float64 if self.accumulate == "float64" else np.float32)


@lru_cache(maxsize=RESULTS_KEPT)
def _reference_results(reference: _Reference, recipe: Recipe) -> list[F32]:
    """The same for every pair that is held against it."""
    return compute(recipe, reference.make, reference.rows)


_REFERENCES: Final = {
    "reference": _Reference("float64", False),
    "reference:q8": _Reference("float64", True),
    "reference:f32": _Reference("float32", False),
    "reference:f16": _Reference("float16", False),
}
STAND_IN: Final = "ggml-cpu"
EXACT: Final = "reference"
ROUNDED: Final = "reference:q8"


def find_target(name: str, swarm: Callable[[], Swarm] = no_swarm, sizes: Sizes = USUAL) -> Target:
    """A target by its name. `swarm`: who is asked for peers, and `sizes` what of.

    Raises:
        UsageError: there is no such target here, kernels are not built, or the factory cannot be loaded.
        NoDaemon: a peer, and no daemon runs.
    """
    if known := _REFERENCES.get(name):
        return known.target()
    if name.startswith(PREFIX):
        found = swarm()
        return peer_target(found, found.find(name.removeprefix(PREFIX)), sizes)
    devices = {f"ggml-{info.name.lower()}": info.name for info in list_devices()}
    if name in devices:
        device = Device(devices[name], threads=_THREADS)
        return Target(name, lambda: GgmlExperts(device), GgmlRows(device))
    if kernels := kernels_called(name):
        return _in_a_process(name, kernels)
    if _FACTORY.fullmatch(name) and name.partition(":")[0] not in _RESERVED:
        make = load_factory(name)
        return Target(name, lambda: make(threads=_THREADS))
    raise UsageError(
        f"there is no {name} to compare with",
        hint=f"Choose from: {', '.join([*devices, *_REFERENCES])}; {PREFIX}NAME, a peer of the swarm; kernels of"
        " `swarmctl kernels list`; or a class of your own as module:Class.",
    )


def _in_a_process(name: str, kernels: KernelTarget) -> Target:
    process, restarts = KernelProcess(launch_of(kernels.variant), threads=_THREADS), Restarts()

    def make() -> ExpertBackend:
        return RestartedExperts(process.experts(ask_f32=kernels.ask_f32), restarts)

    return Target(name, make, RestartedRows(process, restarts), restarts=restarts)


def peer_target(swarm: Swarm, row: PeerRow, sizes: Sizes) -> Target:
    """A peer as a target."""
    stand_in = find_target(STAND_IN)
    return Target(f"{PREFIX}{row.name}", stand_in.make, afar=RemotePeer(row, swarm.ask, sizes))
