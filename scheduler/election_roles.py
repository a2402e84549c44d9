"""What a backbone peer can be in an election, and what moves it.

The machine is Raft's election without a log. A peer that misses the leader first asks whether it would be voted for
(pre-candidate), so that one with a bad connection disturbs nobody; then it asks for votes (candidate). An outsider has
no seat in the acting backbone: it was not added yet, was removed, or lost its vote file.

The diagram is drawn from `TRANSITIONS`; a test draws it again.

    outsider       seated           -> follower
    follower       leader_missed    -> pre_candidate
    follower       asked_to_lead    -> candidate
    follower       unseated         -> outsider
    pre_candidate  would_win        -> candidate
    pre_candidate  round_over       -> pre_candidate
    pre_candidate  asked_to_lead    -> candidate
    pre_candidate  leader_heard     -> follower
    pre_candidate  voted_for_other  -> follower
    pre_candidate  newer_term       -> follower
    pre_candidate  unfit            -> follower
    pre_candidate  backbone_changed -> follower
    pre_candidate  unseated         -> outsider
    candidate      won              -> leader
    candidate      round_over       -> pre_candidate
    candidate      voted_for_other  -> follower
    candidate      newer_term       -> follower
    candidate      unfit            -> follower
    candidate      backbone_changed -> follower
    candidate      unseated         -> outsider
    leader         newer_term       -> follower
    leader         quorum_missed    -> follower
    leader         unfit            -> follower
    leader         unseated         -> outsider
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Role(StrEnum):
    OUTSIDER = "outsider"
    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre_candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Cause(StrEnum):
    SEATED = "seated"  # the acting backbone lists this peer, with its vote file
    UNSEATED = "unseated"  # it does not any more
    LEADER_MISSED = "leader_missed"  # no heartbeat for an election timeout, and this peer may lead
    ASKED_TO_LEAD = "asked_to_lead"  # the leader hands over to this peer
    WOULD_WIN = "would_win"  # a quorum would vote for it
    WON = "won"  # a quorum did
    ROUND_OVER = "round_over"  # not enough answers in time
    LEADER_HEARD = "leader_heard"  # a heartbeat of the newest certified term's leader
    VOTED_FOR_OTHER = "voted_for_other"
    NEWER_TERM = "newer_term"  # a certificate of a newer term
    QUORUM_MISSED = "quorum_missed"  # the lease ended: no answers from a quorum
    UNFIT = "unfit"  # it must not lead: no trunk, or not fit
    BACKBONE_CHANGED = "backbone_changed"  # another version acts: votes are asked for anew


TRANSITIONS: Final[dict[tuple[Role, Cause], Role]] = {
    (Role.OUTSIDER, Cause.SEATED): Role.FOLLOWER,
    (Role.FOLLOWER, Cause.LEADER_MISSED): Role.PRE_CANDIDATE,
    (Role.FOLLOWER, Cause.ASKED_TO_LEAD): Role.CANDIDATE,
    (Role.FOLLOWER, Cause.UNSEATED): Role.OUTSIDER,
    (Role.PRE_CANDIDATE, Cause.WOULD_WIN): Role.CANDIDATE,
    (Role.PRE_CANDIDATE, Cause.ROUND_OVER): Role.PRE_CANDIDATE,
    (Role.PRE_CANDIDATE, Cause.ASKED_TO_LEAD): Role.CANDIDATE,
    (Role.PRE_CANDIDATE, Cause.LEADER_HEARD): Role.FOLLOWER,
    (Role.PRE_CANDIDATE, Cause.VOTED_FOR_OTHER): Role.FOLLOWER,
    (Role.PRE_CANDIDATE, Cause.NEWER_TERM): Role.FOLLOWER,
    (Role.PRE_CANDIDATE, Cause.UNFIT): Role.FOLLOWER,
    (Role.PRE_CANDIDATE, Cause.BACKBONE_CHANGED): Role.FOLLOWER,
    (Role.PRE_CANDIDATE, Cause.UNSEATED): Role.OUTSIDER,
    (Role.CANDIDATE, Cause.WON): Role.LEADER,
    (Role.CANDIDATE, Cause.ROUND_OVER): Role.PRE_CANDIDATE,
    (Role.CANDIDATE, Cause.VOTED_FOR_OTHER): Role.FOLLOWER,
    (Role.CANDIDATE, Cause.NEWER_TERM): Role.FOLLOWER,
    (Role.CANDIDATE, Cause.UNFIT): Role.FOLLOWER,
    (Role.CANDIDATE, Cause.BACKBONE_CHANGED): Role.FOLLOWER,
    (Role.CANDIDATE, Cause.UNSEATED): Role.OUTSIDER,
    (Role.LEADER, Cause.NEWER_TERM): Role.FOLLOWER,
    (Role.LEADER, Cause.QUORUM_MISSED): Role.FOLLOWER,
    (Role.LEADER, Cause.UNFIT): Role.FOLLOWER,
    (Role.LEADER, Cause.UNSEATED): Role.OUTSIDER,
}
"""(role, cause) -> next role. A pair that is not listed changes nothing."""


def draw_transitions() -> list[str]:
    """The table as lines, one a transition, as the module's docstring shows it."""
    return [f"{role:14} {cause:16} -> {after}" for (role, cause), after in TRANSITIONS.items()]
