"""Predictions: what placement itself would do with a newcomer, and outlines that strangers may have made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capabilities.errors import PeerMistake
from scheduler.placement import LayerSpec, WorkerSpec
from scheduler.prediction import anonymous, predict
from swarmnode.cli.predict import shown
from swarmnode.outline import Outline
from tests.swarm_members import OUTLINE

LAYERS = [LayerSpec(layer, 8, 1000) for layer in range(4)]
USED = [2] * 4


def worker(name: str, **more: Any) -> WorkerSpec:
    return WorkerSpec(name, more.pop("budget", 64_000), host=name, **more)


def test_a_newcomer_takes_its_share_and_makes_it_faster() -> None:
    found = predict(LAYERS, USED, [worker("slow", rows_per_s=100)], worker("new", rows_per_s=10_000))
    assert found.missing == ""
    assert found.experts == 32  # with two hosts each has a copy of all
    assert (found.layers, found.nbytes) == (4, 32_000)
    assert found.layers_ms is not None
    assert found.layers_ms_without is not None
    assert found.layers_ms < found.layers_ms_without
    assert 0 < found.kernel_ms <= 4 * 2 / 10_000 * 1e3


def test_the_first_worker_of_a_swarm_has_no_time_before_it() -> None:
    found = predict(LAYERS, USED, [], worker("new"))
    assert (found.experts, found.layers_ms_without) == (32, None)


def test_too_little_memory_says_how_much_is_missing_and_what_would_fit() -> None:
    found = predict(LAYERS, USED, [], worker("new", budget=10_500))
    assert "21500 bytes are missing" in found.missing
    assert (found.experts, found.layers, found.nbytes, found.layers_ms) == (10, 2, 10_000, None)


def test_figures_are_shown_as_people_write_them() -> None:
    assert [shown("rows_per_s", rate) for rate in (46_890.4, 5818.0, 7.5312)] == ["46890", "5818", "7.531"]


def test_an_outline_names_nobody_and_keeps_who_shares_a_machine() -> None:
    known = [WorkerSpec("12D3a", 1, host="attic"), WorkerSpec("12D3b", 1, host="attic"), WorkerSpec("12D3c", 1)]
    shown = anonymous(known)
    assert "12D3" not in repr(shown)
    assert "attic" not in repr(shown)
    assert shown[0].host == shown[1].host != shown[2].host


def test_an_outline_survives_the_wire() -> None:
    assert Outline.from_json(json.loads(json.dumps(OUTLINE.to_json()))) == OUTLINE


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50)
@given(key=st.sampled_from(sorted(OUTLINE.to_json())), value=JSON)
def test_a_false_outline_is_a_peers_mistake_and_nothing_else(key: str, value: Any) -> None:
    try:
        outline = Outline.from_json({**OUTLINE.to_json(), key: value})
    except PeerMistake:
        return
    predict(outline.layers, outline.used, outline.workers, worker("new"), replicas=outline.replicas)


@pytest.mark.parametrize("value", [None, 3, [], {}, {"layers": []}])
def test_no_outline(value: Any) -> None:
    with pytest.raises(PeerMistake):
        Outline.from_json(value)
