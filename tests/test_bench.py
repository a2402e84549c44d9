"""The bench on a tiny model: every documented key, the same tokens on both sides, and bytes within the contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.synthetic import OLMOE_TINY, write_random_model
from capabilities.errors import UnsupportedModel, UsageError
from swarmnode.bench import run_bench
from tests.expert_models import tiny_file
from tests.schema_checks import conforms


def _silent(_step: str, _done: int, _total: int) -> None:
    pass


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    write_random_model(path, OLMOE_TINY)
    return run_bench(str(path), workers=2, prompt_tokens=16, tokens=12, progress=_silent, rounds=1)


def test_both_sides_answer_alike(result: dict[str, Any]) -> None:
    assert result["tokens_identical"] is True
    assert result["combine"] == "router-order"
    conforms("bench", result)


def test_rates_are_there_for_both_sides(result: dict[str, Any]) -> None:
    for side in ("llama_cpp", "swarm", "ratio"):
        assert result[side]["prefill_tokens_per_s"] > 0
        assert result[side]["decode_tokens_per_s"] > 0
    assert set(result["batch_invariance"]["cost"]) == {"prefill_tokens_per_s", "decode_tokens_per_s"}


def test_costs_are_measured(result: dict[str, Any]) -> None:
    assert result["layer_rtt_ms"] > 0
    assert result["cpu_outside_kernels_ms_per_token"] >= 0


def test_bytes_of_a_token_stay_within_the_contract(result: dict[str, Any]) -> None:
    n_embd, n_used = OLMOE_TINY.n_embd, OLMOE_TINY.n_used
    sizes = result["bytes_per_token_per_layer"]
    assert 0 < sizes["out"] <= 4 * n_embd + 12 * n_used + 96
    assert 0 < sizes["back"] <= 4 * n_embd * n_used + 96


def test_partial_sums_send_one_row_a_token_back(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_random_model(path, OLMOE_TINY)
    result = run_bench(
        str(path), workers=2, prompt_tokens=16, tokens=12, progress=_silent, rounds=1, fast=True, combine="partial-sum"
    )
    assert result["combine"] == "partial-sum"
    assert result["swarm"]["decode_tokens_per_s"] > 0
    n_embd, n_used = OLMOE_TINY.n_embd, OLMOE_TINY.n_used
    sizes = result["bytes_per_token_per_layer"]
    assert 0 < sizes["out"] <= 4 * n_embd + 12 * n_used + 96
    assert 0 < sizes["back"] <= 4 * n_embd + 96


def test_a_model_that_has_no_partial_sums_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedModel, match="no partial sums"):
        run_bench(
            str(tiny_file("llama4")), workers=1, prompt_tokens=4, tokens=4, progress=_silent, combine="partial-sum"
        )


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UsageError, match=r"no file nowhere\.gguf"):
        run_bench("nowhere.gguf", workers=1, prompt_tokens=4, tokens=4, progress=_silent)


def test_one_token_has_no_decode_rate(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two tokens"):
        run_bench(str(tmp_path / "any.gguf"), workers=1, prompt_tokens=4, tokens=1, progress=_silent)
