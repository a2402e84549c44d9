"""One round of asking to lead: first whether a quorum would vote for this peer, then for the votes.

Whoever has not agreed is asked again every HEARTBEAT_S, since requests and answers get lost; agreeing twice is agreeing
once. A round has one term, and ends when its time is over.
"""

from __future__ import annotations

from capabilities.certificates import Certificate, Mandate, Vote
from scheduler.election_messages import Message, PreVoteRequest, VoteRequest
from scheduler.election_times import HEARTBEAT_S, TERM_STEP_MAX
from scheduler.voter import Voter


class Candidacy:
    """See the module. A round ends when another backbone acts, a newer term is known or this peer votes for another."""

    def __init__(self, voter: Voter, hint: int, time: float, seconds: float, *, transfer: bool) -> None:
        """`hint`: a term that others may have used; only tried. `transfer`: the leader asked this peer to lead."""
        self.term = min(max(voter.floor, hint) + 1, voter.floor + TERM_STEP_MAX)
        self.due = time + seconds
        self.repeat_due = time + HEARTBEAT_S
        assert voter.ledger.acting is not None
        self._backbone = voter.ledger.acting
        self._voter = voter
        self._transfer = transfer
        self._calling = False
        self._grants = {voter.peer}
        self._votes: dict[str, Vote] = {}

    def requests(self, time: float) -> list[tuple[str, Message]]:
        """(peer, message) for everybody who has not agreed yet."""
        self.repeat_due = time + HEARTBEAT_S
        version, certified = self._backbone.version, self._voter.term
        if self._calling:
            request: Message = VoteRequest(version, self.term, certified, self._transfer)
            agreed = set(self._votes)
        else:
            request, agreed = PreVoteRequest(version, self.term, certified), self._grants
        return [(peer, request) for peer in self._backbone.peers if peer != self._voter.peer and peer not in agreed]

    def granted(self, peer: str) -> bool:
        """This peer would vote for us; whether a quorum would, now."""
        self._grants.add(peer)
        return self.would_win()

    def would_win(self) -> bool:
        """Whether a quorum, this peer included, would vote for it."""
        return self._backbone.is_quorum(self._grants)

    def call(self, time: float, seconds: float) -> Mandate | None:
        """Ask for votes from now on, beginning with one's own; the mandate if that is enough."""
        assert self._voter.may_vote(self._voter.peer, self.term, self._backbone.version)
        self._calling, self.due = True, time + seconds
        return self._add(self._voter.vote(self._voter.peer, self.term))

    def count(self, vote: Vote) -> Mandate | None:
        """A member's vote came, after `call`; the mandate if that makes a quorum. Other votes are passed over.

        Raises:
            PeerMistake: the voter did not sign it.
        """
        if vote.subject != self._votes[self._voter.peer].subject or vote.voter not in self._backbone.peers:
            return None
        self._voter.check(vote)
        return self._add(vote)

    def _add(self, vote: Vote) -> Mandate | None:
        self._votes[vote.voter] = vote
        if not self._backbone.is_quorum(self._votes):
            return None
        return Mandate(Certificate.of(self._votes.values()), self._backbone)
