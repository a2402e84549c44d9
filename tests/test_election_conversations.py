"""Golden conversations: one scene for each behaviour of an election, in tests/golden_elections.

Run this file to write them anew, and read what changed: python -m tests.test_election_conversations
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from capabilities.backbone import BackboneSet, Member
from capabilities.certificates import Mandate
from scheduler.election_messages import Heartbeat, PreVoteRequest, TimeoutNow, VoteReply, VoteRequest
from scheduler.election_state import Ballot
from tests.election_conversation import Conversation, next_backbone
from tests.election_tools import OWNER, SWARM, certificate_of, enactment_of, sign_as, vote_of

GOLDEN = Path(__file__).parent / "golden_elections"
Scene = Callable[[], Conversation]
SCENES: dict[str, Scene] = {}


def scene(function: Scene) -> Scene:
    SCENES[function.__name__] = function
    return function


@scene
def a_swarm_of_one_leads_itself() -> Conversation:
    talk = Conversation("A")
    assert talk.leader == "A"
    talk.say("A restarts: a new term, since it forgot what it did in the old one")
    talk.boot("A")
    assert talk.elections["A"].term == 2
    return talk


@scene
def three_elect_a_leader() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    assert talk.leader == "A"
    return talk


@scene
def a_lost_leader_is_replaced() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.say("A crashes")
    talk.crash("A")
    talk.run(3)
    assert talk.leader == "B"
    talk.say("A comes back and follows")
    talk.boot("A")
    talk.run(1)
    assert talk.elections["A"].leader == "B"
    return talk


@scene
def a_peer_that_does_not_hear_disturbs_nobody() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.say("C hears nothing of A any more, but reaches B")
    talk.cuts.add(("A", "C"))
    talk.run(3)
    assert talk.leader == "A"
    assert talk.elections["A"].term == 1
    talk.say("C hears A again")
    talk.mend()
    talk.run(0.5)
    assert talk.elections["C"].leader == "A"
    return talk


@scene
def a_leader_without_quorum_steps_down() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.say("A is cut off")
    talk.cut("A")
    talk.run(1.3)
    assert talk.elections["A"].leader is None
    assert talk.elections["A"].status().why == "1 of 3 backbone peers answer, and 2 are needed"
    talk.run(1.7)
    talk.say("the link is back")
    talk.mend()
    talk.run(1)
    assert [election.leader for election in talk.elections.values()] == ["B"] * 3
    return talk


@scene
def split_votes_are_tried_again() -> Conversation:
    talk = Conversation("ABCD", {"A": 0.1, "B": 0.1, "C": 0.9, "D": 0.9})
    sides = {"A": "C", "B": "D", "C": "A", "D": "B"}
    talk.say("A and B stand together; C hears A's request for votes only, and D only B's")
    talk.lost = lambda sender, receiver, message: (
        isinstance(message, VoteRequest) and message.term == 1 and sides[sender] != receiver
    )
    talk.run(1.6)
    talk.draws = {"A": 0.0, "B": 0.9}
    talk.run(2)
    assert len({election.leader for election in talk.elections.values()}) == 1
    return talk


@scene
def a_restarted_voter_remembers_its_vote() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.9, "C": 0.9})
    talk.lost = lambda sender, receiver, message: isinstance(message, VoteReply) and sender == "B"
    talk.cut("C")
    talk.run(1.35)
    talk.say("B has voted, but its vote was lost; B restarts")
    talk.boot("B")
    talk.say("C asks B for its vote in the same term")
    talk.deliver("C", "B", VoteRequest(1, 1, False, None, None))
    assert talk.disks["B"].voted is not None
    assert talk.disks["B"].voted.leader == "A"
    talk.say("and A asks again")
    talk.lost = lambda sender, receiver, message: False
    talk.run(0.4)
    assert talk.leader == "A"
    return talk


@scene
def a_bare_higher_number_changes_nothing() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    disks = dict(talk.disks)
    talk.say("B claims to lead term 99, without a mandate")
    talk.deliver("B", "C", Heartbeat(1, 99, 1, None))
    talk.say("B asks for votes, also far beyond, and also as if A had asked it to lead")
    for term, transfer in ((2, False), (99, True), (2**62, True)):
        talk.deliver("B", "C", PreVoteRequest(1, term, None, None))
        talk.deliver("B", "C", VoteRequest(1, term, transfer, None, None))
    talk.say("B passes itself off as the leader who hands over, and as the leader of A's term")
    talk.deliver("B", "C", TimeoutNow(1, 1))
    talk.deliver("B", "C", TimeoutNow(1, 99))
    talk.deliver("B", "C", Heartbeat(1, 1, 1, None))
    talk.say("B shows a forged mandate, and a true one with a higher number on it")
    forged = Mandate(certificate_of("B", ("B",), term=2), talk.backbone)
    talk.deliver("B", "C", Heartbeat(1, 2, 1, forged))
    true = talk.disks["A"].mandate
    assert true is not None
    talk.deliver("A", "C", Heartbeat(1, 5, 1, Mandate(replace(true.certificate, term=5), true.backbone)))
    talk.run(1)
    assert talk.disks == disks
    assert [election.leader for election in talk.elections.values()] == ["A"] * 3
    return talk


@scene
def a_term_that_skips_others_needs_a_vote_as_proof() -> Conversation:
    talk = Conversation("ABC")
    talk.say("C asks for term 8, without proof, with a forged one, with too old a one, and with A's vote of term 7")
    forged = replace(vote_of("A", "A", 7), signature=bytes(64))
    for proof in (None, forged, vote_of("A", "A", 6), vote_of("A", "A", 7)):
        talk.deliver("C", "B", VoteRequest(1, 8, False, proof, None))
    return talk


@scene
def peers_that_are_terms_apart_catch_up() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.say("B voted in 40 terms that nobody won, and C is down")
    talk.disks["B"] = replace(talk.disks["B"], voted=Ballot(1, 40, "C"))
    talk.boot("B")
    talk.crash("C")
    talk.run(2)
    assert talk.leader == "A"
    assert talk.elections["B"].term == 41
    return talk


@scene
def proofs_that_know_of_different_terms_are_exchanged() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9}, guests="D")
    second = next_backbone(talk, "ABCD")
    talk.say("version 2 acts: by what A holds beyond term 3, by what B, C and D hold beyond term 7, 0 and 0")
    for peer, words, floor in (("A", "ABD", 3), ("B", "BCD", 7), ("C", "ACD", 0), ("D", "ACD", 0)):
        talk.disks[peer] = replace(talk.disks[peer], enactment=enactment_of(talk.backbone, second, words, floor))
        talk.boot(peer)
    talk.run(3)
    assert talk.elections["D"].term == 8
    return talk


@scene
def a_leader_hands_over() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.say("A is drained; B covers less than C")
    talk.event("B", "report", eligible=True, covers=False)
    talk.run(0.3)
    talk.event("A", "hand_over")
    talk.run(1)
    assert talk.leader == "C"
    return talk


@scene
def a_hand_over_tries_the_next_and_may_fail() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.say("A is drained, but those who are asked never hear it")
    talk.lost = lambda sender, receiver, message: isinstance(message, TimeoutNow)
    talk.event("A", "hand_over")
    talk.run(2.5)
    assert talk.leader == "A"
    talk.say("nobody else is eligible")
    for peer in "BC":
        talk.event(peer, "report", eligible=False, covers=True)
    talk.run(0.3)
    talk.event("A", "hand_over")
    talk.run(0.2)
    return talk


@scene
def a_leader_that_cannot_cover_hands_over_to_one_that_can() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.say("nobody reaches every expert: A leads on")
    for peer in "ABC":
        talk.event(peer, "report", eligible=True, covers=False)
    talk.run(6)
    assert talk.leader == "A"
    talk.say("B does again")
    talk.event("B", "report", eligible=True, covers=True)
    talk.run(6)
    assert talk.leader == "B"
    return talk


@scene
def a_leader_that_becomes_unfit_steps_down_at_once() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.event("A", "report", eligible=False, covers=True)
    talk.run(1)
    assert talk.leader == "C"
    return talk


@scene
def only_the_eligible_stand() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    for peer in "AB":
        talk.event(peer, "report", eligible=False, covers=True)
    talk.run(3)
    assert talk.leader == "C"
    return talk


@scene
def a_sleeper_wakes_as_itself() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.say("B is stopped for a minute, and the heartbeats wait unread")
    talk.act("B", talk.elections["B"].tick(talk.now + 60))
    assert talk.elections["B"].leader == "A"
    talk.say("it does not miss its leader")
    return talk


@scene
def a_member_is_added() -> Conversation:
    talk = Conversation("AB", {"A": 0.0, "B": 0.5, "C": 0.9}, guests="C")
    talk.run(2)
    talk.say("the owner adds C, at B")
    talk.event("B", "propose", next_backbone(talk, "ABC"))
    talk.run(1)
    assert {election.backbone.version for election in talk.elections.values() if election.backbone} == {2}
    assert talk.elections["C"].leader == "A"
    talk.say("A crashes: B and C are a quorum now")
    talk.crash("A")
    talk.run(3)
    assert talk.leader == "B"
    return talk


@scene
def a_version_waits_for_both_majorities() -> Conversation:
    talk = Conversation("AB", {"A": 0.0, "B": 0.9}, guests="C")
    talk.run(2)
    talk.say("the owner adds C at A, but B is cut off: A and C are a majority of the new version, not of the old one")
    talk.cut("B")
    talk.event("A", "propose", next_backbone(talk, "ABC"))
    talk.run(0.9)
    assert talk.elections["A"].backbone == talk.backbone
    talk.say("B is back")
    talk.mend()
    talk.run(1.2)
    assert all(election.backbone != talk.backbone for election in talk.elections.values())
    return talk


@scene
def the_leader_is_removed() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.event("B", "propose", next_backbone(talk, "BC"))
    talk.run(1)
    assert talk.leader == "C"
    assert talk.elections["A"].role == "outsider"
    talk.say("what A says counts no more")
    talk.deliver("A", "B", PreVoteRequest(2, 9, None, None))
    return talk


@scene
def a_removed_member_that_missed_it_is_told() -> Conversation:
    talk = Conversation("ABCD", {"A": 0.0, "B": 0.5, "C": 0.9, "D": 0.2})
    talk.run(2)
    talk.say("D is cut off, and removed; then C is removed as well")
    talk.cut("D")
    second = next_backbone(talk, "ABC")
    talk.event("A", "propose", second)
    talk.run(1)
    talk.event("A", "propose", next_backbone(talk, "AB", second))
    talk.run(1)
    talk.say("D is back")
    talk.mend()
    talk.run(1.5)
    assert talk.elections["D"].role == "outsider"
    assert talk.elections["A"].term == 1
    return talk


@scene
def lost_votes_are_no_votes() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.say("C loses its vote file and restarts")
    talk.boot("C", lost_votes=True)
    talk.run(1)
    assert talk.elections["C"].status().why == ""
    talk.say("A crashes: B cannot win, since C does not vote")
    talk.crash("A")
    talk.run(2.5)
    assert talk.elections["B"].role == "pre_candidate"
    assert "lost the file of its votes" in talk.elections["C"].status().why
    talk.boot("A")
    talk.run(2)
    talk.say("the owner removes C and adds it anew")
    second = next_backbone(talk, "AB")
    talk.event("B", "propose", second)
    talk.run(1)
    members = [*second.members, Member("C", talk.elections["C"].status().vote_file)]
    talk.event("B", "propose", BackboneSet.make(SWARM, members, sign_as(OWNER), second))
    talk.run(1)
    assert talk.elections["C"].role == "follower"
    return talk


@scene
def a_worker_shows_the_old_leader_a_newer_mandate() -> Conversation:
    talk = Conversation("ABC", {"A": 0.0, "B": 0.5, "C": 0.9})
    talk.run(2)
    talk.say("A is cut off from its peers, not from the workers; B and C elect another")
    talk.event("A", "learn", Mandate(certificate_of("B", "BC", term=2), talk.backbone))
    assert talk.elections["A"].role == "follower"
    assert talk.elections["A"].term == 2
    return talk


@pytest.mark.parametrize("name", SCENES)
def test_scene(name: str) -> None:
    told = "\n".join(SCENES[name]().lines) + "\n"
    assert told == (GOLDEN / f"{name}.txt").read_text()


def test_no_scene_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(SCENES)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for title, play in SCENES.items():
        (GOLDEN / f"{title}.txt").write_text("\n".join(play().lines) + "\n")
