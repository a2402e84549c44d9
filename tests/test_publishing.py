"""The numeric class that a leader routes and places by: from what was measured, and what its probe found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from capabilities.agreement import Agreement
from capabilities.numeric_class import named
from swarmnode.leader.members import Member
from swarmnode.leader.publishing import numeric_class
from swarmnode.leader.routing import OWN_CLASS
from swarmnode.member_messages import Hello
from swarmnode.net.interface import PeerId
from tests.test_members import hello

AVX512, AVX2 = (named("q4_1 of 576 and 64", digest * 32) for digest in ("ab", "cd"))
BEFORE_THE_MODEL = named("the usual types", "ef" * 32)
SAME = Agreement(True, 0.0, 0.0, 0.0, 1.0)
OTHER = Agreement(False, 1e-3, 1e-4, 1e-3, 1.0)


def member(measured: str, found: Agreement | None) -> Member:
    outbox, _ = trio.open_memory_channel[object](1)
    said: Hello = replace(hello("w"), numeric_class=measured)
    return Member(PeerId("peer"), said, 0.0, outbox, agreement=found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("measured", "found", "own", "expected"),
    [
        (AVX512, SAME, [AVX512], OWN_CLASS),
        (AVX2, SAME, [AVX512], AVX2),  # the rows of a probe are too few to tell these two apart
        (AVX2, SAME, [], OWN_CLASS),
        ("", SAME, [AVX512], OWN_CLASS),
        (BEFORE_THE_MODEL, SAME, [AVX512], OWN_CLASS),  # of other work: it says nothing yet
        (AVX512, OTHER, [AVX512], AVX512),
        (AVX2, None, [AVX512], AVX2),
        ("", OTHER, [AVX512], None),
        ("", None, [], None),
    ],
)
def test_a_class_is_the_leaders_own_if_probe_and_measurement_do_not_say_otherwise(
    measured: str, found: Agreement | None, own: list[str], expected: str | None
) -> None:
    assert numeric_class(member(measured, found), own) == expected
    assert numeric_class(member(measured, found), [named("usual", "0" * 32), *own]) == expected
