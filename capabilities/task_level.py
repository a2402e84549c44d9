"""The level task: what two models make of a text and of questions with one right answer of four, in pairs.

Both sides read the same tokens, so each difference is one of a pair, and its standard error says what it is worth.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from capabilities.equivalence import F32, F64, I32, TINY, FlipLimits, number, verdict
from capabilities.tolerances import (
    NLL_DEVIATIONS,
    NLL_MEAN_LIMIT,
    NOISE_TIMES,
    OPTIONS_SPREAD_LIMIT,
    TEXT_TOKENS,
    above_noise,
)

_EXPONENT_MAX = 80.0  # a perplexity of 1e34 says all that there is to say


def log_likelihoods(logits: F32, tokens: I32) -> F64:
    """Of the token that came after each position, in nats: logits [T, V], tokens [T]; [T]."""
    highest = logits.max(axis=1)
    powers = np.exp(logits - highest[:, None]).sum(axis=1, dtype=np.float64)
    found: F64 = logits[np.arange(len(tokens)), tokens].astype(np.float64) - highest - np.log(powers)
    return found


def task_level(
    nll: tuple[F64, F64], floor_nll: tuple[F64, F64], options: tuple[F64, F64], floor_options: tuple[F64, F64]
) -> dict[str, Any]:
    """The verdict on both sides, beside llama.cpp's two sets of kernels.

    nll: negative log-likelihoods [T] of the same text's tokens in nats. options: log-likelihoods [Q, N] of the answers
    to choose from, the right one first.
    """
    figures, of_floor = task_figures(*nll), task_figures(*floor_nll)
    chosen, of_floor_chosen = choice_figures(*options), choice_figures(*floor_options)
    limit = above_noise(NLL_MEAN_LIMIT, abs(of_floor["nll_difference"])) + NLL_DEVIATIONS * figures["standard_error"]
    spread_limit = above_noise(OPTIONS_SPREAD_LIMIT, of_floor_chosen["spread"])
    predicted = changes_predicted(options[0], min(chosen["spread"], spread_limit))
    changes = FlipLimits.of(predicted, len(options[0]), of_floor_chosen["changed"], len(floor_options[0]))
    mean, spread, changed = figures["nll_difference"], chosen["spread"], chosen["changed"]
    of_text = f"{mean:+.2g} nats a token, with a limit of {limit:.2g}"
    of_spread = f"answers moved by {spread:.2g} nats against each other, with a limit of {spread_limit:.2g}"
    of_changed = f"{changed} answers changed, {changes.words('questions')}"
    few = figures["positions"] < TEXT_TOKENS
    quick = f"; {figures['positions']} tokens are a quick look, where {TEXT_TOKENS} make the figure" if few else ""
    return {
        **verdict(
            "task",
            f"{of_text}; {of_spread}; {of_changed}{quick}",
            None if abs(mean) <= limit else of_text,
            None if spread <= spread_limit else of_spread,
            None if changed <= changes.lower else of_changed,
        ),
        "tolerance": {
            "text": (
                f"{NLL_MEAN_LIMIT:g} nats a token, or {NOISE_TIMES:g} times llama.cpp's own noise, and "
                f"{NLL_DEVIATIONS:g} standard errors more; answers' movement by {OPTIONS_SPREAD_LIMIT:.2g} nats, or "
                f"{NOISE_TIMES:g} times the noise; {changes.text('answers that change')}"
            ),
            "nll_difference": limit,
            "spread": spread_limit,
            "changed": changes.lower,
            "changed_beside_noise": changes.beside_noise,
            "positions": TEXT_TOKENS,
        },
        **figures,
        "choices": chosen,
        "noise_floor": {**of_floor, "choices": of_floor_chosen},
    }


def task_figures(nll_a: F64, nll_b: F64) -> dict[str, Any]:
    apart = nll_b - nll_a
    return {
        "positions": len(nll_a),
        "perplexity_a": number(np.exp(min(nll_a.mean(), _EXPONENT_MAX))),
        "perplexity_b": number(np.exp(min(nll_b.mean(), _EXPONENT_MAX))),
        "nll_difference": number(apart.mean()),
        "standard_error": number(apart.std() / math.sqrt(len(apart))),
    }


def choice_figures(a: F64, b: F64) -> dict[str, Any]:
    """Of answers [Q, N]. `spread`: how far an answer's log-likelihood moved against the others of its question."""
    apart = b - a
    apart = apart - apart.mean(axis=1, keepdims=True)
    spread = number(math.sqrt((apart**2).sum() / (a.shape[0] * (a.shape[1] - 1))))
    return {
        "questions": len(a),
        "accuracy_a": _accuracy(a),
        "accuracy_b": _accuracy(b),
        "changed": int((a.argmax(axis=1) != b.argmax(axis=1)).sum()),
        "changed_predicted": changes_predicted(a, spread),
        "spread": spread,
    }


def changes_predicted(options: F64, spread: float) -> float:
    """Questions of [Q, N] to be answered otherwise if every answer moved by chance, with this deviation."""
    two = np.sort(options, axis=1)[:, -2:]
    reach = max(2 * spread, TINY)  # sqrt(2) for two answers, and sqrt(2) of the error function
    return float(sum(0.5 * math.erfc(margin / reach) for margin in (two[:, 1] - two[:, 0]).tolist()))


def _accuracy(options: F64) -> float:
    """Share of questions whose right answer is likelier than every other."""
    return float((options[:, :1] > options[:, 1:]).all(axis=1).mean())
