"""Answers that wait for the judge: bounds, turns, who makes room for whom, and cheats under a judge of little time."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.audit_choice import STRETCH, Chosen, PeerStanding
from scheduler.audit_queue import WAITING_BYTES_MAX, WAITING_MAX, WAITING_OF_A_PEER_MAX, AuditQueue, Waiting
from scheduler.audit_tests import Change, Found, PeerAudits
from scheduler.audits import Audits


def waiting(
    peer: str, number: int = 1, nbytes: int = 100, *, sure: bool = False, seed: int | None = None
) -> Waiting[int]:
    return Waiting(Chosen(peer, number, 4, number if seed is None else seed, sure), number, nbytes)


def queue_of(*suspects: str) -> AuditQueue[int]:
    return AuditQueue(lambda peer: peer in suspects)


def order(queue: AuditQueue[int]) -> list[tuple[str, int]]:
    taken = []
    while (each := queue.take()) is not None:
        taken.append((each.chosen.peer, each.sample))
    return taken


def test_peers_take_turns_and_each_ones_newest_answer_comes_after_the_one_of_its_stretch() -> None:
    queue = queue_of()
    for peer, number in (("a", 1), ("a", 2), ("b", 1), ("c", 1), ("b", 2)):
        assert queue.add(waiting(peer, number)) == []
    queue.add(waiting("a", 3, sure=True))
    queue.add(waiting("a", 4))
    assert order(queue) == [("a", 3), ("b", 2), ("c", 1), ("a", 4), ("b", 1), ("a", 2), ("a", 1)]
    assert (len(queue), queue.nbytes) == (0, 0)


def test_every_second_turn_is_a_suspects() -> None:
    queue = queue_of("x", "y")
    for peer in "abxy":
        for number in range(3):
            queue.add(waiting(peer, number))
    peers = [peer for peer, _ in order(queue)]
    assert peers[:6] == ["x", "a", "y", "b", "x", "a"]
    assert Counter(peers) == dict.fromkeys("abxy", 3)


def test_a_peer_that_has_enough_waiting_loses_one_by_lot_but_for_those_of_its_stretches() -> None:
    queue = queue_of()
    for number in range(WAITING_OF_A_PEER_MAX):
        assert queue.add(waiting("a", number, seed=100 + number, sure=number == 0)) == []
    assert not queue.has_room(Chosen("a", 50, 4, 99))
    assert queue.has_room(Chosen("a", 50, 4, 102))
    assert queue.has_room(Chosen("b", 1, 4, 0))
    assert queue.has_room(Chosen("a", 50, 4, 0, sure=True))
    assert [lost.number for lost in queue.add(waiting("a", 50, sure=True))] == [1]
    assert [lost.number for lost in queue.add(waiting("a", 51, seed=110))] == [2]
    assert [lost.number for lost in queue.add(waiting("a", 52, seed=50))] == [52]
    assert [number for _, number in order(queue)] == [0, 50, 51, *range(WAITING_OF_A_PEER_MAX - 1, 2, -1)]


def test_where_all_are_of_a_stretch_the_oldest_is_lost() -> None:
    queue = queue_of()
    lost = [queue.add(waiting("a", number, sure=True)) for number in range(WAITING_OF_A_PEER_MAX + 2)]
    assert [each.number for some in lost for each in some] == [0, 1]


def test_of_a_busy_hours_answers_each_is_as_likely_to_be_looked_at_as_any_other() -> None:
    """Else who cheats would begin once so many wait that nobody will look."""
    kept, random_ = Counter[int](), random.Random(1)
    for _ in range(200):
        queue = queue_of()
        for number in range(10 * WAITING_OF_A_PEER_MAX):
            one = waiting("a", number, seed=random_.getrandbits(64))
            if queue.has_room(one.chosen):
                queue.add(one)
        kept.update(number * 10 // (10 * WAITING_OF_A_PEER_MAX) for _, number in order(queue))
    assert sum(kept.values()) == 200 * WAITING_OF_A_PEER_MAX
    assert all(abs(kept[tenth] / (20 * WAITING_OF_A_PEER_MAX) - 1) < 0.25 for tenth in range(10))


def test_where_there_is_no_room_the_longest_queue_makes_some() -> None:
    queue, many = queue_of(), WAITING_MAX // WAITING_OF_A_PEER_MAX + 2
    for number in range(WAITING_OF_A_PEER_MAX):
        for peer in range(many):
            queue.add(waiting(str(peer), number))
    assert len(queue) == WAITING_MAX
    (lost,) = queue.add(waiting("new"))
    assert (lost.peer != "new", lost.number) == (True, 0)
    queue = queue_of()
    queue.add(waiting("large", nbytes=WAITING_BYTES_MAX - 150))
    assert queue.add(waiting("small")) == []
    assert [lost.peer for lost in queue.add(waiting("new"))] == ["large"]


def test_what_waits_of_one_that_is_quarantined_is_forgotten() -> None:
    queue = queue_of()
    for number in range(3):
        queue.add(waiting("a", number))
        queue.add(waiting("b", number))
    assert [chosen.number for chosen in queue.forget("a")] == [0, 1, 2]
    assert queue.forget("a") == []
    assert order(queue) == [("b", 2), ("b", 1), ("b", 0)]


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.booleans(), st.integers(1, WAITING_BYTES_MAX // 3), st.booleans()),
        max_size=200,
    )
)
def test_whatever_comes_the_bounds_hold_and_nothing_is_lost_silently(steps: list[tuple[str, bool, int, bool]]) -> None:
    queue, inside = queue_of("a"), set[int]()
    for number, (peer, takes, nbytes, sure) in enumerate(steps):
        inside.add(number)
        lost = queue.add(waiting(peer, number, nbytes, sure=sure))
        inside -= {each.number for each in lost}
        if takes and (taken := queue.take()) is not None:
            inside.remove(taken.sample)
        assert queue.nbytes <= WAITING_BYTES_MAX
        assert len(queue) == len(inside) <= WAITING_MAX
    assert {number for _, number in order(queue)} == inside


# -- a judge of little time --------------------------------------------------------------------------------------------

OTHERS = [f"other {number}" for number in range(20)]
LONG = PeerAudits(agreed=1000, in_a_row=1000)


class AlwaysNew(Audits):
    """All others stay new for ever."""

    def standing(self, peer: str) -> PeerStanding:
        return super().standing(peer) if peer == "cheat" else PeerStanding()


def judged_until_out(book: Audits, rate: float) -> tuple[list[int], int, int]:
    """Everybody answers in turns, and all that the cheat says is wrong. rate: audits that are made in one such turn.

    The numbers of the cheat's answers that were audited; audits in all since its first one was chosen; its answers.
    """
    queue, numbers, made, could, chosen_one = AuditQueue[int](book.suspected), list[int](), 0, 0.0, False
    while True:
        for peer in (*OTHERS, "cheat"):
            chosen = book.answered(peer, 4)
            if chosen is not None and queue.has_room(chosen):
                chosen_one = chosen_one or peer == "cheat"
                for lost in queue.add(Waiting(chosen, 0, 40_000)):
                    book.dropped(lost)
            elif chosen is not None:
                book.dropped(chosen)
        could += rate
        while could >= 1 and (taken := queue.take()) is not None:
            could -= 1
            made += chosen_one
            wrong = taken.chosen.peer == "cheat"
            numbers += [taken.chosen.number] * wrong
            rows = taken.chosen.rows
            if Change.QUARANTINED in book.found(taken.chosen, Found(rows, wrong=rows if wrong else 0)):
                return numbers, made, book.number("cheat")
        could = min(could, 1.0)


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("rate", [0.05, 0.5, 2.0])
def test_who_cheats_from_the_first_is_out_after_so_many_audits_however_slow_the_judge(
    rate: float, trusted: bool
) -> None:
    for seed in range(10):
        book = Audits(random.Random(seed).randbytes(32))
        book.adopt(dict.fromkeys(OTHERS, LONG) if trusted else {})
        numbers, made, answers = judged_until_out(book, rate)
        assert len(numbers) == 6
        assert made <= 2 * (len(OTHERS) + 1) + 10
        if rate == 2.0:
            assert answers <= 30


@pytest.mark.parametrize("rate", [0.5, 2.0])
def test_who_begins_to_cheat_after_long_is_out_although_others_are_always_new(rate: float) -> None:
    for seed in range(10):
        book = AlwaysNew(random.Random(seed).randbytes(32))
        book.adopt({"cheat": LONG})
        numbers, made, answers = judged_until_out(book, rate)
        assert numbers[0] <= 2 * STRETCH - 1
        assert made <= 2 * (len(OTHERS) + 1) + 10 + 5  # five more that had to be answered first
        assert answers <= numbers[0] + made / rate + 1
