"""The election's machine by itself: its table, its messages' bytes, its file, and any events in any order.

What it does in conversation is in test_election_conversations.py, what swarms of it do under faults in
test_simulator.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capabilities.backbone import MEMBERS_MAX, Enactment, Stored
from capabilities.certificates import Mandate
from capabilities.errors import PeerMistake, UsageError
from capabilities.packing import PEER_ID_CHARS_MAX
from scheduler import election_roles, election_times
from scheduler.election import Election
from scheduler.election_messages import (
    MESSAGE_BYTES_MAX,
    BackboneUpdate,
    Heartbeat,
    HeartbeatReply,
    Message,
    PreVoteReply,
    PreVoteRequest,
    TimeoutNow,
    VoteReply,
    VoteRequest,
    from_plain,
    to_plain,
)
from scheduler.election_roles import TRANSITIONS, Cause, Role, draw_transitions
from scheduler.election_state import NOTHING, Ballot, DamagedState, HardState, LeaderChanged, Ready
from swarmnode.limits import HEADER_BYTES_MAX
from tests.election_tools import (
    SWARM,
    backbone_of,
    certificate_of,
    enactment_of,
    keys_of,
    member,
    sign_as,
    vote_file,
    vote_of,
)

A, B, C, D = "A", "B", "C", "D"
THREE = backbone_of((A, B, C))
FOUR = backbone_of((A, B, C, D), THREE)
MANDATE = Mandate(certificate_of(B, (A, B), 3), THREE)


# --- The table and the times ------------------------------------------------------------------------------------------


def test_the_diagram_is_drawn_from_the_table() -> None:
    assert election_roles.__doc__ is not None
    assert "\n".join(f"    {line}" for line in draw_transitions()) in election_roles.__doc__


def test_the_table_is_sound() -> None:
    assert {role for role, _ in TRANSITIONS} == set(Role)
    assert {cause for _, cause in TRANSITIONS} == set(Cause)
    assert all(after is Role.OUTSIDER for (_, cause), after in TRANSITIONS.items() if cause is Cause.UNSEATED)
    assert [role for (role, _), after in TRANSITIONS.items() if after is Role.LEADER] == [Role.CANDIDATE]


def test_times_fit_together() -> None:
    times = election_times
    assert times.TICK_S <= times.HEARTBEAT_S
    assert 4 * times.HEARTBEAT_S < times.LEASE_S < times.ELECTION_S_MIN < times.ELECTION_S_MAX
    assert times.STRETCH_S < times.LEASE_S
    assert times.ELECTION_S_MAX + times.ROUND_S_MAX + 2 * times.TICK_S <= 3.0  # one failed round is in the budget


# --- Messages ---------------------------------------------------------------------------------------------------------

MESSAGES: list[Message] = [
    PreVoteRequest(1, 4, None, MANDATE),
    PreVoteRequest(1, 6, vote_of(C, C, 5), None),
    PreVoteReply(1, 4, True, None, None),
    PreVoteReply(2, 4, False, vote_of(A, B, 9), MANDATE),
    VoteRequest(1, 4, True, None, MANDATE),
    VoteReply(1, 4, vote_of(A, B, 4), None),
    VoteReply(1, 4, None, MANDATE),
    Heartbeat(1, 3, 2**40, None),
    Heartbeat(1, 3, 1, MANDATE),
    HeartbeatReply(1, 3, 1, True, False, None),
    HeartbeatReply(1, 3, 1, False, True, MANDATE),
    TimeoutNow(1, 3),
    BackboneUpdate(None, None, ()),
    BackboneUpdate(Enactment.of_first(THREE), FOUR, (Stored.make(FOUR, A, 7, sign_as(A)),)),
    BackboneUpdate(enactment_of(THREE, FOUR, (A, B, D)), None, ()),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_survive_the_wire(message: Message) -> None:
    assert from_plain(msgpack.unpackb(msgpack.packb(to_plain(message)))) == message


def test_golden_messages() -> None:
    assert msgpack.packb(to_plain(Heartbeat(1, 3, 300, None))) == b"\x95\x04\x01\x03\xcd\x01\x2c\xc4\x00"
    assert [to_plain(message)[0] for message in MESSAGES] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 7, 7]


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64 - 1) | st.binary(max_size=20) | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(_values | st.tuples(st.integers(-1, 9), st.lists(_values, max_size=8)).map(lambda pair: [pair[0], *pair[1]]))
def test_anything_from_the_wire_is_a_message_or_a_mistake(value: Any) -> None:
    try:
        message = from_plain(value)
    except PeerMistake:
        return
    assert msgpack.packb(to_plain(message)) == msgpack.packb(value)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MESSAGES), st.integers(0, 6), _values)
def test_a_spoiled_field_is_a_mistake(message: Message, at: int, value: Any) -> None:
    plain = list(to_plain(message))
    plain[at % len(plain)] = value
    with contextlib.suppress(PeerMistake):
        assert msgpack.packb(to_plain(from_plain(plain))) == msgpack.packb(plain)


def test_the_longest_message_fits_a_header() -> None:
    """With every field as long as may be: nine members of 64 characters, words of ten, the largest numbers."""
    peers = [letter + "z" * (PEER_ID_CHARS_MAX - 1) for letter in "ABCDEFGHJK"]
    eight, term = backbone_of(peers[: MEMBERS_MAX - 1]), 2**63 - 1
    nine = backbone_of(peers[:MEMBERS_MAX], eight)
    words = [Stored.make(nine, peer, term, sign_as(peer)) for peer in peers]
    longest = BackboneUpdate(Enactment(eight, nine, tuple(words)), nine, tuple(words))
    assert len(msgpack.packb(to_plain(longest))) <= MESSAGE_BYTES_MAX <= HEADER_BYTES_MAX
    assert from_plain(to_plain(longest)) == longest
    nines = Mandate(certificate_of(peers[0], peers[:MEMBERS_MAX], term, term), nine)
    request = VoteRequest(term, term, True, vote_of(peers[0], peers[1], term, term), nines)
    assert len(msgpack.packb(to_plain(request))) <= 3 * 1024


# --- The vote file ----------------------------------------------------------------------------------------------------

STATES = [
    HardState(SWARM, vote_file(A)),
    HardState(SWARM, vote_file(A), Ballot(1, 4, B)),
    HardState(
        SWARM,
        vote_file(A),
        Ballot(2, 4, B),
        MANDATE,
        enactment_of(THREE, FOUR, (A, B, D)),
        backbone_of((A, B, C), FOUR),
    ),
]


@pytest.mark.parametrize("state", STATES)
def test_the_vote_file_is_read_as_written(state: HardState) -> None:
    assert HardState.from_file(state.to_file()) == state


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(STATES), st.data())
def test_a_torn_vote_file_is_never_taken_for_an_older_one(state: HardState, data: st.DataObject) -> None:
    new, old = state.to_file(), data.draw(st.sampled_from(STATES)).to_file()
    cut = data.draw(st.integers(0, len(new)))
    torn = new[:cut] + old[cut:]
    if torn in (new, old):
        return
    with pytest.raises(DamagedState):
        HardState.from_file(torn)


# --- Any events -------------------------------------------------------------------------------------------------------


def start(peer: str = A, state: HardState | None = None) -> Election:
    state = state or HardState(SWARM, vote_file(peer), enactment=Enactment.of_first(THREE))
    return Election(peer, state, keys_of(peer), lambda: 0.5, 0.0)


_terms = st.integers(0, 6) | st.sampled_from([1_000, 2_000, 2**63 - 1])
_mandates = st.none() | st.builds(
    lambda leader, voters, term: Mandate(certificate_of(leader, sorted(voters), term), THREE),
    st.sampled_from((A, B, C, D)),
    st.sets(st.sampled_from((A, B, C, D)), min_size=1),
    st.integers(1, 6),
)
_votes = st.none() | st.builds(vote_of, st.sampled_from((A, B, C, D)), st.sampled_from((A, B)), st.integers(1, 6))
_messages = st.one_of(
    st.builds(PreVoteRequest, st.integers(0, 3), _terms, _votes, _mandates),
    st.builds(PreVoteReply, st.integers(0, 3), _terms, st.booleans(), _votes, _mandates),
    st.builds(VoteRequest, st.integers(0, 3), _terms, st.booleans(), _votes, _mandates),
    st.builds(VoteReply, st.integers(0, 3), _terms, _votes, _mandates),
    st.builds(Heartbeat, st.integers(0, 3), _terms, st.integers(0, 9), _mandates),
    st.builds(HeartbeatReply, st.integers(0, 3), _terms, st.integers(0, 9), st.booleans(), st.booleans(), _mandates),
    st.builds(TimeoutNow, st.integers(0, 3), _terms),
    st.sampled_from([message for message in MESSAGES if isinstance(message, BackboneUpdate)]),
)
_events = st.one_of(
    st.tuples(st.just("tick"), st.floats(0, 3)),
    st.tuples(st.just("receive"), st.sampled_from((B, C, D, "stranger")), _messages),
    st.tuples(st.just("report"), st.booleans(), st.booleans()),
    st.tuples(st.just("hand_over")),
    st.tuples(st.just("restart")),
)


def _promises(state: HardState) -> tuple[int, int, int]:
    enacted = 0 if state.enactment is None else state.enactment.current.version
    return (state.voted.term if state.voted else 0, state.mandate.term if state.mandate else 0, enacted)


@settings(max_examples=300, deadline=None)
@given(st.lists(_events, max_size=40))
def test_promises_only_grow(events: list[Any]) -> None:
    """Whatever comes: one vote a term, terms and versions never go back, nothing else than PeerMistake is raised."""
    election, now = start(), 0.0
    state = HardState(SWARM, vote_file(A), enactment=Enactment.of_first(THREE))
    votes: dict[int, str] = {}
    for event in [("report", True, True), *events, ("tick", 0.1)]:
        ready = NOTHING
        try:
            if event[0] == "tick":
                now += event[1]
                ready = election.tick(now)
            elif event[0] == "receive":
                ready = election.receive(event[2], event[1], now)
            elif event[0] == "report":
                ready = election.report(eligible=event[1], covers=event[2], now=now)
            elif event[0] == "hand_over":
                ready = election.hand_over(now)
            else:
                election = Election(A, state, keys_of(A), lambda: 0.5, now)
                ready = election.report(eligible=True, covers=True, now=now)
        except PeerMistake:
            continue
        if ready.state is not None:
            assert all(new >= old for new, old in zip(_promises(ready.state), _promises(state), strict=True))
            state = HardState.from_file(ready.state.to_file())
        for _, message in ready.messages:
            assert from_plain(to_plain(message)) == message
            if isinstance(message, VoteReply) and message.vote is not None:
                assert votes.setdefault(message.vote.term, message.vote.leader) == message.vote.leader
                assert state.voted == Ballot(message.vote.backbone_version, message.vote.term, message.vote.leader)
            if isinstance(message, VoteRequest):
                assert votes.setdefault(message.term, A) == A
                assert state.voted is not None
                assert state.voted.term >= message.term
        for change in ready.changes:
            if isinstance(change, LeaderChanged) and change.leader is not None:
                assert change.mandate is not None
                assert (change.mandate.term, change.mandate.leader) == (change.term, change.leader)
                assert state.mandate is not None
                assert state.mandate.term >= change.term


def test_what_was_learnt_before_a_mistake_comes_with_the_next_ready() -> None:
    election = start()
    good = enactment_of(THREE, FOUR, (A, B, D))
    bad_word = replace(Stored.make(backbone_of((A, B, D), FOUR), B, 0, sign_as(B)), signature=bytes(64))
    with pytest.raises(PeerMistake):
        election.receive(BackboneUpdate(good, backbone_of((A, B, D), FOUR), (bad_word,)), B, 0.1)
    ready = election.tick(0.2)
    assert ready.state is not None
    assert ready.state.enactment == good
    assert ready.messages


def test_nothing_to_do_is_nothing() -> None:
    election = start()
    assert election.tick(0.1) is NOTHING
    assert election.receive(Heartbeat(1, 9, 1, None), "stranger", 0.2) == Ready()
    assert election.hand_over(0.3) is NOTHING


def test_heartbeats_of_a_known_term_store_nothing() -> None:
    election = start()
    assert election.receive(Heartbeat(1, 3, 1, MANDATE), B, 0.1).state is not None
    assert election.receive(Heartbeat(1, 3, 2, MANDATE), B, 0.2).state is None
    assert election.receive(Heartbeat(1, 3, 3, None), B, 0.3).state is None
    assert (election.leader, election.term, election.mandate) == (B, 3, MANDATE)


def test_an_owner_that_errs_is_told() -> None:
    election = start()
    for wrong in (backbone_of((A, B, D)), backbone_of((A, B, C), FOUR), replace(FOUR, signature=bytes(64))):
        with pytest.raises((UsageError, PeerMistake)):
            election.propose(wrong, 0.1)
    assert election.propose(FOUR, 0.2).state is not None
    assert election.propose(FOUR, 0.3).state is None
    with pytest.raises(UsageError, match="cannot be replaced"):
        election.propose(backbone_of((A, B), THREE), 0.4)
    newcomer = start(D, HardState(SWARM, vote_file(D)))
    with pytest.raises(UsageError, match="does not know the backbone"):
        newcomer.propose(FOUR, 0.1)


def test_a_first_backbone_makes_a_leader_of_its_one_member() -> None:
    election = start(A, HardState(SWARM, vote_file(A)))
    election.report(eligible=True, covers=False, now=0.0)
    ready = election.propose(backbone_of((A,)), 0.1)
    assert ready.state is not None
    assert (ready.state.voted, election.role, election.term) == (Ballot(1, 1, A), Role.LEADER, 1)
    assert ready.state.mandate == election.mandate
    assert [type(change).__name__ for change in ready.changes] == ["BackboneChanged", "LeaderChanged"]


def test_status_says_why_nobody_leads() -> None:
    newcomer = start(D, HardState(SWARM, vote_file(D)))
    assert newcomer.status().why == "this peer knows no backbone yet"
    assert newcomer.status().vote_file == member(D).vote_file
    election = start()
    assert election.status().why == "this peer may not lead now, and hears no other leader"
    election.report(eligible=True, covers=True, now=0.0)
    assert election.status().why == "1 of 3 backbone peers answer, and 2 are needed"
    election.receive(PreVoteRequest(1, 1, None, None), B, 0.1)
    assert election.status().answering == (A, B)
    assert election.status().why == "an election is under way"
    assert election.peers == (B, C)
    election.receive(Heartbeat(1, 3, 1, MANDATE), B, 0.3)
    assert election.status().why == ""
