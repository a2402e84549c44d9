"""Who leads: one backbone peer's part in electing a leader.

Raft's election without its log. The differences: a term counts only with its certificate (a quorum's signed votes), so
a bare higher number changes nothing anywhere; the lease only makes a leader step down; and the members come from a
versioned, owner-signed backbone set. Roles stand in election_roles.py, times in election_times.py, what is stored in
election_state.py; the promises are kept in voter.py, and the backbone changes in backbone_ledger.py.

    every tick_s                  tick(now)
    a message of a peer           receive(message, sender, now)       PeerMistake if no honest peer sends such a one
    trunk, fitness, coverage      report(eligible=..., covers=..., now=now)
    drain                         hand_over(now)
    a mandate from elsewhere      learn(mandate, now)
    the owner's next backbone     propose(backbone, now)

Each returns a `Ready`: what to store, then to send, then to announce. Why it is safe: a vote is stored before it is
sent and a peer votes once a term, so two quorums of one backbone (or of two neighbouring versions of it) cannot name
two leaders; enactments keep versions further apart from ever using the same term.
"""

from __future__ import annotations

from collections.abc import Callable

from capabilities.backbone import BackboneSet
from capabilities.certificates import Mandate, Vote
from capabilities.errors import PeerMistake
from scheduler import election_messages as messages
from scheduler import election_times as times
from scheduler.backbone_ledger import Keys
from scheduler.candidacy import Candidacy
from scheduler.election_roles import TRANSITIONS, Cause, Role
from scheduler.election_state import BackboneChanged, HandOverFailed, HardState, LeaderChanged, Outbox, Ready
from scheduler.election_status import ElectionStatus, describe
from scheduler.leadership import Leadership
from scheduler.own_time import OwnTime
from scheduler.voter import Voter


class Election:
    """See the module. One thread calls it; instants are seconds of one monotonic clock."""

    def __init__(self, peer: str, state: HardState, keys: Keys, draw: Callable[[], float], now: float) -> None:
        """`state` is what the vote file holds; `draw` gives uniform random numbers in [0, 1)."""
        self.peer = peer
        self._voter = Voter(peer, state, keys)
        self._ledger = self._voter.ledger
        self._draw = draw
        self._own_time = OwnTime(now, times.STRETCH_S)
        self._time = 0.0  # of it, at the last event
        self._role = Role.FOLLOWER if self._ledger.seated else Role.OUTSIDER
        self._eligible = False
        self._covers = False
        self._leader: str | None = None
        self._leader_heard = -times.ELECTION_S_MIN  # when its last heartbeat came
        self._election_due = self._election_timeout()
        self._candidacy: Candidacy | None = None  # while (pre-)candidate
        self._leadership: Leadership | None = None  # while leader
        self._rival: Vote | None = None  # the newest vote of another member that stood in this peer's way
        self._heard: dict[str, float] = {}
        self._announced: tuple[int, str | None] = (self.term, None)
        self._out = Outbox()

    # -- what others ask ----------------------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        return self._role

    @property
    def leader(self) -> str | None:
        """Who leads the newest certified term and was heard lately; None: nobody, as far as this peer knows."""
        return self._leader

    @property
    def term(self) -> int:
        """The newest certified term, 0 before any."""
        return self._voter.term

    @property
    def mandate(self) -> Mandate | None:
        """That term's mandate."""
        return self._voter.mandate

    @property
    def backbone(self) -> BackboneSet | None:
        """The version of the backbone that acts for this peer."""
        return self._ledger.acting

    @property
    def peers(self) -> tuple[str, ...]:
        """Whom to keep a stream to: members of the versions before, acting and pending, but this peer; sorted."""
        return self._ledger.concerned()

    @property
    def tick_s(self) -> float:
        """How long until the next tick is due, unless something happens before."""
        outside = self._role is Role.OUTSIDER and self._ledger.pending is None
        return times.OUTSIDER_TICK_S if outside else times.TICK_S

    def status(self) -> ElectionStatus:
        """For people: what this peer knows, and why nobody leads if nobody does."""
        heard = [peer for peer, time in self._heard.items() if self._time - time < times.ELECTION_S_MIN]
        return describe(self._role, self._leader, self._voter, heard, eligible=self._eligible)

    # -- events -------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> Ready:
        """Time passes: due every `tick_s`."""
        self._advance(now)
        if self._leadership is not None:
            self._lead(self._leadership)
        elif self._candidacy is not None:
            self._run_campaign(self._candidacy)
        elif self._time >= self._election_due:
            self._miss_leader()
        self._out.messages += self._ledger.share(self._time)
        return self._ready()

    def receive(self, message: messages.Message, sender: str, now: float) -> Ready:
        """A message came from a peer whose key the network has checked.

        Raises:
            PeerMistake: no honest peer sends it. What was learnt before stays, and comes with the next Ready.
        """
        self._advance(now)
        if isinstance(message, messages.BackboneUpdate):
            before = self._ledger.acting
            try:
                self._ledger.learn(message, self._voter.floor)
            finally:
                self._backbone_may_have_changed(before)
        elif sender in self._ledger.concerned():
            self._heard[sender] = self._time
            self._handle(message, sender)
        self._out.messages += self._ledger.answer(sender, message.version, self._time)
        return self._ready()

    def learn(self, mandate: Mandate, now: float) -> Ready:
        """A mandate from elsewhere: an advert, or a worker that refused an older term.

        Raises:
            PeerMistake: it is none.
        """
        self._advance(now)
        self._adopt(mandate)
        return self._ready()

    def report(self, *, eligible: bool, covers: bool, now: float) -> Ready:
        """Whether this peer may lead (it holds the trunk, is fit), and reaches a copy of every expert."""
        self._advance(now)
        self._eligible, self._covers = eligible, covers
        if not eligible and (self._leadership is not None or self._candidacy is not None):
            self._leave(Cause.UNFIT)
        return self._ready()

    def hand_over(self, now: float) -> Ready:
        """Let another peer lead, if one can. This leader leads on until the other one does; see HandOverFailed."""
        self._advance(now)
        if self._leadership is not None:
            self._leadership.start_hand_over()
            self._lead(self._leadership)
        return self._ready()

    def propose(self, backbone: BackboneSet, now: float) -> Ready:
        """The owner's next version of the backbone (or the first one).

        Raises:
            PeerMistake: the owner did not sign it.
            UsageError: it does not follow the version that acts, or another one is pending.
        """
        self._advance(now)
        before = self._ledger.acting
        self._ledger.propose(backbone, self._voter.floor)
        self._backbone_may_have_changed(before)
        self._out.messages += self._ledger.share(self._time)
        return self._ready()

    def _handle(self, message: messages.Message, sender: str) -> None:
        match message:
            case messages.Heartbeat():
                self._on_heartbeat(message, sender)
            case messages.HeartbeatReply():
                self._on_heartbeat_reply(message, sender)
            case messages.PreVoteRequest():
                self._on_pre_vote_request(message, sender)
            case messages.PreVoteReply():
                self._on_pre_vote_reply(message, sender)
            case messages.VoteRequest():
                self._on_vote_request(message, sender)
            case messages.VoteReply():
                self._on_vote_reply(message, sender)
            case messages.TimeoutNow():
                self._on_timeout_now(message, sender)

    # -- following ----------------------------------------------------------------------------------------------

    def _on_heartbeat(self, message: messages.Heartbeat, sender: str) -> None:
        shown = message.mandate
        if shown is not None and (shown.term, shown.leader) != (message.term, sender):
            raise PeerMistake(f"{sender} shows another term's or leader's mandate in its heartbeat")
        self._adopt(shown)
        current = self._voter.mandate
        if current is not None and current.term == message.term:
            if current.leader != sender:
                raise PeerMistake(f"{sender} says that it leads term {message.term}, which {current.leader} leads")
            self._leader, self._leader_heard = sender, self._time
            self._election_due = self._election_timeout()
            if self._role is Role.PRE_CANDIDATE:
                self._leave(Cause.LEADER_HEARD)
        told = (self._ledger.version, self.term, message.number, self._eligible, self._covers)
        newer = self._voter.mandate if self.term > message.term else None
        self._send(sender, messages.HeartbeatReply(*told, newer))

    def _miss_leader(self) -> None:
        self._leader = None
        self._election_due = self._election_timeout()
        if self._eligible and self._move(Cause.LEADER_MISSED):
            self._start_campaign()

    def _adopt(self, mandate: Mandate | None) -> None:
        if mandate is not None and self._voter.adopt(mandate):
            self._leave(Cause.NEWER_TERM)
            self._leader = None  # until it is heard

    def _newer_than(self, known: Mandate | None) -> Mandate | None:
        return self._voter.mandate if self.term > (0 if known is None else known.term) else None

    # -- voting -------------------------------------------------------------------------------------------------

    def _leader_lives(self) -> bool:
        return self._role is Role.LEADER or self._time - self._leader_heard < times.ELECTION_S_MIN

    def _on_pre_vote_request(self, message: messages.PreVoteRequest, sender: str) -> None:
        self._adopt(message.mandate)
        allowed = self._voter.may_vote(sender, message.term, message.version, message.proof)
        granted = allowed and not self._leader_lives()
        last = None if granted else self._voter.last_vote(message.term)
        self._out.messages += self._ledger.explain(sender, message.term, self._time)
        told = (self._ledger.version, message.term, granted, last, self._newer_than(message.mandate))
        self._send(sender, messages.PreVoteReply(*told))

    def _on_vote_request(self, message: messages.VoteRequest, sender: str) -> None:
        self._adopt(message.mandate)
        allowed = self._voter.may_vote(sender, message.term, message.version, message.proof)
        if allowed and (message.transfer or not self._leader_lives()):
            self._voter.vote(sender, message.term)
            if self._candidacy is not None:
                self._leave(Cause.VOTED_FOR_OTHER)
            self._election_due = self._election_timeout()
        self._out.messages += self._ledger.explain(sender, message.term, self._time)
        last, newer = self._voter.last_vote(message.term), self._newer_than(message.mandate)
        self._send(sender, messages.VoteReply(self._ledger.version, message.term, last, newer))

    # -- campaigning --------------------------------------------------------------------------------------------

    def _on_timeout_now(self, message: messages.TimeoutNow, sender: str) -> None:
        current = self._voter.mandate
        if current is None or (current.term, current.leader) != (message.term, sender) or not self._eligible:
            return
        if self._move(Cause.ASKED_TO_LEAD):
            self._candidacy = self._new_round(transfer=True)
            self._call_the_vote(self._candidacy)

    def _start_campaign(self) -> None:
        self._candidacy = self._new_round(transfer=False)
        if self._candidacy.would_win():
            self._move(Cause.WOULD_WIN)
            self._call_the_vote(self._candidacy)
        else:
            self._out.messages += self._candidacy.requests(self._time)

    def _new_round(self, *, transfer: bool) -> Candidacy:
        seconds = self._between(times.ROUND_S_MIN, times.ROUND_S_MAX)
        return Candidacy(self._voter, self._rival, self._time, seconds, transfer=transfer)

    def _run_campaign(self, candidacy: Candidacy) -> None:
        if self._time >= candidacy.due:
            self._move(Cause.ROUND_OVER)
            self._start_campaign()
        elif self._time >= candidacy.repeat_due:
            if self._role is Role.PRE_CANDIDATE and self._rival is not None and self._rival.term >= candidacy.term:
                self._start_campaign()
            else:
                self._out.messages += candidacy.requests(self._time)

    def _on_pre_vote_reply(self, message: messages.PreVoteReply, sender: str) -> None:
        self._learn_why(message, sender)
        candidacy = self._candidacy
        if candidacy is None or self._role is not Role.PRE_CANDIDATE or message.term != candidacy.term:
            return
        if message.granted and candidacy.granted(sender):
            self._move(Cause.WOULD_WIN)
            self._call_the_vote(candidacy)

    def _learn_why(self, message: messages.PreVoteReply | messages.VoteReply, sender: str) -> None:
        """Check what a reply shows: a newer mandate, and a vote that the sender cast."""
        self._adopt(message.mandate)
        vote = message.vote
        if vote is None or self._ledger.acting is None or sender not in self._ledger.acting.peers:
            return
        if vote.voter != sender or not self._voter.is_genuine(vote):
            raise PeerMistake(f"{sender} sent a vote that it did not cast")
        if self._rival is None or vote.term > self._rival.term:
            self._rival = vote

    def _call_the_vote(self, candidacy: Candidacy) -> None:
        mandate = candidacy.call(self._time, self._between(times.ROUND_S_MIN, times.ROUND_S_MAX))
        if mandate is not None:
            self._win(mandate)
        else:
            self._out.messages += candidacy.requests(self._time)

    def _on_vote_reply(self, message: messages.VoteReply, sender: str) -> None:
        self._learn_why(message, sender)
        if self._candidacy is not None and self._role is Role.CANDIDATE and message.vote is not None:
            mandate = self._candidacy.count(message.vote)
            if mandate is not None:
                self._win(mandate)

    # -- leading ------------------------------------------------------------------------------------------------

    def _win(self, mandate: Mandate) -> None:
        assert self._ledger.acting is not None
        self._voter.mandate = mandate
        self._candidacy = None
        self._move(Cause.WON)
        self._leader = self.peer
        self._leadership = Leadership(self._voter, self._ledger.acting, self._time)
        self._lead(self._leadership)

    def _lead(self, leadership: Leadership) -> None:
        if leadership.lease_over(self._time):
            self._leave(Cause.QUORUM_MISSED)
            return
        self._out.messages += leadership.tick(self._time, covers=self._covers)
        if leadership.failed is not None:
            self._out.changes.append(HandOverFailed(leadership.failed))
            leadership.failed = None

    def _on_heartbeat_reply(self, message: messages.HeartbeatReply, sender: str) -> None:
        self._adopt(message.mandate)
        if self._leadership is not None:
            self._leadership.answered(sender, message)

    # -- the backbone -------------------------------------------------------------------------------------------

    def _backbone_may_have_changed(self, before: BackboneSet | None) -> None:
        acting = self._ledger.acting
        if acting is None or acting == before:
            if self._role is Role.PRE_CANDIDATE and self._candidacy and self._candidacy.term <= self._voter.floor:
                self._start_campaign()  # a proof of the same version knows of more terms
            return
        self._out.changes.append(BackboneChanged(acting, self._ledger.seated))
        self._out.messages += self._ledger.tell_all(self._time)
        self._heard = {peer: time for peer, time in self._heard.items() if peer in self._ledger.concerned()}
        self._rival = None if self._rival is not None and self._rival.voter not in acting.peers else self._rival
        if not self._ledger.seated:
            self._leave(Cause.UNSEATED)
        elif self._leadership is not None:
            self._leadership.change_backbone(acting, self._time)
        elif self._candidacy is not None:
            self._leave(Cause.BACKBONE_CHANGED)
        else:
            self._move(Cause.SEATED)

    # -- common -------------------------------------------------------------------------------------------------

    def _move(self, cause: Cause) -> bool:
        """Take the transition, if the table has one."""
        after = TRANSITIONS.get((self._role, cause))
        if after is None:
            return False
        self._role = after
        return True

    def _leave(self, cause: Cause) -> None:
        """Lead or campaign no more and wait for a leader. Who leaves in order asks the best peer to go on."""
        if self._leadership is not None:
            heir = self._leadership.best_heir(self._time)
            if heir is not None and cause in (Cause.UNFIT, Cause.UNSEATED):
                self._out.messages += self._leadership.ask(heir)
            self._leader = None
        self._candidacy = self._leadership = None
        self._move(cause)
        self._election_due = self._election_timeout()

    def _election_timeout(self) -> float:
        return self._time + self._between(times.ELECTION_S_MIN, times.ELECTION_S_MAX)

    def _between(self, low: float, high: float) -> float:
        return low + (high - low) * self._draw()

    def _advance(self, now: float) -> None:
        self._time = self._own_time.at(now)

    def _send(self, peer: str, message: messages.Message) -> None:
        self._out.messages.append((peer, message))

    def _ready(self) -> Ready:
        acting = self._ledger.acting
        if self._role is Role.FOLLOWER and self._eligible and acting is not None and acting.quorum == 1:
            self._miss_leader()  # there is nobody else to ask
        if (self.term, self._leader) != self._announced:
            self._announced = (self.term, self._leader)
            self._out.changes.append(LeaderChanged(self.term, self._leader, self._voter.mandate))
        return self._out.take(self._voter.unsaved())
