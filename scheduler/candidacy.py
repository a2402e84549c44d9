"""One round of asking to lead: first whether a quorum would vote for this peer, then for the votes.

Whoever has not agreed is asked again every HEARTBEAT_S, since requests and answers get lost; agreeing twice is agreeing
once. A round has one term, and ends when its time is over.
"""

from __future__ import annotations

from capabilities.certificates import Certificate, Mandate, Vote
from scheduler.election_messages import Message, PreVoteRequest, VoteRequest
from scheduler.election_times import HEARTBEAT_S
from scheduler.voter import Voter


class Candidacy:
    """See the module. A round ends when another backbone acts, a newer term is known or this peer votes for another."""

    def __init__(self, voter: Voter, rival: Vote | None, time: float, seconds: float, *, transfer: bool) -> None:
        """`rival`: the newest vote of another member that is known. `transfer`: the leader asked this peer to lead."""
        assert voter.ledger.acting is not None
        self.term = max(voter.floor, 0 if rival is None else rival.term) + 1
        self.due = time + seconds
        self.repeat_due = time + HEARTBEAT_S
        self._backbone = voter.ledger.acting
        self._voter = voter
        self._transfer = transfer
        self._proof = voter.last_vote(self.term - 1) or (rival if rival and rival.term == self.term - 1 else None)
        self._calling = False
        self._grants = {voter.peer}
        self._votes: dict[str, Vote] = {}

    def requests(self, time: float) -> list[tuple[str, Message]]:
        """(peer, message) for everybody who has not agreed yet."""
        self.repeat_due = time + HEARTBEAT_S
        version, mandate = self._backbone.version, self._voter.mandate
        if self._calling:
            request: Message = VoteRequest(version, self.term, self._transfer, self._proof, mandate)
            agreed = set(self._votes)
        else:
            request, agreed = PreVoteRequest(version, self.term, self._proof, mandate), self._grants
        asked = [peer for peer in self._backbone.peers if peer != self._voter.peer and peer not in agreed]
        reasons = [message for peer in asked for message in self._voter.ledger.explain(peer, self.term - 1, time)]
        return [*reasons, *((peer, request) for peer in asked)]

    def granted(self, peer: str) -> bool:
        """This peer would vote for us; whether a quorum would, now."""
        self._grants.add(peer)
        return self.would_win()

    def would_win(self) -> bool:
        """Whether a quorum, this peer included, would vote for it."""
        return self._backbone.is_quorum(self._grants)

    def call(self, time: float, seconds: float) -> Mandate | None:
        """Ask for votes from now on, beginning with one's own; the mandate if that is enough."""
        assert self._voter.may_vote(self._voter.peer, self.term, self._backbone.version, self._proof)
        self._calling, self.due = True, time + seconds
        return self._add(self._voter.vote(self._voter.peer, self.term))

    def count(self, vote: Vote) -> Mandate | None:
        """A member's genuine vote came, after `call`; the mandate if it makes a quorum. Other votes are passed over."""
        return self._add(vote) if vote.subject == self._votes[self._voter.peer].subject else None

    def _add(self, vote: Vote) -> Mandate | None:
        self._votes[vote.voter] = vote
        if not self._backbone.is_quorum(self._votes):
            return None
        return Mandate(Certificate.of(self._votes.values()), self._backbone)
