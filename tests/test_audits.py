"""Which answers are audited, what that costs, and what convicts whom, with the bounds that the module states."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.audit_choice import (
    AGREED_FIRST,
    AUDIT_ROWS_MAX,
    BUDGET_SHARE,
    BURST_ROWS,
    COST_MAX,
    GLANCE_ROWS,
    SHARE_MIN,
    SOME_ROWS,
    STRETCH,
    Chosen,
)
from scheduler.audit_tests import ERROR, SAME_FIRST, Change, Found, PeerAudits
from scheduler.audits import SELF_DIFFERED_KNOWN, Audits

RIGHT, WRONG = Found(4, identical=True), Found(4, wrong=4)
COARSE = Found(4, coarse=4)
Q, U = Change.QUARANTINED, Change.UNFIT


def audits(seed: int = 0) -> Audits:
    return Audits(random.Random(seed).randbytes(32))


def serve(book: Audits, answers: int, found: Callable[[int], Found], rows: int = 4, peer: str = "a") -> list[Chosen]:
    """So many answers of a peer, each looked into at once if it was chosen. What was."""
    chosen = []
    for number in range(answers):
        audit = book.answered(peer, rows)
        if audit is not None:
            book.found(audit, found(number))
            chosen.append(audit)
    return chosen


def taking(audit: Chosen, price: float) -> Found:
    """A right answer, recomputed in `price` times the time of its rows, a second each."""
    return Found(audit.rows, identical=True, took_s=audit.rows * price, kernels_s=float(audit.rows))


def honest(_number: int) -> Found:
    return RIGHT


# -- which -------------------------------------------------------------------------------------------------------------


def test_a_new_peers_answers_are_all_audited_until_ten_agreed_and_then_ever_fewer() -> None:
    book = audits()
    assert [chosen.number for chosen in serve(book, AGREED_FIRST, honest)] == list(range(1, AGREED_FIRST + 1))
    shares = []
    for _ in range(60):
        shares.append(book.standing("a").share)
        serve(book, 100, honest)
    assert shares == sorted(shares, reverse=True)
    assert (shares[0], shares[-1]) == (1.0, SHARE_MIN)
    late = len(serve(book, 20_000, honest))
    assert abs(late / 20_000 - SHARE_MIN) < 0.006  # four deviations


def test_what_is_chosen_follows_from_the_secret_and_from_nothing_else() -> None:
    def numbers(seed: int, peer: str = "a") -> list[int]:
        return [chosen.number for chosen in serve(audits(seed), 2000, honest, peer=peer)][30:]

    assert numbers(1) == numbers(1)
    assert len(set(numbers(1)) & set(numbers(2))) < len(numbers(1)) / 2
    assert numbers(1) != numbers(1, "b")
    with pytest.raises(ValueError, match="secret"):
        Audits(b"short")


def test_no_answer_is_recomputed_in_more_rows_than_that() -> None:
    book = audits()
    chosen = serve(book, AGREED_FIRST, honest, rows=500)
    assert {(each.sure, each.rows) for each in chosen} <= {(False, SOME_ROWS), (True, AUDIT_ROWS_MAX)}
    assert {each.rows for each in serve(book, 5, honest, rows=3, peer="b")} == {3}
    book.adopt({"c": PeerAudits(agreed=5000, in_a_row=5000)})
    chosen = serve(book, 2000, honest, rows=500, peer="c")
    assert {(each.sure, each.rows) for each in chosen} == {(False, GLANCE_ROWS), (True, AUDIT_ROWS_MAX)}


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(1, 300), st.integers(0, 9), st.floats(1, 100)), max_size=400
    ),
)
def test_the_overhead_is_bounded_whatever_peers_do(seed: int, answers: list[tuple[str, int, int, float]]) -> None:
    """One of each stretch, a burst, a tenth of what was computed; and what an audit took beyond its price."""
    book, rows, took, sure, surprise = audits(seed), 0, 0.0, 0.0, 0.0
    for peer, count, kind, price in answers * 3:
        rows += count
        audit = book.answered(peer, count)
        if audit is None:
            continue
        if kind == 9:
            book.dropped(audit)
            continue
        cost = min(audit.rows * price, COST_MAX)
        took += cost
        sure += cost * audit.sure
        surprise = max(surprise, cost - audit.cost)
        found = WRONG if kind == 8 else RIGHT
        book.found(audit, replace(found, took_s=audit.rows * price, kernels_s=float(audit.rows)))
        assert took - sure <= 1.25 * BURST_ROWS + BUDGET_SHARE * rows + surprise


@pytest.mark.parametrize(("price", "share"), [(1.0, SHARE_MIN), (1.8, SHARE_MIN), (4.5, 1 / STRETCH)])
def test_in_the_steady_state_audits_cost_less_than_their_budget(price: float, share: float) -> None:
    """A twentieth of all answers where there is time, one of each stretch where there is none for more."""
    book, peers = audits(), "abcdefgh"
    book.adopt(dict.fromkeys(peers, PeerAudits(agreed=1000, in_a_row=1000)))

    def goes_on(rounds: int) -> tuple[int, float]:
        audited, cost = 0, 0.0
        for _ in range(rounds):
            for peer in peers:
                if (audit := book.answered(peer, 4)) is not None:
                    audited += 1
                    cost += audit.rows * price
                    book.found(audit, taking(audit, price))
        return audited, cost

    goes_on(3_000)
    audited, cost = goes_on(5_000)
    assert share - 0.003 < audited / (5_000 * len(peers)) < SHARE_MIN + 0.004
    assert cost / (5_000 * len(peers) * 4) < BUDGET_SHARE + 0.005


@given(st.integers(0, 2**32), st.integers(0, 200), st.integers(1, 64), st.floats(0.1, 1000))
def test_whatever_audits_cost_one_of_each_stretch_is_recomputed(seed: int, past: int, rows: int, price: float) -> None:
    """So of any 2 * STRETCH - 1 answers one is, in as many rows as any audit looks at."""
    book = audits(seed)
    book.adopt({"a": PeerAudits(agreed=5000, in_a_row=5000)})
    sure = []
    for number in range(1, past + 4 * STRETCH + 1):
        if (audit := book.answered("a", rows)) is not None:
            book.found(audit, taking(audit, price))
            if audit.sure:
                sure.append(number)
                assert audit.rows == min(rows, AUDIT_ROWS_MAX)
    assert [(number - 1) // STRETCH for number in sure[:4]] == [0, 1, 2, 3]
    assert all(after - before < 2 * STRETCH for before, after in itertools.pairwise(sure))


def test_even_if_everybody_is_suspected_the_budget_holds_and_ordinary_audits_go_on() -> None:
    book = audits()
    for _ in range(20_000):
        for peer in "abc":
            serve(book, 1, honest, rows=16, peer=peer)
            if book.standing(peer).share < 1:
                book.found_wrong(peer)
    assert not any(book.held(peer).quarantined for peer in "abc")
    assert SHARE_MIN < book.overhead < BUDGET_SHARE + 0.02


# -- what convicts -----------------------------------------------------------------------------------------------------


def test_one_wrong_audit_raises_a_peer_to_every_answer_and_convicts_nobody() -> None:
    book = audits()
    serve(book, 5000, honest)
    assert book.standing("a").share == SHARE_MIN
    audit = next(c for c in iter(lambda: book.answered("a", 4), 0) if c is not None)
    assert book.found(audit, WRONG) == (Change.SUSPECTED,)
    assert book.standing("a").share == 1.0
    assert len(serve(book, 40, honest)) == 40
    assert not book.held("a").quarantined
    serve(book, 3000, honest)
    assert book.standing("a").share < 0.5  # forgotten after enough that agree
    assert (book.held("a").differed, book.held("a").quarantined) == (1, False)


def test_five_wrong_ones_in_a_row_convict_nobody_and_the_sixth_does() -> None:
    book = audits()
    changes = [book.found_wrong("a") for _ in range(6)]
    assert changes == [(Change.SUSPECTED,), (), (), (), (), (Q,)]
    assert book.found_wrong("a") == ()


def missed_within(answers: int) -> float:
    """How likely it is that so many answers, from any one on, hold none that is the one of its stretch."""
    places = [(start, STRETCH - start) for start in range(STRETCH)]
    missed = [start / STRETCH * max(0.0, 1 - (answers - left) / STRETCH) for start, left in places]
    return sum(missed) / STRETCH


@pytest.mark.parametrize("wrong", [4, 1])
def test_who_always_cheats_is_suspected_within_90_answers_and_out_within_100(wrong: int) -> None:
    """With 99 % probability, after any honest past, and be it in one row of each answer alone; and always a little
    later. Glances are left out: they may be too dear."""
    suspected, trials = [], 1000
    for seed in range(trials):
        random_, book = random.Random(seed), audits(seed)
        book.adopt({"a": PeerAudits(agreed=5000, in_a_row=5000)})
        for _ in range(random_.randrange(2 * STRETCH)):
            book.answered("a", 4)
        out_at = number = suspected_at = 0
        while not out_at:
            number += 1
            audit = book.answered("a", 4)
            if audit is not None and audit.rows == 4:
                changes = book.found(audit, Found(4, wrong=wrong))
                suspected_at = suspected_at or (number if changes else 0)
                out_at = number if Q in changes else 0
        suspected.append(suspected_at)
        assert out_at == suspected_at + 5
    late = trials * missed_within(90)
    assert sum(number > 90 for number in suspected) < late + 4 * late**0.5
    assert missed_within(90) < 0.01
    assert 85 < max(suspected) <= 2 * STRETCH - 1


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_a_suspect_is_out_by_its_next_five_answers_however_dear_their_audits(rows: int) -> None:
    """As where all must meet every known arithmetic."""
    book = audits()
    book.adopt({"a": PeerAudits(agreed=5000, in_a_row=5000)})
    found = Found(rows, wrong=rows, took_s=1000.0 * rows, kernels_s=0.1 * rows)
    while (audit := book.answered("a", rows)) is None:
        pass
    assert book.found(audit, replace(found, rows=audit.rows, wrong=audit.rows)) == (Change.SUSPECTED,)
    changes = []
    for _ in range(5):
        audit = book.answered("a", rows)
        assert audit is not None
        changes += book.found(audit, found)
    assert changes == [Q]


def test_nine_answers_in_a_row_that_are_not_finite_convict_and_one_in_twelve_never_does() -> None:
    book = audits()
    assert [book.refused("a") for _ in range(9)] == [()] * 8 + [(Q,)]
    assert book.held("a").quarantined
    assert book.refused("a") == ()
    for number in range(20_000):
        assert book.refused("b") == () if number % 12 == 0 else book.answered("b", 1) or True


def test_nobody_honest_is_ever_quarantined() -> None:
    """As many wrong audits as the test allows for; the bound is n * ERROR."""
    for seed in range(10):
        random_ = random.Random(seed)
        book = audits(seed)
        for _ in range(4000):
            changes = book.found(Chosen("a", 1, 4, 0), Found(4, wrong=random_.random() < 0.001))
            assert Q not in changes
    assert 2 * 50 * 3600 * ERROR < 4e-4


def test_who_cheats_now_and_then_is_caught_too() -> None:
    audited = []
    for seed in range(50):
        random_, book = random.Random(seed), audits(seed)
        for number in range(1, 5000):
            if Q in book.found(Chosen("a", 1, 4, 0), Found(4, wrong=random_.random() < 0.05)):
                audited.append(number)
                break
    assert len(audited) == 50
    assert sum(audited) / 50 < 300


# -- fitness -----------------------------------------------------------------------------------------------------------


def test_coarse_rows_make_a_peer_unfit_and_right_ones_fit_again_each_time_later() -> None:
    book = audits()
    waits = []
    for _ in range(3):
        changes = [book.found(Chosen("a", 1, 4, 0), COARSE) for _ in range(6)]
        assert (U,) in changes
        assert book.held("a").unfit
        book.found(Chosen("a", 1, 4, 0), COARSE)
        count = 1
        while Change.FIT not in book.found(Chosen("a", 1, 4, 0), Found(4)):
            count += 1
        waits.append(count)
        assert not book.held("a").unfit
    assert waits[1] > 1.5 * waits[0]
    assert waits[2] > 1.5 * waits[1]
    assert not book.held("a").quarantined


def test_where_f32_was_not_asked_for_coarse_rows_say_nothing() -> None:
    book = audits()
    for _ in range(50):
        assert book.found(Chosen("a", 1, 4, 0), Found(4, coarse=4, ask_f32=False)) == ()


def test_a_row_in_five_by_a_tie_is_no_reason() -> None:
    random_, book = random.Random(1), audits()
    for _ in range(20_000):
        coarse = sum(random_.random() < 0.11 for _ in range(4))
        assert U not in book.found(Chosen("a", 1, 4, 0), Found(4, coarse=coarse, odd=coarse))


def test_rows_that_are_odd_again_and_again_are_another_function_and_no_single_audit_convicts() -> None:
    for rows, audits_needed in ((32, 6), (4, 6), (1, 22)):
        book = audits()
        odd = Found(rows, coarse=rows, odd=rows, ask_f32=False)
        changes = [book.found(Chosen("a", 1, rows, 0), odd) for _ in range(audits_needed)]
        assert changes == [(Change.SUSPECTED,), *[()] * (audits_needed - 2), (Q,)]


def test_one_odd_row_has_a_trusted_peer_audited_in_full_until_others_are_not() -> None:
    book = audits()
    serve(book, 5000, honest)
    assert book.found(Chosen("a", 1, 1, 0), Found(1, coarse=1, odd=1)) == (Change.SUSPECTED,)
    assert book.standing("a").share == 1.0
    assert book.found(Chosen("a", 2, 1, 0), Found(1, coarse=1)) == ()
    assert book.standing("a").share == SHARE_MIN


def test_who_is_odd_in_every_third_row_is_never_convicted_and_in_nine_of_ten_soon() -> None:
    """The first is what half-precision sums come to at the worst; the bound is n * ERROR."""
    for seed, share in ((1, 0.35), (2, 0.35), (3, 0.9), (4, 0.9)):
        random_, book = random.Random(seed), audits()
        out = 0
        for number in range(1, 4001):
            odd = sum(random_.random() < share for _ in range(4))
            if Q in book.found(Chosen("a", number, 4, 0), Found(4, coarse=4, odd=odd)):
                out = number
                break
        assert (out == 0) if share < 0.5 else 0 < out < 40


def test_rows_that_do_not_tell_make_nobody_fit() -> None:
    book = audits()
    book.mark_unfit("a")
    for _ in range(50):
        assert book.found(Chosen("a", 1, 4, 0), Found(4, telling=False)) == ()
    assert book.held("a").unfit


def heard(book: Audits, found: Found, *, same: bool) -> tuple[Change, ...]:
    """An audit of peer a, whose answer it gives again."""
    chosen = Chosen("a", 1, 4, 0)
    return book.found(chosen, found) + book.repeated(chosen, found, same)


def test_other_bits_within_tolerance_split_a_class_once_they_are_repeated() -> None:
    book = audits()
    assert [heard(book, each, same=True) for each in (RIGHT, Found(4), RIGHT)] == [()] * 3
    changes = [heard(book, Found(4), same=True) for _ in range(SAME_FIRST + 2)]
    assert changes == [()] * (SAME_FIRST - 2) + [(Change.SPLIT,), (), (), ()]
    assert book.held("a").self_differed == 0


def test_who_changed_once_is_split_a_little_later() -> None:
    book = audits()
    assert heard(book, RIGHT, same=False) == ()
    changes = [heard(book, Found(4), same=True) for _ in range(SAME_FIRST + 1)]
    assert changes == [()] * SAME_FIRST + [(Change.SPLIT,)]


def test_who_differs_from_itself_is_counted_and_neither_split_nor_suspected() -> None:
    book = audits()
    heard(book, RIGHT, same=True)
    for number in range(2000):
        assert heard(book, Found(4), same=number % 2 == 1) == ()
    assert (book.held("a").self_differed, book.held("a").fitness, book.standing("a").share) == (1000, "fit", SHARE_MIN)


@pytest.mark.parametrize("same", [False, True])
def test_wrong_rows_convict_as_ever_repeated_or_not(same: bool) -> None:
    book = audits()
    changes = [heard(book, WRONG, same=same) for _ in range(6)]
    assert changes == [(Change.SUSPECTED,), (), (), (), (), (Change.QUARANTINED,)]
    assert not book.asks_again(Chosen("a", 7, 4, 0), WRONG, 4)


def test_what_is_off_is_asked_again_until_it_is_known_to_vary_and_within_the_budget() -> None:
    book = audits()
    chosen = [Chosen("a", number, 4, 0) for number in range(1, 801)]
    assert all(book.asks_again(each, Found(4, coarse=1), 0) for each in chosen)
    assert 60 < sum(book.asks_again(each, RIGHT, 0) for each in chosen) < 140
    for each in chosen[:SELF_DIFFERED_KNOWN]:
        book.repeated(each, RIGHT, False)
    assert 60 < sum(book.asks_again(each, Found(4, coarse=1), 0) for each in chosen) < 140
    asked = sum(book.asks_again(Chosen("b", each.number, 32, 0), WRONG, 32) for each in chosen)
    assert asked == BURST_ROWS // 32 < len(chosen)
    book.not_repeated(32)
    assert book.asks_again(Chosen("b", 1, 32, 0), WRONG, 32)


# -- from leader to leader ---------------------------------------------------------------------------------------------


def test_a_successor_goes_on_from_what_was_left() -> None:
    one, two = audits(1), audits(2)
    serve(one, 5000, honest)
    one.found_wrong("b")
    one.mark_unfit("c")
    two.adopt(one.records())
    assert two.standing("a").share == SHARE_MIN
    assert two.standing("b").share == 1.0
    assert two.held("c").unfit
    assert two.standing("new").share == 1.0
    assert dict(two.records()) == dict(one.records())


def test_a_released_peer_is_as_new() -> None:
    book = audits()
    serve(book, 3000, honest)
    for _ in range(6):
        book.found_wrong("a")
    assert book.held("a").quarantined
    assert book.release("a", 1)
    assert not book.release("a", 1)
    assert not book.held("a").quarantined
    assert len(serve(book, AGREED_FIRST, honest)) == AGREED_FIRST
    assert book.held("a").released == 1


def test_trust_goes_back_to_the_last_good_audit_before_any_suspicion() -> None:
    book = audits()
    serve(book, 8, honest)
    assert (book.trusted("a"), book.number("a")) == (8, 8)
    serve(book, 1, lambda _: WRONG)
    serve(book, 5, honest)  # by chance, or to look better
    assert (book.trusted("a"), book.number("a")) == (8, 14)
