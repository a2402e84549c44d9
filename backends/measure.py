"""A backend measured: what its kernels do, asked of the kernels themselves, whatever anybody declares.

Everything goes through `ExpertBackend`, as a dispatch does, so that exactly the serving kernels are measured: an
ExpertProgram of one product for precision (capabilities/precision.py says how the verdict is found), of a whole SwiGLU
expert for rates, of it and its single steps for numeric classes. The made-up layer has a number that no model has.

Precision comes first for all weight types, then classes, then rates: if the deadline comes early, what is missing is
what matters least. What was not measured is never reported as good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import psutil

from backends.class_inputs import rows_on_ties
from backends.device import Device, list_devices
from backends.experts import ExpertBackend, GgmlExperts
from backends.gguf_types import GGML_TYPES
from backends.manifest import Manifest
from backends.numeric_class import Fingerprint, Step, fingerprint, step_of_product, step_of_unit
from backends.probe_weights import (
    SUPER_BLOCK,
    WEIGHT_TYPES,
    ProbeLayer,
    even_layer,
    noise_layer,
    product_layer,
    unit_layer,
)
from backends.program import ExpertProgram, Node
from capabilities.errors import PeerMistake, UnsupportedModel
from capabilities.measurement import NAME_CHARS_MAX, TYPES_MAX, BackendMeasurement, TypeMeasurement
from capabilities.precision import (
    BATCH_WIDTHS,
    PROBE_WIDTH,
    MeasuredPrecision,
    Precision,
    Verdict,
    judge,
    kept,
    probe_rows,
)

DEADLINE_S: Final = 10.0
N_IN, N_FF = 2048, 1024  # of OLMoE and Qwen3-30B-A3B, or about
FINGERPRINT_BYTES_MAX: Final = 64 << 20  # of two experts; wider models are fingerprinted with a narrower n_ff
RATE_BYTES: Final = 48 << 20  # of experts in turn: more than most caches hold, as in decoding
RATE_ROWS: Final = 128  # of the batch: a prefill's share
RATE_S: Final = 0.1
_RATE_EXPERTS_MAX: Final = 64
_PROBE_OUTPUTS: Final = 64
_UNITS_MAX: Final = 4  # of a model's programs: known ones have one
_UNIT_WIDTH: Final = 192  # and what n_ff leaves over _VECTOR: a row's last values may not fill a vector
_VECTOR: Final = 64  # values of the widest
_SWIGLU: Final = Node("glu", params=(0.0, 0.0, 0.0), name="SWIGLU")

Progress = Callable[[int, int, str], None]
"""(steps done, steps in all, what is measured now)"""


class _OutOfTimeError(Exception):
    pass


@dataclass
class _Clock:
    """Time left for measuring. Computations cannot be interrupted, so time is looked at between them."""

    now: Callable[[], float]
    ends_at: float
    late: bool = False

    def tick(self) -> None:
        if self.now() > self.ends_at:
            self.late = True
            raise _OutOfTimeError


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure.

    kinds: ggml types of weights. n_in, n_ff: widths of the experts for classes and rates, best the model's own.
    units: what experts do between their products, as `glu` and `unary` nodes without inputs.
    accumulation, source: what the backend claims of itself.
    """

    kinds: tuple[int, ...]
    n_in: int = N_IN
    n_ff: int = N_FF
    accumulation: Precision = Precision.UNKNOWN
    source: Precision = Precision.UNKNOWN
    units: tuple[Node, ...] = (_SWIGLU,)

    @staticmethod
    def of_model(manifest: Manifest) -> Request:
        """For the experts of a model: every type of matrix among them, the widths of the widest, its gated units."""
        layers = manifest.layers
        matrices = [tensor for layer in layers for tensor in layer.tensors if len(tensor.shape) == 2]
        kinds = tuple(sorted({tensor.type for tensor in matrices} & set(WEIGHT_TYPES)))
        down = [tensor.shape[0] for tensor in matrices if tensor.name.startswith("ffn_down")]
        n_in = max((layer.n_in for layer in layers), default=N_IN)
        return Request(kinds, n_in, max(down, default=N_FF), units=_units(manifest) or (_SWIGLU,))


def _units(manifest: Manifest) -> tuple[Node, ...]:
    nodes: set[Node] = set()
    for program in manifest.programs:
        with suppress(PeerMistake):  # it came from elsewhere; whoever loads it says what is wrong with it
            nodes |= {n for n in ExpertProgram.from_bytes(program).nodes if n.op in ("glu", "unary")}
    bare = {replace(node, inputs=()) for node in nodes}
    return tuple(sorted(bare, key=lambda node: (node.op, node.name, node.params))[:_UNITS_MAX])


def declared_by(backend: ExpertBackend) -> tuple[Precision, Precision]:
    """What a backend claims of its accumulation and its source, in `declares`, two words of Precision; or nothing.

    It is shown beside what is measured, and decides nothing.
    """
    accumulation, source = getattr(backend, "declares", (Precision.UNKNOWN, Precision.UNKNOWN))
    return Precision.of(accumulation), Precision.of(source)


def measure_device(
    device: Device, request: Request, *, deadline_s: float = DEADLINE_S, progress: Progress | None = None
) -> BackendMeasurement:
    """Measure ggml's kernels on a device. No computation may run on the same Device meanwhile."""
    backend = GgmlExperts(device)
    try:
        measured = measure_backend(backend, request, deadline_s=deadline_s, progress=progress)
    finally:
        backend.close()
    return replace(measured, device=device.info.description[:NAME_CHARS_MAX], memory_bytes=usable_memory(device))


def measure_backend(
    backend: ExpertBackend,
    request: Request,
    *,
    deadline_s: float = DEADLINE_S,
    progress: Progress | None = None,
    now: Callable[[], float] = time.monotonic,
) -> BackendMeasurement:
    """Measure a backend. Weight types that it does not know are left out of the result.

    Takes about half a second a weight type on a CPU, up to 128 MiB here and 64 MiB on the device, and ends with the
    first computation after `deadline_s`.

    Raises:
        SwarmError: the device failed.
    """
    clock = _Clock(now, now() + deadline_s)
    found: dict[int, TypeMeasurement] = {}
    kinds = [kind for kind in dict.fromkeys(request.kinds) if kind in WEIGHT_TYPES][:TYPES_MAX]
    steps = [(step, kind) for step in (_precision, _class, _rates) for kind in kinds]
    for done, (step, kind) in enumerate(steps):
        if step is not _precision and kind not in found:
            continue
        if progress is not None:
            progress(done, len(steps), f"{step.__name__[1:]} of {GGML_TYPES[kind].name}")
        try:
            found[kind] = step(backend, kind, request, clock, found.get(kind, TypeMeasurement()))
        except UnsupportedModel:
            found.pop(kind, None)
        except _OutOfTimeError:
            found.setdefault(kind, TypeMeasurement())
    if progress is not None:
        progress(len(steps), len(steps), "done")
    types = {GGML_TYPES[kind].name: found[kind] for kind in kinds if kind in found}
    return BackendMeasurement(backend.name, "", request.n_in, request.n_ff, 0, types, not clock.late)


@contextmanager
def _loaded(backend: ExpertBackend, probe: ProbeLayer) -> Iterator[int]:
    """The number of the probe's layer while the backend holds it."""
    number = probe.layer.layer
    backend.load_layer(probe.layer, probe.program, probe.experts, probe.read)
    try:
        yield number
    finally:
        backend.unload_layer(number)


# -- precision --------------------------------------------------------------------------------------------------------


def measure_precision(
    backend: ExpertBackend,
    kind: int,
    widths: Sequence[int],
    *,
    ask_f32: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> Verdict:
    """The worst verdict over batch widths for one weight type. Where `tick` raises, nothing good is said of the rest.

    Raises:
        UnsupportedModel: the backend does not know the weight type.
    """
    probe, weight = even_layer(kind, PROBE_WIDTH, _PROBE_OUTPUTS, 2)
    verdicts = []
    with _loaded(backend, probe) as layer:
        try:
            for width in widths:
                tick()
                verdicts.append(_verdict_at(backend, layer, weight, width, ask_f32))
        except _OutOfTimeError:
            verdicts.append(Verdict())
    return Verdict.worst(verdicts)


def _verdict_at(backend: ExpertBackend, layer: int, weight: float, width: int, ask_f32: bool) -> Verdict:
    """All of the probe's rows in batches of exactly `width` rows, spread over two experts."""
    rows = probe_rows()
    batch, shares = np.arange(width), dict.fromkeys((row.name for row in rows), 1.0)
    for start in range(0, len(rows), width):
        which = (start + batch) % len(rows)
        x = np.stack([rows[i].x for i in which])
        y = backend.compute(layer, x, batch.astype(np.int32), (batch % 2).astype(np.int32), ask_f32=ask_f32)
        for i in np.unique(which):
            share = kept(rows[i], y[which == i], weight)
            shares[rows[i].name] = max(shares[rows[i].name], share, key=lambda value: abs(value - 1))
    return judge(shares)


def _precision(
    backend: ExpertBackend, kind: int, request: Request, clock: _Clock, before: TypeMeasurement
) -> TypeMeasurement:
    default, asked = (
        measure_precision(backend, kind, BATCH_WIDTHS, ask_f32=ask, tick=clock.tick) for ask in (False, True)
    )
    return replace(
        before,
        accumulation=MeasuredPrecision(request.accumulation, default.accumulation, asked.accumulation),
        source=MeasuredPrecision(request.source, default.source, asked.source),
    )


# -- classes and rates ------------------------------------------------------------------------------------------------


def measure_class(
    backend: ExpertBackend, kind: int, request: Request, tick: Callable[[], None] = lambda: None
) -> Fingerprint:
    """The numeric class for one weight type, of the request's widths and units. `tick` may raise.

    Raises:
        UnsupportedModel: the backend does not know the weight type.
    """
    steps = list(_steps(backend, kind, request, tick))
    probe = noise_layer(kind, request.n_in, _narrowed(kind, request), 2)
    with _loaded(backend, probe):
        return fingerprint(backend, probe, tick, steps)


def _steps(backend: ExpertBackend, kind: int, request: Request, tick: Callable[[], None]) -> Iterator[Step]:
    """The steps of an expert by themselves: both products at their full lengths, and the units between them."""
    for length in dict.fromkeys((request.n_in, request.n_ff)):
        product = product_layer(kind, length, _PROBE_OUTPUTS, 2)
        with _loaded(backend, product):
            yield step_of_product(backend, product, tick)
    width = request.n_ff if request.n_ff <= _UNIT_WIDTH else _UNIT_WIDTH + request.n_ff % _VECTOR
    for unit in request.units:
        probe = unit_layer(unit, max(2, width))
        try:
            with _loaded(backend, probe):
                yield step_of_unit(backend, probe, tick)
        except UnsupportedModel:  # it has no such unit, or no weights in F32
            yield Step(f"{unit}", b"")


def _class(
    backend: ExpertBackend, kind: int, request: Request, clock: _Clock, before: TypeMeasurement
) -> TypeMeasurement:
    found = measure_class(backend, kind, request, clock.tick)
    return replace(
        before,
        numeric_class=found.numeric_class,
        batch_invariant=found.batch_invariant,
        repeatable=found.repeatable,
    )


def _rates(
    backend: ExpertBackend, kind: int, request: Request, clock: _Clock, before: TypeMeasurement
) -> TypeMeasurement:
    """Rows a second of experts as wide as asked for: a narrower one takes as much less time."""
    n_ff = _narrowed(kind, request)
    n_expert = min(_RATE_EXPERTS_MAX, max(2, RATE_BYTES // _expert_bytes(kind, request.n_in, n_ff)))
    probe = noise_layer(kind, request.n_in, n_ff, n_expert, distinct=1)
    x = rows_on_ties(RATE_ROWS, probe.layer.n_in)
    rows = np.arange(RATE_ROWS, dtype=np.int32)

    def seconds_a_call(compute: Callable[[int], object]) -> float:
        compute(0)  # builds what is built once
        started, calls = clock.now(), 0
        while calls < 2 or clock.now() - started < RATE_S:
            clock.tick()
            compute(calls)
            calls += 1
        return max(clock.now() - started, 1e-9) / calls

    with _loaded(backend, probe) as layer:
        one = seconds_a_call(lambda call: backend.compute(layer, x[:1], rows[:1], rows[:1] * 0 + call % n_expert))
        many = seconds_a_call(lambda call: backend.compute(layer, x, rows, rows % n_expert))
    width = n_ff / request.n_ff
    return replace(before, rows_per_s=width / one, batch_rows_per_s=width * RATE_ROWS / many)


def _expert_bytes(kind: int, n_in: int, n_ff: int) -> int:
    known = GGML_TYPES[kind]
    return 3 * n_in * n_ff // known.block * known.nbytes


def _narrowed(kind: int, request: Request) -> int:
    """n_ff, or less where two experts would be too large: the same on every machine for the same request."""
    n_ff = request.n_ff
    while n_ff > SUPER_BLOCK and 2 * _expert_bytes(kind, request.n_in, n_ff) > FINGERPRINT_BYTES_MAX:
        n_ff = max(SUPER_BLOCK, n_ff // 2 // SUPER_BLOCK * SUPER_BLOCK)
    return n_ff


# -- memory -----------------------------------------------------------------------------------------------------------


def usable_memory(device: Device) -> int:
    """Bytes that experts on this device could take now: what the device has free, or this machine within its cgroup."""
    if not device.info.is_cpu:
        return next((info.free_bytes for info in list_devices() if info.name == device.info.name), 0)
    return int(min(psutil.virtual_memory().available, _cgroup_room(Path("/sys/fs/cgroup"))))


def _cgroup_room(folder: Path) -> float:
    """What a memory limit of version 2 leaves to this container; infinite where there is none."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return float("inf") if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return float("inf")
