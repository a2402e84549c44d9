"""From one row of logits to one token, reproducibly.

The leader alone samples. Each draw takes one uniform number from a hash of (seed, choice, position), not from a
generator with a state: a token depends on its own position only, so a request that continues elsewhere, or beside other
requests, draws the same numbers. Everything that could vary is fixed: probabilities are float64, tokens stand in the
order of descending score, the lower id first on a tie, and the draw inverts the cumulative distribution in that order.

The steps come in llama.cpp's order (common/common.h, `common_params_sampling::samplers`): bias, penalties, top_k,
top_p, min_p, temperature. The filters therefore see the model's distribution at temperature 1.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from capabilities.errors import Internal, UsageError

TOP_K_MAX = 1_000_000  # above any vocabulary; an integer that fits everywhere
TEMPERATURE_MAX = 100.0  # the distribution is flat long before
PENALTY_MAX = 2.0  # the range that the OpenAI API documents
BIAS_MAX = 100.0  # likewise: 100 forces a token, -100 bans it
BIAS_ENTRIES_MAX = 1_024  # a request carries it, so it is bounded

# Sizes of the ranked prefix to try when the whole vocabulary competes: nearly always the first one reaches the draw,
# and ranking 256 of 150,000 tokens costs a tenth of sorting them all.
_PREFIX_SIZES = (256, 4_096, 65_536)


class NonFiniteLogits(Internal):
    """The trunk produced NaN or infinity: a fault of a kernel or of an expert's rows, never of the request."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token. Raises UsageError for a value outside its range. Defaults are llama.cpp's.

    temperature        0 = greedy (the filters, seed and draw do not matter then)
    top_k              keep the k best tokens; 0 = off
    top_p              keep the fewest tokens whose probabilities add up to top_p; 1 = off
    min_p              keep tokens with at least min_p times the best token's probability; 0 = off
    seed               uint64; whoever asks draws one if none was given
    frequency_penalty  subtracted from a token's logit for each time it was generated
    presence_penalty   subtracted once if it was generated at all
    logit_bias         token id -> number added to its logit
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, TEMPERATURE_MAX, " (0 is greedy)")
        _check_integer("top_k", self.top_k, 0, TOP_K_MAX, " (0 turns it off)")
        _check_number("top_p", self.top_p, 0.0, 1.0, " (1 turns it off)")
        _check_number("min_p", self.min_p, 0.0, 1.0, " (0 turns it off)")
        _check_integer("seed", self.seed, 0, 2**64 - 1)
        _check_number("frequency_penalty", self.frequency_penalty, -PENALTY_MAX, PENALTY_MAX)
        _check_number("presence_penalty", self.presence_penalty, -PENALTY_MAX, PENALTY_MAX)
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > BIAS_ENTRIES_MAX:
            message = f"logit_bias must map at most {BIAS_ENTRIES_MAX} token ids to numbers"
            raise UsageError(message, parameter="logit_bias")
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias", token, 0, 2**31 - 1, what="a token id in logit_bias")
            _check_number("logit_bias", bias, -BIAS_MAX, BIAS_MAX, what=f"logit_bias of token {token}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def penalises(self) -> bool:
        """Whether `sample` needs the history."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token, and its natural-log probability under the model's own distribution (no filter, no temperature).

    top  the likeliest tokens under it, with theirs, as many as were asked for; the lower id first on a tie
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, choice: int, position: int) -> float:
    """The uniform number in [0, 1) of one position of one choice (an answer among several to the same prompt).

    The first 53 bits of BLAKE2b-64, personalised b"swarmnode/draw", over the three as little-endian uint64.
    """
    digest = blake2b(struct.pack("<QQQ", seed, choice, position), digest_size=8, person=b"swarmnode/draw").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits: NDArray[np.float32],
    params: SamplingParams,
    position: int,
    choice: int = 0,
    history: Sequence[int] = (),
    allowed: NDArray[np.bool_] | None = None,
    top: int | None = None,
) -> Sampled:
    """Choose the token at `position` (the number of tokens before it, prompt included).

    logits: float32 [n_vocab], left as they are. history: the tokens generated so far, read only if a penalty is set.
    allowed: bool [n_vocab], where some tokens are out of the question. top: how many of the likeliest to tell; None:
    none, and `logprob` only to float32's precision. Raises NonFiniteLogits, and UsageError if logit_bias names a token
    outside the vocabulary.
    """
    _require_finite(logits)
    scores = _adjust(logits, params, history)
    if allowed is not None:
        scores = np.where(allowed, scores, np.float32(-np.inf))
    if params.temperature == 0:
        token = int(np.argmax(scores))  # the first maximum: the lowest id
    else:
        token = _draw(scores, params, uniform(params.seed, choice, position))
    if top is None:
        return Sampled(token, _logprob(logits, token))
    return _with_logprobs(logits, token, top)


def _draw(scores: NDArray[np.float32], params: SamplingParams, u: float) -> int:
    ranking = _Ranking(scores)
    kept = min(params.top_k or len(scores), len(scores))
    if params.top_p < 1:
        kept = ranking.reach(kept, params.top_p, 1.0, "left") + 1
    if params.min_p > 0:
        threshold = ranking.best_score + math.log(params.min_p)
        kept = min(kept, max(1, int(np.count_nonzero(scores >= threshold))))
    return ranking.token(ranking.reach(kept, u, params.temperature, "right"))


class _Ranking:
    """Tokens by descending score, lower id first on a tie, sorted only as far as somebody asks."""

    def __init__(self, scores: NDArray[np.float32]) -> None:
        self._scores = scores
        self.best_score = float(scores.max())
        self._order = np.empty(0, dtype=np.int64)

    def token(self, rank: int) -> int:
        return int(self.first(rank + 1)[rank])

    def reach(self, kept: int, share: float, temperature: float, side: Literal["left", "right"]) -> int:
        """The first rank of the best `kept` whose summed weights reach ("left") or pass ("right") that share of all."""
        whole = kept == len(self._scores)
        sizes = [size for size in _PREFIX_SIZES if size < kept] if whole else []
        total = float(self._weights(self._scores, temperature).sum()) if whole else None
        for size in (*sizes, kept):
            sums = self._weights(self._scores[self.first(size)], temperature).cumsum()
            target = share * (float(sums[-1]) if total is None else total)
            rank = int(np.searchsorted(sums, target, side))
            if rank < size:
                return rank
        return int(np.searchsorted(sums, sums[-1], "left"))  # rounding left the share unreached: the last with weight

    def first(self, count: int) -> NDArray[np.int64]:
        """The best `count` tokens, int64 [count]."""
        if len(self._order) < count:
            cut = len(self._scores) - count
            good = np.flatnonzero(self._scores >= np.partition(self._scores, cut)[cut])  # more, if scores tie there
            # One integer a token that sorts as wanted: the score's bits, mapped so that higher is smaller, over the id.
            bits = (self._scores[good] + np.float32(0)).view(np.uint32)  # adding zero turns -0 into 0: they are a tie
            falling = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
            keys = np.sort((falling << np.uint64(32)) | good.astype(np.uint64))
            self._order = (keys[:count] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return self._order[:count]

    def _weights(self, scores: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
        with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the best to exp(-inf) = 0
            weights: NDArray[np.float64] = np.exp((scores.astype(np.float64) - self.best_score) / temperature)
        return weights


def _adjust(logits: NDArray[np.float32], params: SamplingParams, history: Sequence[int]) -> NDArray[np.float32]:
    """Logits plus bias, minus penalties. The same array if there is neither."""
    if not params.logit_bias and not (params.penalises and history):
        return logits
    scores = logits.copy()
    for token, bias in params.logit_bias.items():
        if token >= len(scores):
            message = f"logit_bias names token {token}, but the model has {len(scores)} tokens"
            raise UsageError(message, parameter="logit_bias")
        scores[token] += np.float32(bias)
    if params.penalises and history:
        tokens, counts = np.unique(np.asarray(history, dtype=np.int64), return_counts=True)
        scores[tokens] -= (counts * params.frequency_penalty + params.presence_penalty).astype(np.float32)
    return scores


def _logprob(logits: NDArray[np.float32], token: int) -> float:
    # The exponentials are float32: this number is reported, nothing is decided by it.
    best = logits.max()
    with np.errstate(over="ignore", under="ignore"):
        total = float(np.exp(logits - best).sum(dtype=np.float64))
    return float(logits[token]) - float(best) - math.log(total)


def _with_logprobs(logits: NDArray[np.float32], token: int, top: int) -> Sampled:
    """In float64: these numbers are what was asked for."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - math.log(float(np.exp(shifted).sum()))
    best = _Ranking(logits).first(min(top, len(logits)))
    return Sampled(token, float(logprobs[token]), tuple((int(t), float(logprobs[t])) for t in best))


def _require_finite(logits: NDArray[np.float32]) -> None:
    # A sum is finite only if all its terms are; a sum that overflowed needs the second look.
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(logits.sum()):
            return
    wrong = int(np.count_nonzero(~np.isfinite(logits)))
    if wrong:
        raise NonFiniteLogits(f"{wrong} of {len(logits)} logits are NaN or infinite")


def _check_number(name: str, value: object, low: float, high: float, note: str = "", what: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        message = f"{what or name} must be a number from {low:g} to {high:g}{note}, not {_show(value)}"
        raise UsageError(message, parameter=name)


def _check_integer(name: str, value: object, low: int, high: int, note: str = "", what: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        message = f"{what or name} must be a whole number from {low} to {high}{note}, not {_show(value)}"
        raise UsageError(message, parameter=name)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
