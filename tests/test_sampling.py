"""Sampling: the draw is fixed by (seed, choice, position), and filters come in llama.cpp's order."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from capabilities.errors import UsageError
from scheduler.sampling import NonFiniteLogits, SamplingParams, sample, uniform

PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def logits_of(probabilities: list[float]) -> NDArray[np.float32]:
    return np.log(np.array(probabilities)).astype(np.float32)


def reference(logits: NDArray[np.float32], params: SamplingParams, u: float) -> int:
    """The definition, by sorting everything."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.top_k:
        order = order[: params.top_k]

    def distribution(temperature: float) -> list[float]:
        weights = [math.exp((float(logits[i]) - float(logits[order[0]])) / temperature) for i in order]
        return [w / sum(weights) for w in weights]

    if params.top_p < 1:
        running = np.cumsum(distribution(1.0))
        order = order[: int(np.searchsorted(running, params.top_p)) + 1]
    if params.min_p > 0:
        p = distribution(1.0)
        order = [i for i, p_i in zip(order, p, strict=True) if p_i >= params.min_p * p[0]] or order[:1]
    running = np.cumsum(distribution(params.temperature))
    return order[min(int(np.searchsorted(running, u, "right")), len(order) - 1)]


def kept(logits: NDArray[np.float32], **params: Any) -> set[int]:
    """Tokens that 400 positions ever draw."""
    chosen = SamplingParams(**{**PLAIN, **params})
    return {sample(logits, chosen, position).token for position in range(400)}


def test_uniform_is_a_fixed_function() -> None:
    # Golden values: a leader of another version must draw the same numbers.
    assert uniform(0, 0, 0) == 0.052875449276865494
    assert uniform(1234, 0, 17) == 0.5480203472323458
    assert uniform(2**64 - 1, 3, 100_000) == 0.6855606642933743


def test_uniform_is_uniform_and_its_arguments_are_independent() -> None:
    numbers = [uniform(seed, choice, position) for seed in range(20) for choice in range(5) for position in range(100)]
    assert len(set(numbers)) == 10_000
    assert all(0 <= u < 1 for u in numbers)
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.sum((counts - 500) ** 2 / 500) < 60  # chi-squared with 19 degrees of freedom: 60 is beyond 1e-5


def test_greedy_takes_the_lowest_id_of_a_tie_and_ignores_filters_and_seed() -> None:
    logits = np.array([1.0, 3.0, 3.0, -2.0], dtype=np.float32)
    for seed in range(5):
        assert sample(logits, SamplingParams(temperature=0, top_k=1, top_p=0.1, seed=seed), seed).token == 1


def test_the_draw_inverts_the_cumulative_distribution_in_descending_order() -> None:
    logits = logits_of([0.1, 0.6, 0.3])
    params = SamplingParams(**PLAIN, seed=7)
    for position in range(200):
        u = uniform(7, 0, position)
        expected = 1 if u < 0.6 else 2 if u < 0.9 else 0
        assert sample(logits, params, position).token == expected


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = [0.5, 0.2, 0.2, 0.1]
    params = SamplingParams(**PLAIN)
    tokens = [sample(logits_of(probabilities), params, position).token for position in range(4_000)]
    assert np.bincount(tokens) / 4_000 == pytest.approx(probabilities, abs=0.03)


def test_choices_of_one_request_differ() -> None:
    logits = np.zeros(1_000, dtype=np.float32)
    params = SamplingParams(**PLAIN, seed=1)
    answers = {tuple(sample(logits, params, p, choice).token for p in range(10)) for choice in range(4)}
    assert len(answers) == 4


def test_each_filter_keeps_what_it_says() -> None:
    logits = logits_of([0.05, 0.4, 0.25, 0.2, 0.1])
    assert kept(logits) == {0, 1, 2, 3, 4}
    assert kept(logits, top_k=2) == {1, 2}
    assert kept(logits, top_p=0.6) == {1, 2}  # 0.4 alone does not reach it
    assert kept(logits, top_p=0) == {1}
    assert kept(logits, min_p=0.3) == {1, 2, 3}  # 0.12 and more
    assert kept(logits, min_p=1) == {1}
    assert kept(logits, temperature=1e-6) == {1}


def test_filters_see_temperature_one_and_each_sees_the_one_before() -> None:
    logits = logits_of([0.4, 0.3, 0.2, 0.1])
    assert kept(logits, temperature=100, top_p=0.6) == {0, 1}  # after temperature it would keep three
    # top_k first: of three tokens 0.4 and 0.3 are 78 %, of all four only 70 %.
    assert kept(logits, top_k=3, top_p=0.75) == {0, 1}
    assert kept(logits, top_p=0.75) == {0, 1, 2}


def test_a_tie_at_the_cut_of_top_k_goes_to_the_lower_ids() -> None:
    logits = np.array([0, 5, 5, 5, 5, -0.0], dtype=np.float32)
    assert kept(logits, top_k=2) == {1, 2}
    assert kept(np.array([-0.0, 0.0, -1], dtype=np.float32), top_k=1) == {0}


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.3131, 0.7713, 0.9571, 1.0]),
    st.sampled_from([0.0, 0.05, 0.33, 1.0]),
    st.sampled_from([0.2, 0.8, 1.0, 3.0]),
    st.integers(0, 2**64 - 1),
)
def test_equals_the_definition(
    scores: list[int], top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    logits = np.array(scores, dtype=np.float32) * np.float32(0.37)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert sample(logits, params, 3).token == reference(logits, params, uniform(seed, 0, 3))


@pytest.mark.parametrize("spread", [0.0, 0.001, 4.0])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_ranking_in_pieces_equals_ranking_at_once(spread: float, top_p: float) -> None:
    """Large vocabularies are sorted only as far as the draw needs: across every size of the sorted part."""
    logits = np.random.default_rng(5).normal(size=70_000).astype(np.float32) * np.float32(spread)
    params = SamplingParams(temperature=1.0, top_k=0, top_p=top_p, min_p=0.0, seed=11)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - float(logits.max()))
    if top_p < 1:
        weights = weights[: int(np.searchsorted(weights.cumsum(), top_p * weights.sum())) + 1]
    sums = weights.cumsum()
    for position in range(12):
        rank = int(np.searchsorted(sums, uniform(11, 0, position) * sums[-1], "right"))
        assert sample(logits, params, position).token == order[rank]


def test_penalties_and_bias_move_logits() -> None:
    logits = np.array([2.0, 1.5, 1.0, 0.0], dtype=np.float32)
    greedy = {"temperature": 0}
    assert sample(logits, SamplingParams(**greedy, presence_penalty=0.6), 0, history=[0]).token == 1
    assert sample(logits, SamplingParams(**greedy, presence_penalty=0.4), 0, history=[0] * 9).token == 0  # once only
    assert sample(logits, SamplingParams(**greedy, frequency_penalty=0.4), 0, history=[0, 0, 1]).token == 0  # 1.2, 1.1
    assert sample(logits, SamplingParams(**greedy, frequency_penalty=0.6), 0, history=[0, 0, 1, 2]).token == 1
    assert sample(logits, SamplingParams(**greedy, logit_bias={3: 100, 0: -100}), 0).token == 3
    assert logits.tolist() == [2.0, 1.5, 1.0, 0.0]


def test_logprob_is_of_the_models_own_distribution() -> None:
    logits = logits_of([0.25, 0.5, 0.25])
    params = SamplingParams(temperature=0.1, top_k=1, logit_bias={2: 50})
    assert sample(logits, params, 0) == (sampled := sample(logits, params, 5))
    assert (sampled.token, sampled.logprob) == (2, pytest.approx(math.log(0.25), abs=1e-6))


def test_logprobs_are_told_precisely() -> None:
    logits = np.random.default_rng(5).normal(0, 3, 1_000).astype(np.float32)
    logits[[700, 300]] = logits.max() + 1  # a tie at the top
    exact = logits.astype(np.float64) - float(logits.max())
    exact -= math.log(np.exp(exact).sum())
    params = SamplingParams(temperature=0.5, logit_bias={9: 100.0})
    sampled = sample(logits, params, 3, top=20)
    assert (sampled.token, sampled.logprob) == (9, pytest.approx(exact[9], rel=1e-14))
    assert [token for token, _ in sampled.top] == sorted(range(1_000), key=lambda i: (-logits[i], i))[:20]
    assert [logprob for _, logprob in sampled.top] == pytest.approx([exact[t] for t, _ in sampled.top], rel=1e-14)
    assert sample(logits, params, 3, top=0) == sample(logits, params, 3, top=0)
    assert sample(logits, params, 3, top=0).top == ()
    assert len(sample(logits[:5], SamplingParams(), 3, top=20).top) == 5
    assert sample(logits, params, 3).token == 9


@given(st.integers(0, 2**32), st.integers(0, 3), st.sampled_from([0.0, 0.7, 5.0]))
def test_what_is_not_allowed_is_as_if_it_were_not_there(seed: int, top_k: int, temperature: float) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(0, 2, 60).astype(np.float32)
    allowed = draw.random(60) < 0.1
    allowed[seed % 60] = True
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=0.9, min_p=0.02, seed=seed)
    ids = np.flatnonzero(allowed)
    alone = sample(logits[ids], params, 7)
    assert sample(logits, params, 7, allowed=allowed).token == ids[alone.token]
    assert sample(logits, params, 7, allowed=allowed).logprob == pytest.approx(
        sample(logits, SamplingParams(temperature=0, logit_bias={int(ids[alone.token]): 100.0}), 7).logprob
    )


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(poison: float, temperature: float) -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[7] = poison
    with pytest.raises(NonFiniteLogits, match="1 of 100 logits"):
        sample(logits, SamplingParams(temperature=temperature), 0)


def test_huge_finite_logits_and_tiny_temperatures_are_no_fault() -> None:
    logits = np.array([3e38, 3e38, -3e38], dtype=np.float32)  # their float32 sum overflows
    assert sample(logits, SamplingParams(temperature=0), 0).token == 0
    assert sample(logits, SamplingParams(temperature=1e-9, top_k=0), 0).token in {0, 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("temperature", True), ("temperature", None), ("top_k", -1), ("top_k", 1.5), ("top_k", 10**9),
        ("top_p", 1.01), ("top_p", -0.1), ("min_p", 2), ("seed", -1), ("seed", 2**64), ("seed", 0.5),
        ("frequency_penalty", 2.5), ("presence_penalty", -3), ("logit_bias", [1]), ("logit_bias", {-1: 0}),
        ("logit_bias", {"5": 1}), ("logit_bias", {5: 101}), ("logit_bias", {5: math.nan}),
        ("logit_bias", dict.fromkeys(range(1_025), 0)),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_a_bias_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(UsageError, match="token 9"):
        sample(np.zeros(5, dtype=np.float32), SamplingParams(logit_bias={9: 1}), 0)


def test_parameters_do_not_share_the_callers_mapping() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 1e9
    assert params.logit_bias == {1: 2.0}


def test_a_large_vocabulary_is_quick() -> None:
    logits = np.random.default_rng(0).normal(size=150_000).astype(np.float32) * 4
    times = []
    for position in range(30):  # a busy machine lets one of them pass undisturbed
        start = time.perf_counter()
        sample(logits, SamplingParams(), position)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005
