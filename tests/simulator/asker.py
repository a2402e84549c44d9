"""Who asks: requests with what their answers must be, tried at one leader after another until they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from capabilities.errors import SwarmError
from scheduler.attempts import Attempts, Deliver, Fail, Finish, Leading, Submit
from scheduler.requests import Request
from scheduler.sampling import SamplingParams
from scheduler.term_guard import StaleTerm, UncertifiedTerm
from tests.simulator.answers import Answers
from tests.simulator.engine import CONTEXT_TOKENS
from tests.simulator.host import Host
from tests.simulator.member import Member
from tests.simulator.messages import Ask, Done, Failed, Token
from tests.simulator.streams import End, dial
from tests.simulator.toy import TOKENS, Experts, undisturbed

SILENCE_S_MAX = 4.0
PAUSE_S = (0.1, 2.5)  # between two requests of an asker
DEADLINES_S = (3.0, 15.0, 30.0, 30.0)
STOPS: tuple[tuple[str, ...], ...] = ((), (), ("ab", "fed"), ("é",))
LINGER_S = 1.0  # how long the stream of an attempt that is over stays
GOES_AWAY = 0.08  # share of the requests whose asker loses patience


@dataclass(eq=False)
class Query:
    """One request."""

    request: Request
    experts: Experts = field(repr=False)
    asked_at: float = 0.0  # simulated time
    got: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    error: SwarmError | None = None
    dropped: bool = False  # its asker went away

    @property
    def name(self) -> str:
        return self.request.id

    @cached_property
    def wanted(self) -> tuple[tuple[int, ...], str]:
        """The whole answer, as one machine would give it: tokens and text."""
        return undisturbed(self.experts, self.request, CONTEXT_TOKENS)

    @property
    def ended(self) -> bool:
        return self.finished or self.error is not None or self.dropped


class Asker:
    """Asks one thing after another until `until`, by its member's view of who leads."""

    channel = "asker"

    def __init__(
        self,
        host: Host,
        member: Member,
        hosts: dict[str, Host],
        experts: Experts,
        answers: Answers,
        attempts: Callable[..., Attempts],
        until: float,
    ) -> None:
        self.host = host
        self._member = member
        self._hosts = hosts
        self._experts = experts
        self._answers = answers
        self._attempts = attempts
        self._until = until
        self._running: list[_Running] = []
        self._count = 0

    def start(self) -> None:
        self._member.on_change.append(self._follow)
        self.host.after(self.host.random.uniform(*PAUSE_S), self._next)

    def receive(self, sender: str, message: Any) -> None:
        pass

    def _next(self) -> None:
        if self.host.world.now < self._until:
            self.ask(self.host.random.choice(DEADLINES_S))
            self.host.after(self.host.random.uniform(*PAUSE_S), self._next)

    def ask(self, deadline_s: float) -> Query:
        """Ask something; the query tells how it goes."""
        query = Query(self._request(deadline_s), self._experts)
        query.asked_at = self.host.world.now
        self._answers.asked(self.host, query)
        self._running = [each for each in self._running if not each.query.ended]
        running = _Running(self, query)
        self._running.append(running)
        running.begin()
        if self.host.random.random() < GOES_AWAY:
            self.host.after(self.host.random.uniform(0, 1.0), running.drop)
        return query

    def _request(self, deadline_s: float) -> Request:
        random = self.host.random
        self._count += 1
        return Request(
            f"{self.host.name}.{self.host.boots}.{self._count}",
            tuple(random.randrange(1, TOKENS) for _ in range(random.randrange(1, 7))),
            SamplingParams(
                temperature=random.choice((0.0, 0.8, 1.5)),
                top_k=random.choice((0, 8)),
                seed=random.randrange(2**32),
                presence_penalty=random.choice((0.0, 0.0, 0.5)),
            ),
            max_tokens=random.randrange(1, 25),
            stop=random.choice(STOPS),
            deadline_s=deadline_s,
            choice=random.randrange(3),
        )

    def _follow(self) -> None:
        for running in list(self._running):
            running.follow()


class _Running:
    """A request under way: the attempts' effects, done."""

    def __init__(self, asker: Asker, query: Query) -> None:
        self.query = query
        self._asker = asker
        self._host = asker.host
        self._attempts = asker._attempts(query.name, self._host.now(), deadline_s=query.request.deadline_s)
        self._stream: End | None = None
        self._heard = 0.0
        self._rest = ""  # text that came with the end
        self._timer = 0

    def begin(self) -> None:
        leader = self._leader()
        self._act(self._attempts.begin(leader, "nobody leads", self._host.now()))

    def follow(self) -> None:
        leader = self._leader()
        self._act(self._attempts.follow(leader, "nobody leads", self._host.now()))

    def drop(self) -> None:
        if not self.query.ended:
            self.query.dropped = True
            self._close()

    def _leader(self) -> Leading | None:
        known = self._asker._member.leader()
        return None if known is None else Leading(known[1], known[0])

    def _act(self, effects: list[Any]) -> None:
        query, answers = self.query, self._asker._answers
        for effect in effects:
            match effect:
                case Submit():
                    self._submit(effect)
                case Deliver():
                    leader = self._attempts.leader
                    assert leader is not None
                    self._host.world.note(f"{query.name} gets {effect.index} {effect.token} of {leader}")
                    answers.delivered(self._host, query, effect, leader)
                case Finish():
                    self._close()
                    answers.finished(query, self._rest)
                case Fail():
                    self._close()
                    self._host.world.note(f"{query.name} fails: {effect.error.message}")
                    answers.failed(query, effect.error)
        self._wait()

    def _wait(self) -> None:
        self._timer += 1
        number, now = self._timer, self._host.now()
        due = self._attempts.next_instant()
        if not self.query.ended and due < float("inf"):
            self._host.after(max(due - now, 0.001), lambda: self._tick(number))

    def _tick(self, number: int) -> None:
        if number == self._timer and not self.query.ended:
            self._act(self._attempts.tick(self._host.now()))

    # -- the stream ---------------------------------------------------------------------------------------------

    def _submit(self, effect: Submit) -> None:
        old = self._stream
        if old is not None:  # its leader goes on streaming for a while, and must do no harm
            self._host.after(self._host.random.uniform(0, LINGER_S), old.close)
        query = self.query
        stream = dial(self._host, self._asker._hosts[effect.leader.peer], "prompts")
        self._stream, self._heard = stream, self._host.now()
        stream.on_message = lambda message: self._heard_of(effect, stream, message)
        stream.on_close = lambda: self._lost(effect, stream, "its stream broke")
        left = query.request.deadline_s if effect.deadline_s is None else effect.deadline_s
        request = replace(query.request, deadline_s=left, generated=effect.generated)
        stream.send(Ask(effect.attempt, effect.leader.term, request))
        self._listen(effect, stream)

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _listen(self, effect: Submit, stream: End) -> None:
        """A leader speaks every second."""
        if stream is not self._stream or self.query.ended:
            return
        if self._host.now() - self._heard > SILENCE_S_MAX:
            self._lost(effect, stream, "it is silent")
        else:
            self._host.after(1.0, lambda: self._listen(effect, stream))

    def _lost(self, effect: Submit, stream: End, why: str) -> None:
        if not self.query.ended:
            stream.close()
            self._act(self._attempts.lost(effect.attempt, why, self._host.now()))

    def _heard_of(self, effect: Submit, stream: End, message: Any) -> None:
        if self.query.ended:
            return
        attempt, now = effect.attempt, self._host.now()
        try:
            self._asker._member.guard.check(effect.leader.term, effect.leader.peer)
        except (StaleTerm, UncertifiedTerm) as error:
            self._lost(effect, stream, error.message)
            return
        self._heard = now
        match message:
            case Token():
                self._act(self._attempts.token(attempt, message.index, message.token, message.text))
            case Done():
                self._rest = message.text
                self._act(self._attempts.done(attempt))
            case Failed():
                self._act(self._attempts.failed(attempt, message.error, now))
            case _:
                self._attempts.spoke(attempt)
