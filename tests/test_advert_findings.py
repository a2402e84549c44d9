"""What is wrong around here, by name: copied identities, clocks, wire versions, addresses that nobody answers at."""

from __future__ import annotations

from dataclasses import replace

from capabilities.precision import MeasuredPrecision, Precision
from scheduler.advert_book import AdvertBook
from scheduler.advert_findings import Finding, FindingKind, Unreached, findings
from tests.advert_tools import START, WALL, Speaking, new_book

WIRE = 2


def found(book: AdvertBook, unreached: Unreached | None = None, now: float = START + 1) -> list[Finding]:
    return list(findings(book, WIRE, unreached or Unreached(), now))


def kinds(book: AdvertBook, unreached: Unreached | None = None) -> list[tuple[str, str | None]]:
    return [(finding.kind.value, finding.peer) for finding in found(book, unreached)]


def hear(book: AdvertBook, *speaking: Speaking) -> None:
    for each in speaking:
        assert book.hear(each.advert(), START, WALL).pass_on


def test_nothing_is_wrong_in_a_good_swarm() -> None:
    book = new_book()
    hear(book, Speaking("PeerA"), Speaking("PeerB", clock_s=WALL - 20), Speaking("PeerC", clock_s=WALL + 20))
    assert found(book) == []


def test_a_skewed_clock_is_named_with_its_skew() -> None:
    book = new_book()
    hear(book, Speaking("PeerA"), Speaking("PeerB", clock_s=WALL - 7_200), Speaking("PeerC"), Speaking("PeerD"))
    (finding,) = found(book)
    assert (finding.kind, finding.peer) == (FindingKind.SKEWED_CLOCK, "PeerB")
    assert "7,200 s behind this node's clock" in finding.message
    assert finding.to_json()["kind"] == "skewed_clock"


def test_where_most_clocks_differ_it_is_ones_own() -> None:
    book = new_book(me="Me")
    hear(book, *(Speaking(f"Peer{name}", clock_s=WALL + 300) for name in "ABC"), Speaking("PeerD"))
    assert kinds(book) == [("skewed_clock", "Me"), ("skewed_clock", "PeerD")]
    own, other = found(book)
    assert "this node's clock is 300 s behind most" in own.message
    assert "300 s behind most peers' clocks" in other.message


def test_of_two_clocks_each_side_names_the_other() -> None:
    book = new_book()
    hear(book, Speaking("PeerA", clock_s=WALL + 300))
    assert kinds(book) == [("skewed_clock", "PeerA")]


def test_a_clock_is_not_judged_by_an_advert_that_took_another_way() -> None:
    book = new_book()
    book.hear_advert(Speaking("PeerA", clock_s=WALL - 900).make(1).to_bytes(), START)
    assert found(book) == []


def test_a_clock_is_not_judged_by_what_lay_unread_while_this_process_slept() -> None:
    book = new_book()
    now = START
    for _ in range(20):
        now += 1
        book.tick(now)
    now += 900
    assert book.hear(Speaking("PeerA", clock_s=WALL - 900).advert(), now, WALL).pass_on
    assert found(book, now=now) == []
    for _ in range(20):
        now += 1
        book.tick(now)
    assert book.hear(Speaking("PeerA", sequence=1, clock_s=WALL - 900).advert(), now, WALL).pass_on
    assert [finding.kind.value for finding in found(book, now=now)] == ["skewed_clock"]


def test_other_versions_are_named() -> None:
    book = new_book()
    content = Speaking("PeerA").content
    assert book.hear(Speaking("PeerA").advert(wire=3), START).pass_on
    for _ in range(3):
        book.hear(b"\2\0 an advert of a later format", START)
    assert kinds(book) == [("wire_version", "PeerA"), ("wire_version", None)]
    one, other = found(book)
    assert content.version in one.message
    assert "format 2" in other.message


def test_both_sides_hear_of_an_unreachable_address() -> None:
    unreached = Unreached()
    unreached.failed("PeerA", "/ip4/10.0.0.1/tcp/4100", "no answer for 10 s")
    unreached.failed("Stranger", "/ip4/10.0.0.9/tcp/4100", "refused")
    dialer = new_book()
    hear(dialer, Speaking("PeerA"))
    assert kinds(dialer, unreached) == [("unreachable", "PeerA")]
    assert "no answer for 10 s" in found(dialer, unreached)[0].message

    dialed = new_book(me="PeerA")
    assert dialed.hear(Speaking("PeerB").advert(not_reached=unreached.peers), START).pass_on
    assert kinds(dialed) == [("unreachable", "PeerA")]

    unreached.reached("PeerA")
    assert kinds(dialer, unreached) == []


def test_a_peer_that_starts_anew_is_told_apart_from_one_that_goes_on() -> None:
    book = new_book()
    for instance, sequence, new in ((b"one1", 1, True), (b"one1", 2, False), (b"two2", 3, True)):
        word = Speaking("PeerA", instance=instance, sequence=sequence).advert()
        assert book.hear(word, START + 10 * sequence).new_process is new


def test_a_copied_identity_is_named_on_both_sides() -> None:
    others, owner = new_book(), new_book(me="PeerA")
    one, two = Speaking("PeerA", instance=b"one1", sequence=200), Speaking("PeerA", instance=b"two2", sequence=201)
    for now, speaking in ((START, one), (START + 15, two)):
        others.hear(speaking.advert(), now)
    one.sequence = 202
    others.hear(one.advert(), START + 30)
    assert [finding.peer for finding in found(others, now=START + 31)] == ["PeerA"]
    now = START
    for _ in range(40):
        now += 1
        owner.tick(now)
        if round(now) % 10 == 0:
            owner.hear(two.heartbeat(), now)
    (finding,) = found(owner, now=now)
    assert (finding.kind, finding.peer) == (FindingKind.CLONED_IDENTITY, "PeerA")


def test_a_claim_that_the_probe_contradicts_is_named_by_the_peer_itself_and_by_others() -> None:
    (backend,) = Speaking("PeerA").content.backends
    boast = replace(backend, accumulation=MeasuredPrecision(Precision.F32, Precision.F16, Precision.F32))
    others = new_book()
    assert others.hear(Speaking("PeerA").advert(backends=(boast,)), START).pass_on
    (finding,) = found(others)
    assert (finding.kind, finding.peer) == (FindingKind.PRECISION, "PeerA")
    assert "ggml-cpu declares f32 for its accumulation, but f16 was measured" in finding.message
    (own,) = findings(new_book(me="Me"), WIRE, Unreached(), START, (boast,))
    assert (own.kind, own.peer) == (FindingKind.PRECISION, "Me")


def test_what_is_remembered_of_unreached_peers_is_bounded() -> None:
    unreached = Unreached()
    for index in range(1_000):
        unreached.failed(f"Peer{index:04d}", "x" * 5_000, "no")
    assert len(unreached.peers) == 8
    assert len(unreached.reason("Peer0000") or "") <= 200
    assert unreached.reason("Peer0999") is None
