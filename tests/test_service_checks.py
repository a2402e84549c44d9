"""Whom to check while it serves, and what convicts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from capabilities.precision import Precision
from scheduler.service_checks import AGAIN_S, EVERY_S, STRIKES, Check, ServiceChecks

F16, F32, UNKNOWN = Precision.F16, Precision.F32, Precision.UNKNOWN
HELD = {"a": {6: (0, 3), 7: (1,)}, "b": {7: (2, 5, 6)}, "none": dict[int, tuple[int, ...]]()}


def checks(seed: int = 0) -> ServiceChecks:
    return ServiceChecks(random.Random(seed).random)


def made(book: ServiceChecks, seconds: float, start: float = 0.0) -> list[tuple[float, Check]]:
    """Every check that falls due, asked ten times a second."""
    found = []
    for tick in range(int(seconds * 10)):
        now = start + tick / 10
        if (check := book.next(HELD, now)) is not None:
            found.append((now, check))
    return found


def test_checks_are_rare_and_of_what_is_held() -> None:
    found = made(checks(), 200 * EVERY_S)
    counts = Counter(check.peer for _, check in found)
    assert set(counts) == {"a", "b"}
    assert all(180 < count < 220 for count in counts.values())
    assert {(c.layer, c.expert) for _, c in found if c.peer == "a"} == {(6, 0), (6, 3), (7, 1)}
    assert {c.alone for _, c in found} == {True, False}
    assert len({c.seed for _, c in found}) == len(found)


def test_nobody_can_foresee_them() -> None:
    """Gaps differ, and other draws give other instants."""
    instants = [[now for now, check in made(checks(seed), 20 * EVERY_S) if check.peer == "a"] for seed in (1, 2)]
    assert instants[0] != instants[1]
    gaps = [after - before for before, after in zip(instants[0], instants[0][1:], strict=False)]
    assert min(gaps) >= EVERY_S / 2
    assert max(gaps) - min(gaps) > EVERY_S / 2
    assert made(checks(1), 20 * EVERY_S) == made(checks(1), 20 * EVERY_S)


def outcome(answers: Iterable[Precision], seed: int = 0) -> list[bool]:
    book, now = checks(seed), 0.0
    convicted = []
    for answer in answers:
        while (check := book.next({"a": HELD["a"]}, now)) is None:
            now += 0.1
        convicted.append(book.found(check, answer, now))
    return convicted


@pytest.mark.parametrize(
    ("answers", "convicts"),
    [
        ([F16], False),
        ([F16] * (STRIKES - 1), False),
        ([F16] * STRIKES, True),
        ([F16, F16, F32, F16, F16], False),
        ([F16, UNKNOWN, F16, UNKNOWN, F16], True),
        ([UNKNOWN] * 20, False),
        ([F32] * 20, False),
    ],
)
def test_repeated_evidence_convicts(answers: list[Precision], convicts: bool) -> None:
    assert any(outcome(answers)) is convicts


def test_a_wrong_answer_brings_the_next_check_forward() -> None:
    book, now = checks(), EVERY_S
    check = book.next({"a": HELD["a"]}, 0.0) or book.next({"a": HELD["a"]}, now)
    assert check is not None
    book.found(check, F16, now)
    assert book.next({"a": HELD["a"]}, now + 2 * AGAIN_S) is not None


def test_who_is_gone_is_forgotten() -> None:
    book = checks()
    held = {"a": HELD["a"]}
    now = EVERY_S
    book.next(held, 0.0)
    for _ in range(STRIKES - 1):
        check = book.next(held, now)
        assert check is not None
        book.found(check, F16, now)
        now += 2 * AGAIN_S
    book.next({}, now)
    assert not book.found(check, F16, now)
    book.next(held, now)
    later = book.next(held, now + EVERY_S)
    assert later is not None
    assert not book.found(later, F16, now + EVERY_S)
