"""What a layer costs: the formula, how widely to spread, and who should answer, judged by trying every choice."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.layer_cost import (
    FRAME_S,
    JITTER,
    POPULARITY_TRUST,
    PREFERRED_WORTH,
    WIDER_GAIN,
    PeerSpeed,
    Spread,
    choose_spread,
    layer_seconds,
    row_shares,
    share_out,
)


def seconds(speeds: list[PeerSpeed], rows: list[float]) -> float:
    used = [i for i, n in enumerate(rows) if n]
    each = np.array([(speeds[i].rtt_s, speeds[i].busy_s, rows[i], speeds[i].rows_per_s) for i in used]).reshape(-1, 4)
    return layer_seconds(*each.T)


def lan(n: int, **changes: float) -> list[PeerSpeed]:
    return [PeerSpeed(**{"rtt_s": 0.0003, "rows_per_s": 5_000.0, **changes}) for _ in range(n)]  # type: ignore[arg-type]


def test_a_layer_waits_for_its_slowest_worker() -> None:
    near, far = PeerSpeed(0.01, 1_000.0), PeerSpeed(0.02, 1_000.0, busy_s=0.5)
    assert seconds([], []) == 0
    assert seconds([near], [10]) == pytest.approx(0.01 + 0.01 + FRAME_S)
    assert seconds([near, far], [100, 10]) == pytest.approx(0.02 * (1 + JITTER / 2) + 0.5 + 0.01 + 2 * FRAME_S)


def test_shares_of_rows_follow_the_count_but_leave_nobody_out() -> None:
    assert row_shares(4, None).tolist() == row_shares(4, [0, 0, 0, 0]).tolist() == [0.25] * 4
    shares = row_shares(2, [9, 0])
    assert shares.tolist() == pytest.approx([POPULARITY_TRUST + (1 - POPULARITY_TRUST) / 2, (1 - POPULARITY_TRUST) / 2])


def spread(rtt_ms: list[float], rate: float, near_min: int = 1, rows: float = 32) -> Spread:
    rtt_s = np.array(rtt_ms) / 1e3
    return choose_spread(rtt_s, np.full(len(rtt_ms), rate), near_min=near_min, rows=rows)


def test_layers_are_wide_between_slow_neighbours_and_narrow_over_slow_links() -> None:
    assert spread([0.3] * 6, 1_000) == Spread(6, 6)
    assert spread([20] * 6, 100_000) == Spread(6, 1)
    assert spread([20] * 6, 5_000).near == 6
    assert 2 <= spread([20] * 6, 5_000).fan_out <= 4
    assert spread([0.3] * 6, 1_000, rows=1).fan_out < 6


def test_distant_workers_are_left_out_unless_memory_needs_them() -> None:
    assert spread([1, 200, 200], 5_000) == Spread(1, 1)
    assert spread([1, 1, 200], 5_000) == Spread(2, 2)
    assert spread([1, 200, 200], 5_000, near_min=2).near >= 2
    assert spread([20, 21, 22, 23], 100_000).near == 4  # not for a few percent
    assert spread([5], 10) == Spread(1, 1)


options_of = st.lists(st.lists(st.integers(0, 3), unique=True, min_size=1, max_size=3), min_size=1, max_size=6)
speed = st.builds(
    PeerSpeed,
    st.sampled_from((0.0002, 0.001, 0.02, 0.2)),
    st.sampled_from((50.0, 1_000.0, 20_000.0)),
    st.sampled_from((0.0, 0.0, 0.05)),
)


@settings(max_examples=100, deadline=None)
@given(options_of, st.lists(speed, min_size=4, max_size=4), st.sampled_from((2.0, 8.0, 128.0, 4096.0)))
def test_the_choice_is_close_to_the_best_of_all(options: list[list[int]], speeds: list[PeerSpeed], rows: float) -> None:
    owners, _ = share_out(options, speeds, rows)
    assert all(owner in able for owner, able in zip(owners.tolist(), options, strict=True))

    def cost(choice: tuple[int, ...]) -> float:
        return seconds(speeds, [rows * choice.count(w) / len(options) for w in range(4)])

    best = min(cost(choice) for choice in product(*options))
    # A worker's rows may be off by half an expert, the preferred one is forgiven a little, and so is a narrow choice.
    slack = rows / len(options) / min(s.rows_per_s for s in speeds)
    assert cost(tuple(owners.tolist())) <= best * PREFERRED_WORTH / WIDER_GAIN * 1.1 + slack


def test_an_expert_without_holders_has_no_owner() -> None:
    owners, _ = share_out([[0], [], [1, 0]], lan(2), 8)
    assert owners.tolist() == [0, -1, 1]
    assert share_out([[], []], [], 8)[0].tolist() == [-1, -1]
    assert share_out([[], []], [], 8)[1] == 0


def test_few_rows_go_to_few_workers_and_many_to_all() -> None:
    mirrored = [[e // 8, 2 + e // 8] for e in range(16)]
    assert set(share_out(mirrored, lan(4, rtt_s=0.02), 8)[0].tolist()) == {0, 1}
    assert sorted(share_out(mirrored, lan(4, rtt_s=0.02), 4096)[0].tolist()) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    crossed = [[e // 8, 1 - e // 8] for e in range(16)]
    assert len(set(share_out(crossed, lan(2, rtt_s=0.02, rows_per_s=1e5), 8)[0].tolist())) == 1
    assert sorted(share_out(crossed, lan(2, rtt_s=0.02), 4096)[0].tolist()) == [0] * 8 + [1] * 8


def test_many_rows_are_shared_by_rate() -> None:
    speeds = [PeerSpeed(0.001, 1_000.0), PeerSpeed(0.001, 3_000.0)]
    assert share_out([[0, 1]] * 16, speeds, 4096)[0].tolist() == [0] * 4 + [1] * 12


def test_the_preferred_holder_answers_unless_another_is_clearly_faster() -> None:
    def chosen(*speeds: PeerSpeed) -> int:
        return int(share_out([[0, 1]], list(speeds), 2)[0][0])

    assert chosen(PeerSpeed(0.021, 5_000), PeerSpeed(0.020, 5_000)) == 0
    assert chosen(PeerSpeed(0.030, 5_000), PeerSpeed(0.020, 5_000)) == 1
    assert chosen(PeerSpeed(0.001, 5_000, busy_s=0.1), PeerSpeed(0.020, 5_000)) == 1
    assert chosen(PeerSpeed(0.001, 10), PeerSpeed(0.001, 5_000)) == 1


def test_wild_measurements_do_no_harm() -> None:
    speeds = [PeerSpeed(float("inf"), 0.0), PeerSpeed(0.0, float("inf"), -5.0), PeerSpeed(-1.0, 1e-300)]
    speeds.append(PeerSpeed(float("nan"), float("nan"), float("nan")))
    owners, estimate = share_out([[0, 1, 2, 3]] * 4, speeds, 4096)
    assert 0 <= estimate < 1e6
    assert set(owners.tolist()) <= {0, 1, 2}  # never who measures nonsense
