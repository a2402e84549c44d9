"""One request on the asker's side, across leaders: which attempt counts, what of it is delivered, when to try again.

A leader may be lost, or replaced, in the middle of an answer. The asker has the tokens so far, so it submits the
request again, with them, to whoever leads now, and the answer goes on where it stood. Each submission is an attempt
with a number of its own, at one leader of one term. Tokens count only from the attempt that runs, and only the next
index: a leader of the past may go on streaming and does no harm.

    effects = attempts.begin(leader, reason, now)    once; then, in any order:
    effects = attempts.follow(leader, reason, now)   who leads has changed
    effects = attempts.spoke(attempt), .token(...), .done(...), .failed(...), .lost(...)
    effects = attempts.tick(now)                     at the latest at `next_instant`

The last effect of a request is one Finish or Fail; after it nothing has an effect any more.

        begin ----> runs <----------------------------+
                    |  | lost, or refused for now     | somebody leads: another one at once, the same one RETRY_S later
                    |  +-----------> waits -----------+
               done |                  | nobody for no_leader_s, or an error that lasts
                    v                  v
                  Finish              Fail
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from capabilities.errors import DeadlineExceeded, Internal, NoLeader, NotReady, Overloaded, SwarmError

NO_LEADER_S = 15.0  # an election takes 3 s, taking over the trunk's work a few more; a person waits in front of it
PARTED_S = 2.0  # without a token so far, where nobody can be elected: who only just asked hears it soon
RETRY_S = 1.0  # before the same leader is asked again
DEADLINE_S_MIN = 0.001  # the least that a request can ask for
ATTEMPTS_MAX = 64  # a swarm that changes its leader so often during one answer has other troubles


@dataclass(frozen=True, slots=True)
class Leading:
    """Who leads a term."""

    peer: str
    term: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Send the request to this leader, and give up the stream of any attempt before it.

    generated   the answer so far
    deadline_s  what is left of the request's own, None if it has none
    """

    attempt: int
    leader: Leading
    generated: tuple[int, ...] = field(repr=False)
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Deliver:
    """The answer's next token, and the text that became safe to show with it."""

    index: int
    token: int
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete; `leader` finished it."""

    leader: Leading


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends without a complete answer; what was delivered stands."""

    error: SwarmError


AttemptEffect = Submit | Deliver | Finish | Fail


def is_passing(attempt: int, error: SwarmError) -> bool:
    """Whether a request goes on in another attempt after a leader has ended this one with that error."""
    # A leader that has just taken over may not be ready, or flooded by those that come over with it.
    return isinstance(error, (NoLeader, NotReady, Overloaded) if attempt > 0 else NoLeader)


class Attempts:
    """See the module. Instants are seconds of one monotonic clock.

    deadline_s   for the whole request, from `now` on; None: each leader sets its own
    no_leader_s  how long a request that lost its leader waits for another; 0: not at all, its loss is the end
    """

    def __init__(
        self, request_id: str, now: float, *, deadline_s: float | None = None, no_leader_s: float = NO_LEADER_S
    ) -> None:
        self.tokens: list[int] = []  # of the answer so far
        self._request_id = request_id
        self._deadline = math.inf if deadline_s is None else now + deadline_s
        self._deadline_s = deadline_s
        self._no_leader_s = no_leader_s
        self._leader: Leading | None = None  # as last heard
        self._reason = ""  # why there is none
        self._parted = False  # nobody can be elected
        self._term = 0  # the newest that was heard of
        self._attempt = -1
        self._asked: Leading | None = None  # by the newest attempt
        self._runs = False
        self._lost_at = math.inf  # since when no attempt has got anywhere
        self._retry_at = math.inf
        self._error: SwarmError | None = None  # what the last attempt came to
        self._ended = False

    @property
    def attempt(self) -> int:
        """The number of the newest attempt, -1 before any."""
        return self._attempt

    @property
    def leader(self) -> Leading | None:
        """Whom the newest attempt asked."""
        return self._asked

    @property
    def ended(self) -> bool:
        return self._ended

    def next_instant(self) -> float:
        """When `tick` next has something to do, if nothing happens before; infinity: never."""
        if self._ended:
            return math.inf
        if self._runs:
            return self._deadline
        retry_at = self._retry_at if self._leader is not None else math.inf
        return min(self._deadline, self._lost_at + self._patience_s(), retry_at)

    # Who leads

    def begin(self, leader: Leading | None, reason: str, now: float) -> list[AttemptEffect]:
        """The request came. Without a leader it fails at once: whoever asks can ask again."""
        self._hear(leader, reason)
        if leader is None:
            return self._fail(NoLeader(f"the swarm has no leader: {reason}", request_id=self._request_id))
        return self._submit(leader, now)

    def follow(self, leader: Leading | None, reason: str, now: float, *, parted: bool = False) -> list[AttemptEffect]:
        """Who leads, as far as is known now. An attempt that runs is let run until another leader is known.

        parted: nobody can be elected now. A request that has no token yet then fails soon; others hope for longer.
        """
        self._parted = parted
        if self._ended or not self._hear(leader, reason):
            return []
        if leader is None or leader == self._asked:
            return self.tick(now) if parted else []
        return self._submit(leader, now)

    def _hear(self, leader: Leading | None, reason: str) -> bool:
        """Whether this is news; a leader of an older term is none."""
        if leader is not None and leader.term < self._term:
            return False
        self._leader, self._reason = leader, reason
        if leader is not None:
            self._term = leader.term
        return True

    # What an attempt brings

    def spoke(self, attempt: int) -> bool:
        """The leader has the request; whether this attempt counts."""
        if not self._counts(attempt):
            return False
        self._lost_at, self._error = math.inf, None
        return True

    def token(self, attempt: int, index: int, token: int, text: str) -> list[AttemptEffect]:
        """The next token is delivered; one that was delivered already is left out."""
        if not self.spoke(attempt):
            return []
        if index < len(self.tokens) and self.tokens[index] == token:
            return []
        if index != len(self.tokens):
            wanted = len(self.tokens)
            return self._fail(Internal(f"the leader sent token {index} for {wanted}", request_id=self._request_id))
        self.tokens.append(token)
        return [Deliver(index, token, text)]

    def done(self, attempt: int) -> list[AttemptEffect]:
        """The answer is complete."""
        if not self._counts(attempt):
            return []
        assert self._asked is not None
        self._ended = True
        return [Finish(self._asked)]

    def failed(self, attempt: int, error: SwarmError, now: float) -> list[AttemptEffect]:
        """The leader ended the attempt with a typed error."""
        if not self._counts(attempt):
            return []
        return self._wait(error, now) if is_passing(attempt, error) else self._fail(error)

    def lost(self, attempt: int, reason: str, now: float) -> list[AttemptEffect]:
        """The attempt's stream broke, was silent for too long, or never came to be."""
        if not self._counts(attempt) or self._asked is None:
            return []
        peer = self._asked.peer
        error = NoLeader(f"the leader {peer} was lost: {reason}", peer=peer, request_id=self._request_id)
        return self._wait(error, now)

    def tick(self, now: float) -> list[AttemptEffect]:
        """Time has passed."""
        if self._ended:
            return []
        if now >= self._deadline:
            message = f"the request's deadline of {self._deadline_s:g} s passed after {len(self.tokens)} tokens"
            return self._fail(DeadlineExceeded(message, request_id=self._request_id))
        if self._runs:
            return []
        if now >= self._lost_at + self._patience_s():
            return self._fail(self._last_word())
        if self._leader is not None and now >= self._retry_at:
            return self._submit(self._leader, now)
        return []

    # Inside

    def _patience_s(self) -> float:
        """How long to wait for another leader."""
        hopeless = self._parted and self._leader is None and not self.tokens
        return min(self._no_leader_s, PARTED_S) if hopeless else self._no_leader_s

    def _counts(self, attempt: int) -> bool:
        return self._runs and not self._ended and attempt == self._attempt

    def _submit(self, leader: Leading, now: float) -> list[AttemptEffect]:
        if now >= self._deadline:
            return self.tick(now)
        if self._attempt + 1 >= ATTEMPTS_MAX:
            return self._fail(self._last_word())
        self._attempt += 1
        self._asked, self._runs, self._retry_at = leader, True, math.inf
        left = None if self._deadline_s is None else max(self._deadline - now, DEADLINE_S_MIN)
        return [Submit(self._attempt, leader, tuple(self.tokens), left)]

    def _wait(self, error: SwarmError, now: float) -> list[AttemptEffect]:
        """The attempt came to nothing; another one may do better."""
        self._runs, self._error = False, error
        self._lost_at = min(self._lost_at, now)
        self._retry_at = now + RETRY_S
        if self._no_leader_s > 0 and self._leader is not None and self._leader != self._asked:
            return self._submit(self._leader, now)
        return self.tick(now)

    def _last_word(self) -> SwarmError:
        error = self._error
        if error is None:
            return NoLeader(f"{self._attempt + 1} leaders were lost during the answer", request_id=self._request_id)
        if self._no_leader_s > 0 and isinstance(error, NoLeader):
            why = f" ({self._reason})" if self._leader is None and self._reason else ""
            message = f"{error.message}; nobody took its place for {self._patience_s():g} s{why}"
            return NoLeader(message, **error.details)
        return error

    def _fail(self, error: SwarmError) -> list[AttemptEffect]:
        self._ended = True
        return [Fail(error)]
