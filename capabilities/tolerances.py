"""How far apart two backends may be, level by level: the one place where such limits stand, with their reasons.

Nothing here asks what a backend declares. A limit grows with the length of a sum, because single precision rounds once
for each term, and with what the two kernels' own products *show* that they round activations to, batch width by batch
width (swarmnode/equivalence/roundings.py). Half-precision sums buy nothing: they are what a limit is there to catch.
Where both round activations alike, all but a few rows must agree as exact kernels do; a few may hold an 8-bit code that
fell on the other side of a tie.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from capabilities.precision import Precision

# -- op ---------------------------------------------------------------------------------------------------------------

# A sum of n products in single precision, added in any sensible order, is off by less than sqrt(n) halves of the last
# bit. Measured over ten weight types and sums of 256 to 8192 terms: at most a tenth of this.
SUM_ROUNDINGS: Final = 8.0
_HALF_LAST_BIT: Final = 2.0**-24
# exp, and a few products and quotients around it: a handful of last bits, whatever the row's width.
ELEMENT_LIMIT: Final = 4e-6
_GATED_PRODUCTS: Final = 3
# One activation rounded to n bits of mantissa errs evenly within half a last bit; the root of the mean square follows.
_ROOT_12: Final = math.sqrt(12)
_LEVELS: Final = 127
# The largest of so many values drawn from a normal distribution, over their root mean square.
_PEAK_OF_BLOCK: Final = {32: 2.13, 256: 2.87}
_PEAK_OF_ROW: Final = 4.0
# Over what theory says of the median row, and for the worst row over the median one.
_ROOM: Final = 2.0
_WORST_OVER_MEDIAN: Final = 4.0
_FLIPPED_CODES: Final = 2  # ties that fall the other way in one row
# Weights with an offset in each block of 32: their kernels keep each block's sum of activations in half precision.
HALF_SUMS: Final = frozenset(("q4_1", "q5_1"))

# -- layer ------------------------------------------------------------------------------------------------------------

# The residual's relative difference after one layer: what an expert alone is off by where one side rounds activations
# to 8 bits and the other does not. Later layers' errors know little of it, so the limit grows with the root of their
# number: errors that add up in step leave the band.
LAYER_LIMIT: Final = 1.5e-2

# -- logits, decisions, generation, task ------------------------------------------------------------------------------

# Even an honest kernel flips 8-bit codes of the trunk's next layers, so that whole models of one arithmetic already
# part: means of 2.0e-3 to 3.6e-3 were measured between x86 and ARM kernels of the demo model.
KL_MEAN_LIMIT: Final = 1e-2
# Of the tokens that a text's positions would be continued with.
TOP1_AGREEMENT_MIN: Final = 0.95
# Flips happen by chance: those that were counted may exceed those that were predicted by so many deviations, and two.
FLIP_DEVIATIONS: Final = 4.0
FLIPS_FREE: Final = 2.0
# A model that parts from another predicts its own flips, however far it is off. So they are also held against those of
# llama.cpp with itself: half as many again may be due. Flips go with how far logits move, and no honest kernels moved
# those of the demo model by more than a twentieth more than `fast` does.
FLIP_NOISE_TIMES: Final = 1.5
# How likely a pair for which just so many are due is to fail by chance; one that does no more than `fast` far less.
FLIP_ERROR: Final = 1e-3
# Mean difference of negative log-likelihood in nats a token: a hundredth changes a perplexity by one percent. Beyond
# that it must also stand out of its own noise.
NLL_MEAN_LIMIT: Final = 1e-2
NLL_DEVIATIONS: Final = 3.0
# Tokens of a text that such a difference is to be known over: it then has a standard error of 0.0004 nats. Fewer are a
# quick look, which is said wherever the figure stands.
TEXT_TOKENS: Final = 50_000
# Of the likelihoods of a question's answers against each other, in nats: what KL_MEAN_LIMIT allows one token's, since a
# small KL is half of their variance.
OPTIONS_SPREAD_LIMIT: Final = math.sqrt(2 * KL_MEAN_LIMIT)
# Whatever the limits of these levels and of the residual: a model may part from itself by more, merely by llama.cpp's
# other choice of kernels (a tiny model of random weights does). So many times its own noise is allowed.
NOISE_TIMES: Final = 3.0


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Limits on the relative L2 of rows: of the median one, and of the worst."""

    median_relative_l2: float
    worst_relative_l2: float


def sum_limit(terms: int) -> float:
    """Relative error of sums of so many terms in single precision."""
    return SUM_ROUNDINGS * _HALF_LAST_BIT * math.sqrt(terms)


def rounding_error(source: Precision, block: int) -> float:
    """Relative error of a product whose activations are rounded to `source`, 8-bit ones in blocks of so many values."""
    match source:
        case Precision.F16:
            return 2.0**-11 * _UNIFORM
        case Precision.BF16:
            return 2.0**-8 * _UNIFORM
        case Precision.Q8:
            return _PEAK_OF_BLOCK[256 if block == 256 else 32] / _LEVELS / _ROOT_12
        case _:
            return 0.0  # exact, or not known: then it buys nothing


_UNIFORM: Final = 2 / _ROOT_12  # of an error that is even over +-1


def product_limits(
    weights: str, block: int, terms: int, source_a: Precision, source_b: Precision, *, alike: bool = True
) -> RowLimits:
    """Limits for products over so many terms.

    weights: ggml's name of their type, which has blocks of `block` values. source_a, source_b: what each side shows
    that it rounds activations to. alike: both in one way, if to one precision.
    """
    exact = sum_limit(terms)
    if weights in HALF_SUMS and Precision.Q8 in (source_a, source_b):
        exact += rounding_error(Precision.F16, block)
    if source_a == source_b and alike:
        step = {Precision.Q8: 1 / _LEVELS, Precision.BF16: 2.0**-7, Precision.F16: 2.0**-10}.get(source_a, 0.0)
        flips = _FLIPPED_CODES * _PEAK_OF_ROW * step / math.sqrt(terms)
        return RowLimits(exact, _WORST_OVER_MEDIAN * exact + flips)
    median = _ROOM * math.hypot(rounding_error(source_a, block), rounding_error(source_b, block)) + exact
    return RowLimits(median, _WORST_OVER_MEDIAN * median)


def gated_limits(source_a: Precision = Precision.F32, source_b: Precision = Precision.F32) -> RowLimits:
    """Limits for a gated unit, which is computed value by value between products with weights of one in F32.

    source_a, source_b: what each side shows that it rounds activations to before such products. The unit's three values
    pass one each.
    """
    error = math.hypot(rounding_error(source_a, 1), rounding_error(source_b, 1))
    median = ELEMENT_LIMIT + _ROOM * math.sqrt(_GATED_PRODUCTS) * error
    return RowLimits(median, _WORST_OVER_MEDIAN * median)


def row_limits(width: int) -> RowLimits:
    """Limits for what adds up a row once, as softmax and a norm do."""
    median = ELEMENT_LIMIT + sum_limit(width)
    return RowLimits(median, _WORST_OVER_MEDIAN * median)


def residual_limit(depth: int) -> float:
    """Relative difference of the residual after so many layers."""
    return LAYER_LIMIT * math.sqrt(depth)


def above_noise(limit: float, noise: float) -> float:
    """A limit on a difference, where llama.cpp differs from itself by `noise`."""
    return max(limit, NOISE_TIMES * noise)


def flips_limit(predicted: float) -> float:
    """The most flips that go with so many predicted ones."""
    return predicted + FLIP_DEVIATIONS * math.sqrt(predicted) + FLIPS_FREE


def flips_beside_noise(positions: int, noise_flips: int, noise_positions: int) -> int:
    """The most flips of so many positions that go with those of llama.cpp with itself, at positions of the same kind.

    Flips that are due FLIP_NOISE_TIMES as often are, of all flips of both pairs, a binomial number. Where the noise has
    few, those go that leave TOP1_AGREEMENT_MIN. Both with an error of FLIP_ERROR.
    """
    due = FLIP_NOISE_TIMES * positions
    share = due / (due + noise_positions)
    return max(
        _last(positions, lambda flips: _at_least(flips, flips + noise_flips, share) >= FLIP_ERROR),
        _last(positions, lambda flips: _at_least(flips, positions, 1 - TOP1_AGREEMENT_MIN) >= FLIP_ERROR),
    )


def _last(highest: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `highest` that fits, where 0 does and no larger one does than one that does not."""
    return bisect_left(range(1, highest + 1), True, key=lambda number: not fits(number))


def _at_least(count: int, trials: int, share: float) -> float:
    """How likely so many trials are to succeed so often or more, where each succeeds with this probability."""
    if count <= trials * share:
        return 1.0  # more than a quarter: of no interest here
    log_odds = math.log(share) - math.log1p(-share)
    log_term = (
        math.lgamma(trials + 1) - math.lgamma(count + 1) - math.lgamma(trials - count + 1)
        + count * math.log(share) + (trials - count) * math.log1p(-share)
    )  # fmt: skip
    found = 0.0
    for successes in range(count, trials + 1):
        found += math.exp(log_term)
        if successes < trials:
            log_term += math.log(trials - successes) - math.log(successes + 1) + log_odds
    return found
