"""Two backends set against each other: figures and verdicts, without any computing of their own.

Six levels (docs/equivalence.md): op, layer, logits, decisions, generation, task. What runs the kernels is elsewhere;
here are arrays in and numbers out, and limits come from `tolerances`. A is the side that is taken as given where a
figure needs one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from capabilities.agreement import compare
from capabilities.tolerances import (
    FLIP_NOISE_TIMES,
    KL_MEAN_LIMIT,
    LAYER_LIMIT,
    NOISE_TIMES,
    TOP1_AGREEMENT_MIN,
    RowLimits,
    above_noise,
    flips_beside_noise,
    flips_limit,
    residual_limit,
)

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]

LEVELS: Final = ("op", "layer", "logits", "decisions", "generation", "task")
_LARGEST: Final = float(np.finfo(np.float32).max)  # for what is not finite: JSON knows no infinity
TINY: Final = 1e-300  # instead of a norm of zero


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two results [rows, width] of the same work. `relative_l2` is over all of it, the others say of rows."""

    bit_identical: bool
    max_abs_diff: float
    relative_l2: float
    median_relative_l2: float
    worst_relative_l2: float
    min_cosine: float

    def within(self, limits: RowLimits) -> bool:
        return (
            self.median_relative_l2 <= limits.median_relative_l2 and self.worst_relative_l2 <= limits.worst_relative_l2
        )


def difference(a: F32, b: F32) -> Difference:
    """How far `b` is from `a`, both [R, width]."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        same = np.array_equal(a, b, equal_nan=True)
        far = 0.0 if same else _LARGEST
        return Difference(same, far, far, far, far, 1.0 if same else 0.0)
    found = compare(b, a)
    whole = float(np.linalg.norm(b.astype(np.float64) - a)) / max(float(np.linalg.norm(a.astype(np.float64))), TINY)
    return Difference(
        found.bit_identical,
        found.max_abs_diff,
        min(whole, _LARGEST),
        min(found.median_relative_l2, _LARGEST),
        min(found.worst_relative_l2, _LARGEST),
        found.min_cosine,
    )


def worst(found: Sequence[Difference]) -> Difference:
    """The worst of each figure."""
    return Difference(
        all(d.bit_identical for d in found),
        max(d.max_abs_diff for d in found),
        max(d.relative_l2 for d in found),
        max(d.median_relative_l2 for d in found),
        max(d.worst_relative_l2 for d in found),
        min(d.min_cosine for d in found),
    )


def verdict(level: str, fine: str, *faults: str | None) -> dict[str, Any]:
    """Passed if there is no fault; else the first one is the reason. `fine`: what is said where there is none."""
    fault = next((fault for fault in faults if fault is not None), None)
    return {"level": level, "pass": fault is None, "reason": fault or fine}


# -- layers -----------------------------------------------------------------------------------------------------------


def growth_exponent(drift: Sequence[float]) -> float | None:
    """p where drift grows as depth^p, by least squares of the logarithms; None without three layers that differ.

    Errors that know nothing of each other give 1/2, such as add up in step give 1.
    """
    points = [(math.log(depth), math.log(value)) for depth, value in enumerate(drift, 1) if value > 0]
    if len(points) < 3:
        return None
    x, y = np.array(points).T
    return float(np.polyfit(x, y, 1)[0])


def layer_level(pinned: Sequence[float], floor: Sequence[float], layers: Sequence[int]) -> dict[str, Any]:
    """The verdict on relative drifts of the residual after each of `layers`, routing pinned, beside llama.cpp's own."""
    limits = [above_noise(residual_limit(depth), noise) for depth, noise in enumerate(floor, 1)]
    rows = list(zip(layers, pinned, limits, strict=True))
    over = next((row for row in rows if not row[1] <= row[2]), None)
    words = "after layer {} the residual is off by {:.2g}, with a limit of {:.2g}"
    fault = None if over is None else words.format(*over)
    layer, found, limit = max(rows, key=lambda row: row[1] / row[2])
    fine = f"{words.format(*rows[-1])}, and after layer {layer} it is nearest to one, at {found / limit:.0%}"
    return {
        **verdict("layer", fine, fault),
        "tolerance": {
            "text": f"{LAYER_LIMIT:g} times the root of the depth, or {NOISE_TIMES:g} times llama.cpp's own noise",
            "relative_l2": limits,
        },
        "first_beyond_limit": None if over is None else over[0],
    }


# -- logits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LogitRows:
    """Each position's figures, all [T]. Differences are of logits whose mean was taken away: a shift changes nothing.

    margins: from A's likeliest token to its runner-up. deviations: of the differences, over the vocabulary.
    """

    l_infinity: F64
    l2: F64
    kl: F64
    margins: F64
    deviations: F64
    top_a: I32
    top_b: I32

    @property
    def flips(self) -> NDArray[np.bool_]:
        return np.not_equal(self.top_a, self.top_b)

    @staticmethod
    def join(parts: Sequence[LogitRows]) -> LogitRows:
        return LogitRows(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(LogitRows)))


def log_softmax(logits: F32) -> F64:
    """Logarithms of probabilities [T, V]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    out: F64 = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return out


def logit_rows(a: F32, b: F32) -> LogitRows:
    """Figures of logits a and b [T, V]. L2 is relative to A's."""
    centred_a, centred_b = (v.astype(np.float64) - v.mean(axis=1, keepdims=True, dtype=np.float64) for v in (a, b))
    apart = centred_b - centred_a
    log_a, log_b = log_softmax(a), log_softmax(b)
    two = np.partition(a, -2, axis=1)[:, -2:].astype(np.float64)
    norms = np.maximum(np.linalg.norm(centred_a, axis=1), TINY)
    return LogitRows(
        np.abs(apart).max(axis=1),
        np.linalg.norm(apart, axis=1) / norms,
        np.maximum((np.exp(log_a) * (log_a - log_b)).sum(axis=1), 0.0),
        two[:, 1] - two[:, 0],
        apart.std(axis=1),
        a.argmax(axis=1).astype(np.int32),
        b.argmax(axis=1).astype(np.int32),
    )


def logits_level(rows: LogitRows, floor: LogitRows) -> dict[str, Any]:
    limit = above_noise(KL_MEAN_LIMIT, float(floor.kl.mean()))
    mean = float(rows.kl.mean())
    words = f"a mean KL of {mean:.2g}, with a limit of {limit:.2g}"
    return {
        **verdict("logits", words, None if mean <= limit else words),  # a fault also where it is no number
        "tolerance": {
            "text": f"a mean KL of {KL_MEAN_LIMIT:g}, or of {NOISE_TIMES:g} times llama.cpp's own noise",
            "kl_mean": limit,
        },
        **logit_figures(rows),
        "noise_floor": logit_figures(floor),
    }


def logit_figures(rows: LogitRows) -> dict[str, Any]:
    return {
        "positions": len(rows.kl),
        "l_infinity": number(rows.l_infinity.max()),
        "l2_median": number(np.median(rows.l2)),
        "l2_max": number(rows.l2.max()),
        "kl_mean": number(rows.kl.mean()),
        "kl_max": number(rows.kl.max()),
    }


# -- decisions --------------------------------------------------------------------------------------------------------


def predicted_flips(margins: F64, deviations: F64) -> float:
    """Flips to expect if each position's two likeliest logits moved by chance, by what the others moved."""
    reach = np.maximum(deviations * 2, TINY)  # sqrt(2) for two logits, and sqrt(2) of the error function
    return float(sum(0.5 * math.erfc(x) for x in (margins / reach).tolist()))


@dataclass(frozen=True, slots=True)
class FlipLimits:
    """On what flips by chance: by what was predicted from the pair's own movement, and beside llama.cpp's own noise."""

    positions: int
    predicted: float
    as_predicted: float
    beside_noise: int

    @staticmethod
    def of(predicted: float, positions: int, noise_flips: int, noise_positions: int) -> FlipLimits:
        beside = flips_beside_noise(positions, noise_flips, noise_positions)
        return FlipLimits(positions, predicted, flips_limit(predicted), beside)

    @property
    def lower(self) -> float:
        return min(self.as_predicted, self.beside_noise)

    def words(self, what: str) -> str:
        """what: can flip."""
        return (
            f"where {self.as_predicted:.1f} may be by the {self.predicted:.1f} that were predicted, and "
            f"{self.beside_noise} of {self.positions} {what} by llama.cpp's own noise"
        )

    def text(self, what: str) -> str:
        return (
            f"no more {what} than the margins predict, nor than go with {FLIP_NOISE_TIMES:g} times llama.cpp's own, "
            "each with what chance adds"
        )


def decisions_level(
    rows: LogitRows, routing: Sequence[RoutingChange], floor: LogitRows, floor_routing: Sequence[RoutingChange]
) -> dict[str, Any]:
    """Top-1 tokens, and what the routers chose."""
    figures, of_floor = flip_figures(rows), flip_figures(floor)
    through = int((rows.flips & (rows.margins > 2 * rows.l_infinity)).sum())
    limits = FlipLimits.of(figures["flips_predicted"], len(rows.flips), of_floor["flips"], len(floor.flips))
    least = 1 - above_noise(1 - TOP1_AGREEMENT_MIN, 1 - of_floor["top1_agreement"])
    agreement, flips = figures["top1_agreement"], figures["flips"]
    words = f"{flips} flips, {limits.words('tokens')}"
    return {
        **verdict(
            "decisions",
            f"{words}, none through the gate; {agreement:.1%} of the tokens agree, and {least:.1%} must",
            f"{through} tokens flipped whose margin exceeds twice L-infinity" if through else None,
            words if flips > limits.lower else None,
            f"only {agreement:.1%} of the tokens agree, not {least:.1%}" if agreement < least else None,
        ),
        "tolerance": {
            "text": f"no flip through the gate; {limits.text('flips')}; {least:.1%} of the tokens agree",
            "flips_through_the_gate": 0,
            "flips": limits.lower,
            "flips_beside_noise": limits.beside_noise,
            "top1_agreement": least,
        },
        **figures,
        "flips_through_the_gate": through,
        "positions_below_the_gate": int((rows.margins <= 2 * rows.l_infinity).sum()),
        "margin_quantiles": [number(q) for q in np.quantile(rows.margins, (0.01, 0.1, 0.5))],
        "margin_histogram": margin_histogram(rows),
        "routing": routing_figures(routing),
        "noise_floor": {**of_floor, "routing": routing_figures(floor_routing)},
    }


def margin_histogram(rows: LogitRows, bins: int = 24) -> dict[str, Any]:
    """Positions by A's margin, and how many of each bin flipped."""
    edges = np.linspace(0, max(float(np.quantile(rows.margins, 0.99)), TINY), bins + 1)
    within = np.minimum(rows.margins, edges[-1])
    counts, flipped = (np.histogram(values, edges)[0].tolist() for values in (within, within[rows.flips]))
    return {"edges": edges.tolist(), "counts": counts, "flipped": flipped}


def flip_figures(rows: LogitRows) -> dict[str, Any]:
    flips = int(rows.flips.sum())
    return {
        "positions": len(rows.flips),
        "top1_agreement": 1 - flips / len(rows.flips),
        "flips": flips,
        "flips_predicted": predicted_flips(rows.margins, rows.deviations),
    }


@dataclass(frozen=True, slots=True)
class RoutingChange:
    """One layer's choices by both sides. `first`: the first token whose set differs and the two sets, or None."""

    layer: int
    tokens: int
    sets_changed: int
    experts_changed: int
    experts: int
    first_changed: int
    first: tuple[int, tuple[int, ...], tuple[int, ...]] | None


def routing_change(layer: int, a: I32, b: I32) -> RoutingChange:
    """Compare chosen experts [T, K], the likeliest first."""
    sets = np.sort(a, axis=1), np.sort(b, axis=1)
    changed = np.flatnonzero((sets[0] != sets[1]).any(axis=1))
    lost = sum(len(set(a[t].tolist()) - set(b[t].tolist())) for t in changed)
    first = None
    if len(changed):
        token = int(changed[0])
        first = token, tuple(sets[0][token].tolist()), tuple(sets[1][token].tolist())
    return RoutingChange(layer, len(a), len(changed), lost, a.size, int((a[:, 0] != b[:, 0]).sum()), first)


def routing_figures(changes: Sequence[RoutingChange]) -> dict[str, Any]:
    """How often the sets, single experts, and the likeliest expert differ, and where they do first."""
    tokens = max(sum(c.tokens for c in changes), 1)
    experts = max(sum(c.experts for c in changes), 1)
    first = next((c for c in changes if c.first is not None), None)
    named = None
    if first is not None and first.first is not None:
        token, of_a, of_b = first.first
        named = {"layer": first.layer, "token": token, "experts_a": list(of_a), "experts_b": list(of_b)}
    return {
        "choices": sum(c.tokens for c in changes),
        "sets_changed": sum(c.sets_changed for c in changes) / tokens,
        "experts_changed": sum(c.experts_changed for c in changes) / experts,
        "top1_changed": sum(c.first_changed for c in changes) / tokens,
        "first": named,
    }


# -- for every level --------------------------------------------------------------------------------------------------


def number(value: Any) -> float:
    """A float that JSON knows."""
    return float(np.nan_to_num(float(value), nan=_LARGEST, posinf=_LARGEST, neginf=-_LARGEST))
