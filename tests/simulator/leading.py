"""What a backbone peer does while it leads: workers, epochs, prompts. All of it is new with each term."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from capabilities.errors import NoLeader, NotReady, SwarmError
from scheduler.audits import Audits
from scheduler.election_state import LeaderChanged
from scheduler.requests import Effect, FailedEffect, FinishedEffect, TokenEffect
from tests.simulator.checks import Checks
from tests.simulator.dispatching import Dispatching
from tests.simulator.election import BackbonePeer
from tests.simulator.engine import Engine, Patience
from tests.simulator.host import Host
from tests.simulator.inheritance import Inheritance, Keeper, Record
from tests.simulator.messages import Alive, Ask, Done, Failed, Hello, Token
from tests.simulator.placer import Placer
from tests.simulator.streams import End
from tests.simulator.toy import Experts

ALIVE_S = 1.0
COVER_S = 0.5


@dataclass(slots=True)
class _Prompt:
    stream: End
    ended: bool = False


class Leading:
    """Channel "members": where workers' streams come in."""

    channel = "members"

    def __init__(
        self,
        peer: BackbonePeer,
        dispatching: Dispatching,
        experts: Experts,
        parts: Any,
        patience: Patience,
        keeper: Keeper,
        checks: Checks,
        released: Callable[[str], int],
        *,
        own_copy: bool,
    ) -> None:
        self.host: Host = peer.host
        self.term = 0  # that this host leads, 0: it does not
        self.placer: Placer | None = None
        self.engine: Engine | None = None
        self.reaches: Callable[[Host], bool] = lambda host: True  # whether this host could serve if it led
        self._peer = peer
        self._dispatching = dispatching
        self._experts = experts
        self._parts = parts
        self._patience = patience
        self._keeper = keeper
        self._checks = checks
        self._released = released
        self._record: Record | None = None  # that this leadership leaves
        self._own_copy = own_copy
        self._prompts: dict[str, _Prompt] = {}
        peer.on_leader.append(self._leader_changed)

    def start(self) -> None:
        self._look()

    def _look(self) -> None:
        """Tell the election whether this peer covers every expert; tell askers that their leader lives."""
        covers = self.reaches(self.host) if self.placer is None else self.placer.coverage.reached
        if covers != self._peer.covers:
            self._peer.report(self._peer.eligible, covers)
        if self._record is not None and self.term:
            for peer in self._peer.peers:
                self.host.send(peer, "records", self._record)
        self.host.after(COVER_S, self._look)

    def _keep_record(self, data: bytes) -> None:
        self._checks.left(self.term, data)
        self._record = Record(self.term, data)
        self._keeper.keep(data)

    def _leader_changed(self, change: LeaderChanged) -> None:
        if self.term and (change.leader != self.host.name or change.term != self.term):
            self._end()
        if change.leader == self.host.name and self.term != change.term:
            self._begin(change.term)

    def _begin(self, term: int) -> None:
        self.term = term
        self._dispatching.reset()
        self.engine = Engine(self.host, self._dispatching, self._deliver, self._parts.batcher, self._patience)
        audits, record = Audits(bytes(16)), self._keeper.newest  # nobody here guesses at the secret
        if record is not None:
            audits.adopt(record.audits)
            self._checks.inherits(term, self._keeper.data)
        inheritance = Inheritance(record, self._keep_record, audits)
        self.placer = Placer(
            self.host, term, self._experts, self._dispatching, inheritance, audits, self._checks, self._released,
            own_copy=self._own_copy,
        )  # fmt: skip
        self.placer.changed = self.engine.rerouted
        self._dispatching.failed = self.placer.prover.failed
        self._dispatching.rates = self.placer.rate
        self._dispatching.timed = self.placer.timed

    def _end(self) -> None:
        """Another leads, or nobody: everybody who asked is told."""
        assert self.placer is not None
        assert self.engine is not None
        self.engine.live = False
        self._dispatching.reset()
        self.placer.end()
        self.placer = self.engine = None
        term, self.term, self._record = self.term, 0, None
        prompts, self._prompts = self._prompts, {}
        for prompt in prompts.values():
            prompt.stream.send(Failed(NoLeader(f"term {term} is over")))
            prompt.stream.close()

    # -- workers ------------------------------------------------------------------------------------------------

    def accept(self, end: End) -> None:
        end.on_message = lambda message: self._hello(end, message)

    def receive(self, sender: str, message: Any) -> None:
        pass

    def _hello(self, end: End, message: Any) -> None:
        if isinstance(message, Hello) and self.placer is not None and message.term == self.term:
            self.placer.stays.join(end, message)
        else:
            end.close()

    # -- prompts (their streams come to `Prompts`) ----------------------------------------------------------------

    def ask(self, end: End, ask: Ask) -> None:
        """A prompt came, for the leader of a term."""
        term = ask.term
        if self.engine is None or self.placer is None or term != self.term:
            self._refuse(end, NoLeader(f"{self.host.name} does not lead term {term}"))
            return
        if not self.placer.coverage.covers:
            self._refuse(end, NotReady("some experts have no holder"))
            return
        own = f"{end.peer} {ask.request.id} "
        for older in [name for name in self._prompts if name.startswith(own)]:
            self._gone(older)  # the newest attempt counts
        name = f"{own}{ask.attempt}"
        end.send(Alive())
        self._prompts[name] = prompt = _Prompt(end)
        end.on_close = lambda: self._gone(name)
        self._keep_telling(prompt)
        try:
            self.engine.submit(replace(ask.request, id=name))
        except SwarmError as error:
            del self._prompts[name]
            self._refuse(end, error)

    def _refuse(self, end: End, error: SwarmError) -> None:
        end.send(Failed(error))
        end.close()

    def _keep_telling(self, prompt: _Prompt) -> None:
        if prompt.stream.alive and not prompt.ended:
            prompt.stream.send(Alive())
            self.host.after(ALIVE_S, lambda: self._keep_telling(prompt))

    def _gone(self, name: str) -> None:
        prompt = self._prompts.pop(name, None)
        if prompt is not None and self.engine is not None:
            prompt.ended = True
            self.engine.cancel(name)

    def _deliver(self, effect: Effect) -> None:
        prompt = self._prompts.get(effect.request)
        if prompt is None:
            return
        match effect:
            case TokenEffect():
                prompt.stream.send(Token(effect.index, effect.token, effect.text))
            case FinishedEffect():
                self._over(effect.request, Done(effect.text))
            case FailedEffect():
                self._over(effect.request, Failed(effect.error))

    def _over(self, name: str, word: Done | Failed) -> None:
        prompt = self._prompts.pop(name)
        prompt.ended = True
        prompt.stream.send(word)
        prompt.stream.close()


class Prompts:
    """Channel "prompts": where askers' streams come in."""

    channel = "prompts"

    def __init__(self, leading: Leading) -> None:
        self._leading = leading

    def start(self) -> None:
        pass

    def accept(self, end: End) -> None:
        def first(message: Any) -> None:
            if isinstance(message, Ask):
                self._leading.ask(end, message)

        end.on_message = first

    def receive(self, sender: str, message: Any) -> None:
        pass
