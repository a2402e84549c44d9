"""The book of adverts: the newest word of each peer wins, silence tells, and nobody is blamed for our own sleep."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.advert import Advert
from capabilities.advert_content import Phase, Policy
from scheduler import advert_book
from scheduler.advert_book import MESSAGES_BURST, SUSPECT_S, TICK_S, AdvertBook, Ignored, PeerState, StateChange
from scheduler.own_word import CLONE_SECONDS_MIN
from tests.advert_tools import START, SWARM, WALL, Speaking, admit_certified, new_book, sign_as

A, B = "PeerA", "PeerB"


def states(book: AdvertBook, now: float) -> dict[str, str]:
    return {peer: view.state.value for peer, view in book.peers(now).items()}


def run(book: AdvertBook, start: float, seconds: float, *speaking: Speaking) -> tuple[float, list[StateChange]]:
    """Ticks, and heartbeats of those that speak."""
    now, changes = start, []
    while now < start + seconds:
        now += TICK_S
        changes += book.tick(now)
        if round(now - START) % 15 == 0:
            heard = [book.hear(peer.heartbeat(), now) for peer in speaking]
            changes += [each.change for each in heard if each.change is not None]
    return now, changes


# -- what is heard -----------------------------------------------------------------------------------------------------


def test_a_peer_is_known_from_its_first_advert_and_passed_on() -> None:
    book, peer = new_book(), Speaking(A)
    heard = book.hear(peer.advert(), START, WALL)
    assert heard.pass_on
    assert heard.change == StateChange(A, None, PeerState.READY)
    view = book.peer(A, START)
    assert view is not None
    assert view.advert.content == peer.content
    assert book.accepted == 1
    assert not book.ignored


def test_a_heartbeat_tells_what_has_changed_since_the_advert() -> None:
    book, peer = new_book(), Speaking(A)
    book.hear(peer.advert(), START)
    heard = book.hear(peer.heartbeat(policy=Policy(draining=True), load=800), START + 15)
    assert heard.change == StateChange(A, PeerState.READY, PeerState.DRAINING)
    view = book.peer(A, START + 16)
    assert view is not None
    assert (view.load, view.phase, view.policy.draining, view.silent_s) == (800, Phase.READY, True, 1.0)


@pytest.mark.parametrize("phase", list(Phase))
def test_a_peers_phase_is_its_state(phase: Phase) -> None:
    book = new_book()
    book.hear(Speaking(A).advert(phase=phase), START)
    assert states(book, START) == {A: phase.value}


def forged(message: bytes) -> bytes:
    return message[:-1] + bytes((message[-1] ^ 1,))


def test_whatever_is_wrong_is_ignored_and_counted_by_reason() -> None:
    book, peer = new_book(admit=admit_certified), Speaking(A, content=replace(Speaking(A).content))
    old, old_heartbeat = peer.advert(), peer.heartbeat()
    newest, beat = peer.advert(), peer.heartbeat()
    assert book.hear(newest, START).pass_on
    assert book.hear(beat, START).pass_on
    other_swarm = Speaking(B, swarm="77" * 32)
    cases = [
        (b"", Ignored.MALFORMED),
        (b"\1", Ignored.MALFORMED),
        (b"\1\0junk", Ignored.MALFORMED),
        (b"\1\1junk", Ignored.MALFORMED),
        (b"\1\7junk", Ignored.MALFORMED),
        (b"\1\0" + b"x" * 8_193, Ignored.OVERSIZED),
        (b"\2\0whatever", Ignored.OTHER_FORMAT),
        (b"\x80 junk", Ignored.MALFORMED),
        (other_swarm.advert(), Ignored.OTHER_SWARM),
        (other_swarm.heartbeat(), Ignored.OTHER_SWARM),
        (forged(Speaking(B).advert()), Ignored.SIGNATURE),
        (forged(peer.heartbeat()), Ignored.SIGNATURE),
        (Speaking(B, content=replace(peer.content, membership=b"")).advert(), Ignored.NOT_A_MEMBER),
        (old, Ignored.OLDER),
        (old_heartbeat, Ignored.OLDER),
        (newest, Ignored.REPLAY),
        (beat, Ignored.REPLAY),
        (Speaking(B, sequence=9).heartbeat(), Ignored.UNKNOWN_PEER),
    ]
    for message, reason in cases:
        before = book.ignored[reason]
        heard = book.hear(message, START + 1)
        assert (heard.ignored, heard.pass_on, heard.change) == (reason, False, None), reason
        assert book.ignored[reason] == before + 1
    assert list(book.peers(START + 2)) == [A]


def test_another_peers_signature_under_an_advert_counts_for_nothing() -> None:
    book = new_book()
    stolen = Speaking(A).make(5)
    signed_by_b = replace(stolen, signature=sign_as(B, stolen.payload))
    assert book.hear(advert_book.advert_message(signed_by_b), START).ignored is Ignored.SIGNATURE


def test_an_unknown_peers_heartbeat_makes_its_advert_wanted() -> None:
    book, peer = new_book(), Speaking(A, sequence=3)
    assert book.hear(peer.heartbeat(), START).wanted == A
    assert book.hear(forged(peer.heartbeat()), START).wanted is None
    assert book.hear_advert(peer.make(3).to_bytes(), START).change is not None
    peer.sequence, peer.beat = 4, 0  # its next advert was lost
    heard = book.hear(peer.heartbeat(), START + 15)
    assert (heard.wanted, heard.pass_on) == (A, True)


def test_a_flood_of_signed_words_ends_here_and_a_usual_pace_does_not() -> None:
    book, peer = new_book(), Speaking(A)
    accepted = sum(book.hear(peer.advert(), START + index / 100).pass_on for index in range(100))
    assert accepted == MESSAGES_BURST
    assert book.ignored[Ignored.TOO_OFTEN] == 100 - MESSAGES_BURST
    usual, now = Speaking(B), START
    for _ in range(40):
        assert book.hear(usual.advert(), now).pass_on
        assert book.hear(usual.heartbeat(), now + 5).pass_on
        now += 15


def test_a_goodbye_is_heard_from_who_has_said_too_much_and_only_one() -> None:
    book, peer = new_book(), Speaking(A)
    for _ in range(MESSAGES_BURST + 1):
        book.hear(peer.advert(), START)
    assert book.hear(peer.heartbeat(), START).ignored is Ignored.TOO_OFTEN
    assert book.hear(peer.heartbeat(leaving=True), START).change == StateChange(A, PeerState.READY, PeerState.GONE)
    assert book.hear(peer.heartbeat(leaving=True), START).ignored is Ignored.TOO_OFTEN


@given(st.permutations(range(12)), st.lists(st.integers(0, 11), max_size=12))
def test_in_whatever_order_messages_come_the_newest_stays(order: list[int], repeated: list[int]) -> None:
    book, peer = new_book(), Speaking(A)
    messages = [peer.advert(name=f"n{index}") if index % 3 == 0 else peer.heartbeat(load=index) for index in range(12)]
    now = START
    for index in [*order, *repeated]:
        now += 6  # within the rate
        book.hear(messages[index], now)
    view = book.peer(A, now)
    assert view is not None
    assert view.advert.content.name == "n9"
    assert view.advert.sequence == 4
    # A heartbeat counts only if its peer was known by then, so the last one may have been lost; never an older load.
    before = [index for index in order[: order.index(11)] if index % 3 == 0]
    assert view.load == 11 or not before


@given(st.integers(0, 2**32))
def test_no_sequence_of_messages_brings_a_peer_back_in_time(seed: int) -> None:
    chance = random.Random(seed)
    book, peers = new_book(), [Speaking(A), Speaking(B)]
    said: list[bytes] = []
    highest = {A: (0, 0), B: (0, 0)}
    now = START
    for _ in range(60):
        now += chance.uniform(0, 30)
        peer = chance.choice(peers)
        if chance.random() < 0.5 and said:
            book.hear(chance.choice(said), now)
        else:
            said.append(peer.advert() if chance.random() < 0.3 else peer.heartbeat())
            book.hear(said[-1], now)
        book.tick(now)
        for name, known in book.notes(now):
            assert known.newest >= highest[name]
            highest[name] = known.newest


# -- silence -----------------------------------------------------------------------------------------------------------


def test_a_vanished_peer_is_suspect_then_gone_and_the_other_is_not() -> None:
    book, one, other = new_book(), Speaking(A), Speaking(B)
    book.hear(one.advert(), START)
    book.hear(other.advert(), START)
    now, changes = run(book, START, 60, one, other)
    assert changes == []
    now, changes = run(book, now, 45, other)
    assert changes == []
    now, changes = run(book, now, 10, other)
    assert changes == [StateChange(A, PeerState.READY, PeerState.SUSPECT)]
    now, changes = run(book, now, 100, other)
    assert changes == [StateChange(A, PeerState.SUSPECT, PeerState.GONE)]
    now, changes = run(book, now, 20, one, other)
    assert changes == [StateChange(A, PeerState.GONE, PeerState.READY)]


def test_a_peer_that_says_goodbye_is_gone_at_once_and_replays_do_not_bring_it_back() -> None:
    book, peer = new_book(), Speaking(A)
    first, beat = peer.advert(), peer.heartbeat()
    book.hear(first, START)
    book.hear(beat, START + 1)
    heard = book.hear(peer.heartbeat(leaving=True), START + 2)
    assert heard.change == StateChange(A, PeerState.READY, PeerState.GONE)
    assert book.hear(first, START + 3).ignored is Ignored.EXPIRED
    assert book.hear(beat, START + 4).ignored is Ignored.REPLAY
    assert states(book, START + 5) == {A: "gone"}
    assert book.hear(peer.advert(), START + 9).change == StateChange(A, PeerState.GONE, PeerState.READY)


def test_an_expired_advert_is_told_from_a_replay() -> None:
    book, peer = new_book(), Speaking(A)
    message = peer.advert()
    book.hear(message, START)
    assert book.hear(message, START + 1).ignored is Ignored.REPLAY
    now, _ = run(book, START + 1, peer.lifetime_s + 1)
    assert book.hear(message, now).ignored is Ignored.EXPIRED


def test_a_lifetime_goes_on_when_an_advert_comes_from_a_third_party() -> None:
    book, peer = new_book(), Speaking(A)
    assert book.hear_advert(peer.make(1).to_bytes(), START, age_s=120).ignored is Ignored.EXPIRED
    heard = book.hear_advert(peer.make(1).to_bytes(), START, age_s=60)
    assert heard.change == StateChange(A, None, PeerState.SUSPECT)
    assert book.hear_advert(peer.make(2).to_bytes(), START, age_s=100).change is None  # it was heard since
    _, changes = run(book, START, 70)
    assert changes == [StateChange(A, PeerState.SUSPECT, PeerState.GONE)]


@pytest.mark.parametrize("pause_s", [30.0, 60.0, 3_600.0])
def test_our_own_sleep_blames_nobody(pause_s: float) -> None:
    book, peer = new_book(), Speaking(A)
    book.hear(peer.advert(), START)
    now, _ = run(book, START, 40, peer)
    now += pause_s  # SIGSTOP; then the ticks go on before the unread heartbeats are read
    assert book.tick(now) == []
    now, changes = run(book, now, 20, peer)
    assert changes == []
    now, changes = run(book, now, SUSPECT_S + 20)  # but a silence that we were awake for counts
    assert [change.after for change in changes] == [PeerState.SUSPECT]


def test_an_overloaded_node_is_slow_to_judge() -> None:
    book, peer = new_book(), Speaking(A)
    book.hear(peer.advert(), START)
    now = START
    for _ in range(10):
        now += 10 * TICK_S  # ticks come ten times too late, and so would heartbeats
        assert book.tick(now) == []


@pytest.mark.parametrize("moment_s", [3.0, 20.0, 45.0])
def test_a_node_that_runs_for_moments_only_blames_nobody_who_speaks_and_misses_who_does_not(moment_s: float) -> None:
    book, alive, dead = new_book(), Speaking(A), Speaking(B)
    book.hear(alive.advert(), START)
    book.hear(dead.advert(), START)
    now, said, changes = START, 0, []
    while now < START + 40 * SUSPECT_S:
        now += moment_s  # then it ticks first, and reads what has come meanwhile
        changes += book.tick(now)
        for _ in range(said, int((now - START) // 15)):
            book.hear(alive.heartbeat(), now)
        said = int((now - START) // 15)
    assert {change.peer for change in changes} == {B}
    assert changes[0].after is PeerState.SUSPECT


# -- oneself, and copies -----------------------------------------------------------------------------------------------


def test_a_higher_number_of_ones_own_is_jumped_past() -> None:
    book = new_book(me=A)
    before = Speaking(A, instance=b"dead", sequence=500)
    assert book.hear(before.advert(), START).ignored is Ignored.OWN
    assert book.own.sequence == 501
    assert book.own.next() == 502
    assert book.peers(START) == {}
    assert not book.own_is_cloned(START)


def test_old_words_of_an_instance_before_are_no_clone_even_if_replayed() -> None:
    book = new_book(me=A)
    before = Speaking(A, instance=b"dead", sequence=500)
    said = [before.advert(), before.heartbeat(), before.heartbeat()]
    now = START
    for _ in range(50):
        for message in said:
            now += 7
            book.hear(message, now)
            book.tick(now)
    assert not book.own_is_cloned(now)


def test_a_copy_of_ones_own_identity_is_noticed_and_forged_ones_are_not() -> None:
    book, copy = new_book(me=A), Speaking(A, instance=b"copy", sequence=500)
    now = START
    for _ in range(3):
        now += CLONE_SECONDS_MIN / 2
        for moment in range(10):
            book.tick(now - 9 + moment)
        book.hear(forged(copy.heartbeat()), now)
    assert not book.own_is_cloned(now)
    now, _ = run(book, now, 60, copy)
    assert book.own_is_cloned(now)
    now, _ = run(book, now, 1_000)
    assert not book.own_is_cloned(now)


def cloned(book: AdvertBook, now: float) -> list[str]:
    return [peer for peer, known in book.notes(now) if known.cloned is not None]


def test_two_daemons_that_use_one_identity_in_turn_are_noticed_and_restarts_are_not() -> None:
    book = new_book()
    now = START
    for number in range(1, 8):  # restarts
        now += 15
        book.hear(Speaking(A, instance=b"in%02d" % number, sequence=number).advert(), now)
    assert cloned(book, now) == []
    one, two = Speaking(B, instance=b"one1"), Speaking(B, instance=b"two2")
    for sequence, speaking in enumerate((one, two, one), start=10):
        assert cloned(book, now) == []
        now += 15
        speaking.sequence = sequence
        assert book.hear(speaking.advert(), now).pass_on
    assert cloned(book, now) == [B]
    now, _ = run(book, now, 1_000, one)
    assert cloned(book, now) == []


def test_two_words_under_one_number_are_a_copied_identity_if_both_are_signed() -> None:
    book, peer = new_book(), Speaking(A)
    book.hear(peer.advert(), START)
    other = advert_book.advert_message(Speaking(A).make(1, name="other"))
    assert book.hear(forged(other), START + 1).ignored is Ignored.SIGNATURE
    assert cloned(book, START + 1) == []
    assert book.hear(other, START + 2).ignored is Ignored.CONFLICT
    assert cloned(book, START + 2) == [A]
    view = book.peer(A, START + 3)
    assert view is not None
    assert view.advert.content.name == "laptop-of-ann"


def test_a_heartbeat_of_another_instance_under_the_same_number_is_a_copy_too() -> None:
    book, peer = new_book(), Speaking(A)
    book.hear(peer.advert(), START)
    copy = Speaking(A, instance=b"copy", sequence=1)
    heard = book.hear(copy.heartbeat(), START + 1)
    assert heard.ignored is Ignored.CONFLICT
    assert cloned(book, START + 1) == [A]
    assert heard.pass_on, "or its other copy would not hear of it"
    peer.beat = 9
    assert book.hear(peer.heartbeat(), START + 2).pass_on
    assert book.hear(copy.heartbeat(), START + 3).ignored is Ignored.CONFLICT, "whichever of the two counts further"
    assert not book.hear(forged(copy.heartbeat()), START + 4).pass_on
    passed = sum(book.hear(copy.heartbeat(), START + 5).pass_on for _ in range(50))
    assert passed < advert_book.MESSAGES_BURST, "within what a peer may say"


# -- bounds, membership ------------------------------------------------------------------------------------------------


def test_the_book_is_bounded_and_makes_room_by_forgetting_who_is_gone_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advert_book, "PEERS_MAX", 3)
    book = new_book()
    speaking = [Speaking(name) for name in ("PeerA", "PeerB", "PeerC", "PeerD")]
    for each in speaking[:3]:
        book.hear(each.advert(), START)
    assert book.hear(speaking[3].advert(), START + 1).ignored is Ignored.FULL
    book.hear(speaking[1].heartbeat(leaving=True), START + 2)
    book.hear(speaking[2].heartbeat(leaving=True), START + 3)
    assert book.hear(speaking[3].advert(), START + 4).pass_on
    assert list(book.peers(START + 5)) == ["PeerA", "PeerC", "PeerD"]


def test_who_is_no_member_any_more_is_forgotten() -> None:
    banned: set[str] = set()

    def admit(advert: Advert) -> None:
        if advert.peer in banned:
            raise advert_book.PeerMistake("banned")

    book = new_book(admit=admit)
    book.hear(Speaking(A).advert(), START)
    book.hear(Speaking(B).advert(), START)
    assert book.recheck(START + 1) == []
    banned.add(A)
    assert book.recheck(START + 2) == [StateChange(A, PeerState.READY, PeerState.GONE)]
    assert list(book.peers(START + 3)) == [B]
    assert book.hear(Speaking(A, sequence=7).advert(), START + 4).ignored is Ignored.NOT_A_MEMBER


def test_sequences_leave_out_who_is_gone() -> None:
    book, one, other = new_book(), Speaking(A, sequence=6), Speaking(B)
    book.hear(one.advert(), START)
    book.hear(other.advert(), START)
    book.hear(other.heartbeat(leaving=True), START + 1)
    assert book.sequences(START + 2) == {A: 7}
    assert book.swarm == SWARM
