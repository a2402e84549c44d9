"""Even placement: everything placed once, inside budgets, as even as they allow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import NotReady
from scheduler.placement import LayerSpec, Placement, PlacementImpossible, WorkerSpec, even_split

PLENTY = 10**12


def split(layers: list[LayerSpec], budgets: dict[str, int]) -> Placement:
    return even_split(layers, [WorkerSpec(peer, budget) for peer, budget in budgets.items()], term=3, epoch=7)


def loads(placement: Placement, layers: list[LayerSpec], peers: dict[str, int]) -> dict[str, int]:
    size = {spec.layer: spec.expert_bytes for spec in layers}
    return {
        peer: sum(len(experts) * size[layer] for layer, experts in placement.held_by(peer).items()) for peer in peers
    }


def test_sixteen_experts_on_three_workers() -> None:
    layers = [LayerSpec(layer, 16, 1_000) for layer in range(30)]
    placement = split(layers, {"b": PLENTY, "a": PLENTY, "c": PLENTY})
    assert (placement.term, placement.epoch, placement.peers()) == (3, 7, ("a", "b", "c"))
    assert placement.held_by("a")[0] == (0, 1, 2, 3, 4, 5)
    assert placement.held_by("b")[0] == (6, 7, 8, 9, 10)
    assert placement.held_by("b")[1] == (5, 6, 7, 8, 9, 10)  # the sixth goes round
    assert placement.holders[0][15] == ("c",)
    assert set(loads(placement, layers, dict.fromkeys("abc", 0)).values()) == {160_000}


def test_a_small_worker_gets_what_fits_and_the_others_share_the_rest() -> None:
    layers = [LayerSpec(layer, 8, 10) for layer in range(4)]
    budgets = {"big": PLENTY, "large": PLENTY, "small": 45}
    held = loads(split(layers, budgets), layers, budgets)
    assert held == {"big": 140, "large": 140, "small": 40}
    assert all(len(split(layers, budgets).held_by("small")[layer]) == 1 for layer in range(4))  # a share of each layer


def test_a_full_fit_is_found() -> None:
    layers = [LayerSpec(layer, 5, 7) for layer in range(3)]
    budgets = {"a": 7 * 11, "b": 7 * 3, "c": 7}
    assert loads(split(layers, budgets), layers, budgets) == budgets


def test_large_experts_are_placed_before_small_ones_fill_the_gaps() -> None:
    layers = [LayerSpec(0, 3, 1), LayerSpec(1, 1, 10)]
    assert split(layers, {"a": 10, "b": 3}).holders == {0: (("b",),) * 3, 1: (("a",),)}


def test_workers_without_experts_hold_nothing() -> None:
    layers = [LayerSpec(0, 2, 10)]
    placement = split(layers, {"a": PLENTY, "b": PLENTY, "c": PLENTY, "d": 9})
    assert placement.peers() == ("a", "b")
    assert placement.held_by("d") == placement.held_by("nobody") == {}


@pytest.mark.parametrize("budgets", [{"a": 50, "b": 49}, {}])
def test_too_little_room_names_the_missing_bytes(budgets: dict[str, int]) -> None:
    with pytest.raises(PlacementImpossible, match=f"{100 - sum(budgets.values())} bytes are missing") as caught:
        split([LayerSpec(0, 10, 10)], budgets)
    assert isinstance(caught.value, NotReady)
    assert caught.value.to_json()["type"] == "not_ready"
    assert caught.value.hint


def test_room_in_pieces_smaller_than_an_expert_is_no_room() -> None:
    with pytest.raises(PlacementImpossible, match="10 bytes are missing"):
        split([LayerSpec(0, 2, 10)], {"a": 15, "b": 5})


@pytest.mark.parametrize(
    ("layers", "workers"),
    [
        ([(0, 1, 1), (0, 2, 1)], [("a", 9)]),
        ([(0, 1, 1)], [("a", 9), ("a", 9)]),
        ([(0, 0, 1)], [("a", 9)]),
        ([(0, 1, 0)], [("a", 9)]),
        ([(0, 1, 1)], [("a", 9), ("b", -1)]),
    ],
)
def test_nonsense_is_refused(layers: list[tuple[int, int, int]], workers: list[tuple[str, int]]) -> None:
    specs = [LayerSpec(*layer) for layer in layers]
    with pytest.raises(ValueError, match=r"twice|at least one"):
        even_split(specs, [WorkerSpec(*worker) for worker in workers], term=0, epoch=0)


layer_lists = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 50)), min_size=1, max_size=8).map(
    lambda layers: [LayerSpec(2 * i + 1, n, size) for i, (n, size) in enumerate(layers)]
)


@given(layer_lists, st.integers(1, 9), st.randoms(use_true_random=False))
def test_with_room_for_all_the_split_is_even(layers: list[LayerSpec], n: int, random: object) -> None:
    budgets = {f"w{i}": PLENTY for i in range(n)}
    placement = split(layers, budgets)
    assert list(placement.holders) == [spec.layer for spec in layers]
    for spec in layers:
        counts = [len(placement.held_by(peer).get(spec.layer, ())) for peer in budgets]
        assert sum(counts) == spec.n_expert == len(placement.holders[spec.layer])
        assert max(counts) - min(counts) <= 1
    held = loads(placement, layers, budgets).values()
    assert max(held) - min(held) <= max(spec.expert_bytes for spec in layers)
    random.shuffle(layers)  # type: ignore[attr-defined]
    assert split(layers, dict(reversed(budgets.items()))) == placement


@given(layer_lists, st.lists(st.integers(0, 3_000), min_size=1, max_size=6))
def test_budgets_hold_and_failing_means_full(layers: list[LayerSpec], sizes: list[int]) -> None:
    budgets = {f"w{i}": size for i, size in enumerate(sizes)}
    total = sum(spec.n_expert * spec.expert_bytes for spec in layers)
    try:
        placement = split(layers, budgets)
    except PlacementImpossible:
        # Only if it cannot, or nearly cannot: each budget may lose less than one expert to rounding.
        assert total > sum(sizes) - len(sizes) * max(spec.expert_bytes for spec in layers)
        return
    held = loads(placement, layers, budgets)
    assert all(held[peer] <= budgets[peer] for peer in budgets)
    assert sum(held.values()) == total


@given(st.integers(1, 8), st.integers(1, 40), st.lists(st.integers(0, 60), min_size=1, max_size=6))
def test_equal_experts_are_placed_whenever_they_fit(layers: int, n_expert: int, rooms: list[int]) -> None:
    specs = [LayerSpec(i, n_expert, 10) for i in range(layers)]
    budgets = {f"w{i}": room * 10 + 9 for i, room in enumerate(rooms)}
    if sum(rooms) >= layers * n_expert:
        assert split(specs, budgets)
    else:
        with pytest.raises(PlacementImpossible):
            split(specs, budgets)
