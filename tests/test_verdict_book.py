"""Signed verdicts: of any number, in any order and from anybody, the newest true one of each peer is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capabilities.backbone import BackboneSet
from capabilities.certificates import Certificate, Mandate, Vote
from capabilities.errors import PeerMistake
from capabilities.verdict import Evidence, Fitness, Verdict
from scheduler.election_state import DamagedState
from swarmnode import limits
from swarmnode.identity import Identity, verify
from swarmnode.swarm.ownership import OwnerChain
from swarmnode.swarm.record import SwarmRecord
from swarmnode.swarm.verdict_book import PIECE_BYTES_MAX, Ignored, SignedVerdict, VerdictBook
from tests.swarm_members import Founder, quick_keys

SUBJECTS = [Identity.generate().peer_id for _ in range(3)]
EVIDENCE = (Evidence("audit", "rows of another function", 2, 5, "q4_K", 0.5, 0.7, 0.02, 3, 1_700_000_000),)


def mandate_of(founder: Founder, term: int, backbone: BackboneSet | None = None) -> Mandate:
    """The founder elects itself."""
    identity, backbone = founder.identity, backbone or founder.record.backbone
    vote = Vote.cast(backbone.swarm, backbone.version, term, identity.peer_id, identity.peer_id, identity.sign)
    return Mandate(Certificate.of([vote]), backbone)


def signed(founder: Founder, subject: str, term: int, sequence: int, fitness: Fitness = "quarantined") -> SignedVerdict:
    verdict = Verdict(subject, fitness, EVIDENCE, sequence, 1, term, sequence)
    return SignedVerdict.make(founder.record.swarm, verdict, mandate_of(founder, term), founder.identity.sign)


@pytest.fixture(scope="module")
def founder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Founder]:
    with quick_keys():
        yield Founder.make(tmp_path_factory.mktemp("founder"))


@pytest.fixture
def record(founder: Founder) -> SwarmRecord:
    return founder.record


NUMBERS = st.tuples(st.sampled_from(SUBJECTS), st.integers(1, 3), st.integers(1, 3))


@settings(max_examples=25, deadline=None)
@given(st.lists(NUMBERS, max_size=12))
def test_in_any_order_the_newest_of_each_peer_stands(
    founder: Founder, record: SwarmRecord, numbers: list[tuple[str, int, int]]
) -> None:
    book = VerdictBook(verify)
    heard = [book.hear(signed(founder, *each), record) for each in numbers]
    for subject in SUBJECTS:
        newest = max(((term, sequence) for peer, term, sequence in numbers if peer == subject), default=None)
        found = book.of(subject)
        assert (None if found is None else found.order) == newest
    assert sum(book.ignored.values()) == sum(each is not None for each in heard)
    assert set(book.ignored) <= {Ignored.KNOWN, Ignored.OLDER}


def test_what_is_not_the_leaders_word_is_ignored_and_counted(founder: Founder, record: SwarmRecord) -> None:
    true, other, stranger = signed(founder, SUBJECTS[0], 3, 1), Identity.generate(), Identity.generate()
    quick = Founder.make(founder.store.files.data / "elsewhere")
    forged_vote = Vote.cast(record.swarm, 1, 3, stranger.peer_id, stranger.peer_id, stranger.sign)
    upstart = Mandate(Certificate.of([forged_vote]), record.backbone)
    milder = replace(true.verdict, fitness="fit")
    cases = [
        (replace(true, verdict=milder), Ignored.FORGED),
        (SignedVerdict.make(record.swarm, true.verdict, true.mandate, other.sign), Ignored.FORGED),
        (replace(true, mandate=mandate_of(founder, 2)), Ignored.FORGED),
        (SignedVerdict.make(record.swarm, true.verdict, upstart, stranger.sign), Ignored.STRANGER),
        (signed(quick, SUBJECTS[0], 3, 1), Ignored.FOREIGN),
        (replace(signed(quick, SUBJECTS[0], 3, 1), swarm=record.swarm), Ignored.FOREIGN),
    ]
    book = VerdictBook(verify)
    for wrong, why in cases:
        assert book.hear(SignedVerdict.from_bytes(wrong.to_bytes()), record) is why
    assert book.of(SUBJECTS[0]) is None
    assert sum(book.ignored.values()) == len(cases)
    assert book.hear(true, record) is None
    assert book.hear(true, record) is Ignored.KNOWN
    assert book.hear(signed(founder, SUBJECTS[0], 2, 9), record) is Ignored.OLDER
    assert book.of(SUBJECTS[0]) == true.verdict


def test_a_quorum_of_a_backbone_that_the_owner_never_signed_is_none(founder: Founder, record: SwarmRecord) -> None:
    own = BackboneSet(record.swarm, 2, record.backbone.digest, record.backbone.members, b"\1" * 64)
    verdict = Verdict(SUBJECTS[0], "quarantined", EVIDENCE, 0, 6, 7, 1)
    forged = SignedVerdict.make(record.swarm, verdict, mandate_of(founder, 7, own), founder.identity.sign)
    assert VerdictBook(verify).hear(forged, record) is Ignored.FORGED


@given(st.binary(max_size=300))
def test_bytes_of_strangers_are_mistakes_and_counted(data: bytes) -> None:
    book = VerdictBook(verify)
    with pytest.raises(PeerMistake):
        book.parse(data)
    with pytest.raises(PeerMistake):
        book.parse(bytes(PIECE_BYTES_MAX + 1))
    assert book.ignored == {Ignored.MALFORMED: 1, Ignored.OVERSIZED: 1}


def test_a_banned_leaders_word_does_not_count(founder: Founder, tmp_path: Path) -> None:
    with quick_keys():
        alone = Founder.make(tmp_path)
    true = signed(alone, SUBJECTS[0], 1, 1)
    book = VerdictBook(verify)
    assert book.hear(true, alone.record) is None
    assert [each.verdict for each in book.all(alone.record)] == [true.verdict]
    alone.ban(alone.identity.peer_id)
    assert book.all(alone.record) == ()
    assert VerdictBook(verify).hear(true, alone.record) is Ignored.STRANGER


def test_a_full_book_forgets_the_oldest_that_says_fit(
    founder: Founder, record: SwarmRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "VERDICTS_MAX", 2)
    book = VerdictBook(verify)
    book.hear(signed(founder, SUBJECTS[0], 1, 1, "quarantined"), record)
    book.hear(signed(founder, SUBJECTS[1], 1, 2, "fit"), record)
    book.hear(signed(founder, SUBJECTS[2], 1, 3, "fit"), record)
    assert [book.of(subject) is not None for subject in SUBJECTS] == [True, False, True]


def test_a_file_brings_back_what_was_in_it(founder: Founder, record: SwarmRecord) -> None:
    book, again = VerdictBook(verify), VerdictBook(verify)
    for each in (signed(founder, SUBJECTS[0], 1, 1), signed(founder, SUBJECTS[1], 2, 1, "unfit")):
        book.hear(each, record)
    data = book.to_file()
    again.hear(newer := signed(founder, SUBJECTS[0], 2, 5), record)
    again.load(data, record.swarm)
    assert again.of(SUBJECTS[0]) == newer.verdict
    assert again.of(SUBJECTS[1]) == book.of(SUBJECTS[1])
    (elsewhere := VerdictBook(verify)).load(data, "0" * 64)
    assert len(elsewhere) == 0
    for damaged in (data[:-1], data[:20] + b"x" + data[21:], b""):
        with pytest.raises(DamagedState):
            VerdictBook(verify).load(damaged, record.swarm)


def test_a_verdict_by_a_mandate_of_an_owner_key_that_nobody_knows_is_forged(founder: Founder) -> None:
    record = founder.record
    stranger = replace(record, chain=OwnerChain(bytes(32), record.chain.salt))
    assert VerdictBook(verify).hear(signed(founder, SUBJECTS[0], 1, 1), stranger) is Ignored.FORGED
