"""Whom a worker obeys, at each step from hearing of a term to having it on disk, and after a restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capabilities.certificates import Certificate, Mandate
from capabilities.errors import PeerMistake, SwarmError
from scheduler.election_state import DamagedState
from scheduler.term_guard import StaleTerm, TermGuard, UncertifiedTerm, from_file, to_file
from tests.election_tools import SWARM, backbone_of, certificate_of, sign_as, verify, verify_owner, vote_of

A, B, C, D, W = "A", "B", "C", "D", "W"
THREE = backbone_of((A, B, C))
FOUR = backbone_of((A, B, C, D), THREE)


def mandate(leader: str, term: int, voters: tuple[str, ...] = (A, B)) -> Mandate:
    return Mandate(certificate_of(leader, voters, term), THREE)


def guard_of(stored: Mandate | None = None) -> TermGuard:
    return TermGuard(SWARM, verify, verify_owner, stored)


def obeys(guard: TermGuard, term: int, leader: str) -> bool:
    try:
        guard.check(term, leader)
    except (StaleTerm, UncertifiedTerm):
        return False
    return True


def test_a_term_is_obeyed_once_it_is_stored() -> None:
    guard = guard_of()
    assert not obeys(guard, 1, A)
    first = guard.receive(mandate(A, 1))
    assert first == mandate(A, 1)
    assert not obeys(guard, 1, A)
    guard.stored(first)
    assert obeys(guard, 1, A)
    assert not obeys(guard, 1, B)
    assert not obeys(guard, 2, A)
    assert not obeys(guard, 0, A)


def test_an_older_term_is_refused_from_the_moment_a_newer_one_is_known() -> None:
    guard = guard_of(mandate(A, 1))
    assert obeys(guard, 1, A)
    newer = guard.receive(mandate(B, 5))
    assert newer is not None
    assert guard.obeyed == mandate(A, 1)
    with pytest.raises(StaleTerm, match="term 5 is certified") as refusal:
        guard.check(1, A)
    assert refusal.value.details == {"term": 5}
    assert guard.known == newer
    assert not obeys(guard, 5, B)
    guard.stored(newer)
    assert obeys(guard, 5, B)
    with pytest.raises(StaleTerm):
        guard.receive(mandate(A, 4))


def test_after_a_restart_it_obeys_what_was_stored() -> None:
    again = guard_of(from_file(to_file(mandate(B, 5))))
    assert obeys(again, 5, B)
    assert not obeys(again, 4, A)
    assert again.receive(mandate(B, 5)) is None


def test_stored_mandates_may_be_confirmed_late() -> None:
    guard = guard_of()
    first, second = guard.receive(mandate(A, 1)), guard.receive(mandate(B, 2))
    assert first is not None
    assert second is not None
    guard.stored(second)
    guard.stored(first)
    assert obeys(guard, 2, B)


def test_a_term_is_known_once() -> None:
    guard = guard_of(mandate(A, 1))
    assert guard.receive(mandate(A, 1)) is None
    assert guard.receive(mandate(A, 1, (A, C))) is None  # another quorum's votes for the same
    assert obeys(guard, 1, A)


@pytest.mark.parametrize(
    "false",
    [
        mandate(B, 9, (B,)),
        mandate(W, 9),
        Mandate(replace(mandate(A, 1).certificate, term=9), THREE),
        Mandate(Certificate.of([replace(vote_of(A, B, 9), signature=sign_as(W)(b"")), vote_of(B, B, 9)]), THREE),
        Mandate(
            certificate_of(W, (W,), 9), replace(backbone_of((W,)), signature=sign_as(W)(backbone_of((W,)).payload))
        ),
        Mandate(certificate_of(B, (A, B), 9), FOUR),
        mandate(C, 1, (B, C)),  # a second leader of term 1
    ],
)
def test_what_is_no_mandate_changes_nothing(false: Mandate) -> None:
    guard = guard_of(mandate(A, 1))
    with pytest.raises(PeerMistake):
        guard.receive(false)
    assert guard.known == mandate(A, 1)
    assert obeys(guard, 1, A)


def test_members_that_were_removed_certify_nothing_later() -> None:
    two = backbone_of((A, B), THREE)
    newer = Mandate(certificate_of(A, (A, B), 3, version=2), two)
    guard = guard_of(newer)
    with pytest.raises(PeerMistake, match="older backbone"):
        guard.receive(mandate(C, 9, (B, C)))


def test_a_backbone_that_was_never_heard_of_comes_with_the_mandate() -> None:
    guard = guard_of(mandate(A, 1))
    later = guard.receive(Mandate(certificate_of(D, (A, B, D), 2, version=2), FOUR))
    assert later is not None
    guard.stored(later)
    assert obeys(guard, 2, D)


def test_another_swarms_mandate_is_none() -> None:
    guard = TermGuard("0" * 64, verify, verify_owner, None)
    with pytest.raises(PeerMistake):
        guard.receive(mandate(A, 1))


@pytest.mark.parametrize("damage", [lambda d: d[:-1], lambda d: b"", lambda d: d[:40] + b"!" + d[41:], lambda d: d + d])
def test_a_damaged_file_is_noticed(damage: object) -> None:
    assert callable(damage)
    with pytest.raises(DamagedState):
        from_file(damage(to_file(mandate(A, 1))))


def test_refusals_cross_the_wire() -> None:
    for kind in (StaleTerm, UncertifiedTerm):
        again = SwarmError.from_json(kind("no", term=7).to_json())
        assert type(again) is kind
        assert again.details == {"term": 7}
