"""`swarmctl top`: rates from two statuses, whatever is missing in them."""

from __future__ import annotations

from swarmnode.top import measure


def status(tokens: int, computed: int, spent_s: float, **peers: int) -> dict[str, object]:
    return {
        "requests": {"tokens": tokens, "running": 1, "waiting": 2},
        "model": {"layers": {"computed": computed, "decode_computed": computed, "decode_round_trip_s": spent_s}},
        "peers": [{"peer_id": name, "name": name, "dispatches": count, "load": 0.5} for name, count in peers.items()],
    }


def test_rates_are_what_happened_between() -> None:
    rates = measure(status(10, 100, 1.0, attic=5), status(30, 180, 1.2, attic=25, new=4), 2.0)
    assert (rates["tokens_per_s"], rates["layers_per_s"], rates["layer_ms"]) == (10.0, 40.0, 2.5)
    attic, new = rates["peers"]
    assert (attic["dispatches_per_s"], attic["load"]) == (10.0, 0.5)
    assert new["dispatches_per_s"] is None  # it was not there before


def test_another_leader_counts_from_zero_and_a_quiet_second_has_no_layer_time() -> None:
    rates = measure(status(1000, 10, 1.0), status(3, 10, 1.0), 1.0)
    assert rates["tokens_per_s"] is None
    assert (rates["layers_per_s"], rates["layer_ms"]) == (0.0, None)


def test_nobody_leads() -> None:
    alone = {"requests": None, "model": None, "peers": "?"}
    assert measure(alone, alone, 1.0) == {
        "seconds": 1.0, "tokens_per_s": None, "layers_per_s": None, "layer_ms": None,
        "running": None, "waiting": None, "peers": [],
    }  # fmt: skip
