"""The level op: single operators on the same rows and weights, the worst over batch widths.

A product is compared for every weight type and several lengths of its sums. Beside the pair's own difference stands how
far each side is from the exact product and from one whose activations were rounded as ggml's CPU kernels round them:
most of a CPU's distance to exact arithmetic is those eight bits. Each side must be near one of the two by itself, so
that the rounding of one side hides nothing of the other. Where a side can be computed with one thing switched,
the switch that takes most of the difference away names its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from backends.experts import F32, ExpertBackend
from backends.gguf_types import GGML_TYPES
from backends.measure import measure_precision
from backends.probe_weights import WEIGHT_TYPES, ProbeLayer, gated_layer, product_layer
from capabilities.equivalence import Difference, difference, worst
from capabilities.errors import UnsupportedModel
from capabilities.precision import Precision, Verdict
from capabilities.tolerances import RowLimits, element_limits, product_limits, row_limits
from swarmnode.equivalence.targets import EXACT, ROUNDED, Target, find_target

Progress = Callable[[str, int, int], None]

WIDTHS: Final = (1, 2, 5, 9, 33, 128, 512)  # of batches: on both sides of the limits at which kernels change
LENGTHS: Final = (256, 2048, 8192)  # of sums: a head's, a model's width, a wide feed-forward block's
TYPES: Final = ("f32", "f16", "bf16", "q4_0", "q4_1", "q8_0", "q4_K", "q6_K")  # where no model says which
ROW_WIDTHS: Final = (256, 4096)  # of softmax and norms
GATED_WIDTH: Final = 256
ROWS_MIN: Final = 32  # that a median is taken of, at any batch width
CAUSE_SHARE: Final = 0.5  # a switch is the cause if it leaves less than this of the difference
_PRECISION_WIDTHS: Final = (1, 33, 512)
_OUTPUTS: Final = 64
_EXPERTS: Final = 2
_SEED: Final = 4


@dataclass(frozen=True, slots=True)
class Sizes:
    """Weight types by ggml's names, lengths of sums, batch widths."""

    types: tuple[str, ...] = TYPES
    lengths: tuple[int, ...] = LENGTHS
    widths: tuple[int, ...] = WIDTHS


def op_level(a: Target, b: Target, sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Compare two targets. `ops` of the result has a row for each operator; what a side cannot do is in `skipped`.

    Raises:
        UnsupportedModel: no weight type is known to both.
    """
    numbers = [kind for kind in WEIGHT_TYPES if GGML_TYPES[kind].name in sizes.types]
    rows: list[dict[str, Any]] = []
    skipped: list[str] = []
    for done, kind in enumerate(numbers):
        progress(f"op: products of {GGML_TYPES[kind].name}", done, len(numbers) + 1)
        try:
            rows += _products(a, b, kind, sizes)
        except UnsupportedModel as error:
            skipped.append(f"matmul {GGML_TYPES[kind].name}: {error.message}")
    if not rows:
        raise UnsupportedModel(f"{a.name} and {b.name} share no weight type: {'; '.join(skipped)}")
    progress("op: single values and rows", len(numbers), len(numbers) + 1)
    rows.append(_gated(a, b, sizes))
    if a.rows is not None and b.rows is not None:
        rows += _rows(a, b, sizes)
    else:
        skipped.append("softmax, rms_norm: a backend of experts alone computes neither")
    failed = [row for row in rows if not row["pass"]]
    return {
        "level": "op",
        "pass": not failed,
        "tolerance": "in each row: it grows with the length of the sums and with what activations are rounded to",
        "reason": _reason(failed[0]) if failed else None,
        "ops": rows,
        "skipped": skipped,
    }


def _reason(row: Mapping[str, Any]) -> str:
    what = f"{' '.join(str(row[key]) for key in ('op', 'type') if row[key])} over {row['length']} values"
    for which in ("median", "worst"):
        found, limit = row[f"{which}_relative_l2"], row["tolerance"][f"{which}_relative_l2"]
        if found > limit:
            return f"{what}: the {which} row is off by {found:.2g}, with a limit of {limit:.2g}"
    alone = next(side for side, fine in row["alone"].items() if not fine)
    nearest = min(row["to_exact"][alone], row["to_rounded"][alone])
    return f"{what}: {alone.upper()} is {nearest:.2g} away from the nearest reference, more than its rounding explains"


# -- products ---------------------------------------------------------------------------------------------------------


def _products(a: Target, b: Target, kind: int, sizes: Sizes) -> Iterator[dict[str, Any]]:
    sides = [("a", a), ("b", b)]
    measured = {side: _precision(target, kind) for side, target in sides}
    weights = GGML_TYPES[kind]
    for length in sizes.lengths:
        probe = product_layer(kind, length, _OUTPUTS, _EXPERTS)
        terms = probe.layer.n_in
        of_a, of_b = (_outputs(target, probe, sizes.widths) for target in (a, b))
        known = {a.name: of_a, b.name: of_b}

        def outputs_of(target: Target, known: dict[str, list[F32]] = known, probe: ProbeLayer = probe) -> list[F32]:
            if target.name not in known:
                known[target.name] = _outputs(target, probe, sizes.widths)
            return known[target.name]

        exact, rounded = outputs_of(find_target(EXACT)), outputs_of(find_target(ROUNDED))
        limits = product_limits(weights.name, weights.block, terms, measured["a"].source, measured["b"].source)
        row = _row("matmul", weights.name, terms, of_a, of_b, limits)
        row["measured"] = {side: asdict(verdict) for side, verdict in measured.items()}
        row |= {"to_exact": {}, "to_rounded": {}, "alone": {}}
        for side, outputs in (("a", of_a), ("b", of_b)):
            source = measured[side].source
            to_exact, to_rounded = _difference(exact, outputs), _difference(rounded, outputs)
            row["to_exact"][side], row["to_rounded"][side] = to_exact.relative_l2, to_rounded.relative_l2
            row["alone"][side] = to_rounded.within(
                product_limits(weights.name, weights.block, terms, source, source)
            ) or to_exact.within(product_limits(weights.name, weights.block, terms, source, Precision.F32))
        row["pass"] = row["pass"] and all(row["alone"].values())
        row["causes"], row["cause"] = _causes(a, b, outputs_of)
        yield row


def _precision(target: Target, kind: int) -> Verdict:
    backend = target.make()
    try:
        return measure_precision(backend, kind, _PRECISION_WIDTHS)
    finally:
        backend.close()


def _causes(a: Target, b: Target, outputs_of: Callable[[Target], list[F32]]) -> tuple[list[dict[str, Any]], str | None]:
    """What is left of the difference with one thing switched, and the switch that leaves least, if little enough."""
    of_a, of_b = outputs_of(a), outputs_of(b)
    before = _apart(of_a, of_b)
    found: list[dict[str, Any]] = [
        {"cause": cause, "side": side, "relative_l2": _apart(outputs_of(switched), other)}
        for side, target, other in (("a", a, of_b), ("b", b, of_a))
        for cause, switched in target.switches.items()
    ]
    best = min(found, key=lambda row: row["relative_l2"], default=None)
    named = best is not None and before > 0 and best["relative_l2"] < CAUSE_SHARE * before
    return found, best["cause"] if best is not None and named else None


def _outputs(target: Target, probe: ProbeLayer, widths: Sequence[int]) -> list[F32]:
    """One result for each batch width: rows [width or more, n_out], spread over the probe's experts."""
    x = _noise(max(widths), probe.layer.n_in)
    number, tokens = probe.layer.layer, np.arange(len(x), dtype=np.int32)
    with _holding(target, probe) as backend:
        return [
            _in_batches(x, n, lambda rows: backend.compute(number, rows, tokens[: len(rows)], tokens[: len(rows)] % 2))
            for n in widths
        ]


def _noise(rows: int, width: int) -> F32:
    return np.random.default_rng(_SEED).standard_normal((max(rows, ROWS_MIN), width), np.float32)


def _in_batches(x: F32, width: int, compute: Callable[[F32], F32]) -> F32:
    """ROWS_MIN rows or more in batches of exactly `width`: a median of one row would say little."""
    starts = range(0, max(width, ROWS_MIN // width * width), width)
    return np.concatenate([compute(x[start : start + width]) for start in starts])


@contextmanager
def _holding(target: Target, probe: ProbeLayer) -> Iterator[ExpertBackend]:
    with ExitStack() as stack:
        backend = target.make()
        stack.callback(backend.close)
        backend.load_layer(probe.layer, probe.program, probe.experts, probe.read)
        yield backend


def _difference(a: Sequence[F32], b: Sequence[F32]) -> Difference:
    return worst([difference(one, other) for one, other in zip(a, b, strict=True)])


def _apart(a: Sequence[F32], b: Sequence[F32]) -> float:
    return _difference(a, b).relative_l2


def _row(
    op: str, kind: str | None, length: int, of_a: Sequence[F32], of_b: Sequence[F32], limits: RowLimits
) -> dict[str, Any]:
    found = _difference(of_a, of_b)
    return {
        "op": op,
        "type": kind,
        "length": length,
        "pass": found.within(limits),
        "tolerance": asdict(limits),
        **asdict(found),
    }


# -- what has no weights ----------------------------------------------------------------------------------------------


def _gated(a: Target, b: Target, sizes: Sizes) -> dict[str, Any]:
    probe = gated_layer(GATED_WIDTH, _EXPERTS)
    of_a, of_b = (_outputs(target, probe, sizes.widths) for target in (a, b))
    return _row("swiglu", None, GATED_WIDTH, of_a, of_b, element_limits())


def _rows(a: Target, b: Target, sizes: Sizes) -> Iterator[dict[str, Any]]:
    assert a.rows is not None
    assert b.rows is not None
    for width in ROW_WIDTHS:
        x = 3 * _noise(max(sizes.widths), width)
        for op, one, other in (
            ("softmax", a.rows.softmax, b.rows.softmax),
            ("rms_norm", a.rows.rms_norm, b.rows.rms_norm),
        ):
            results = [[_in_batches(x, n, compute) for n in sizes.widths] for compute in (one, other)]
            yield _row(op, None, width, results[0], results[1], row_limits(width))
