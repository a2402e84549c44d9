"""One fault in the middle of one answer, and what came of it.

The prompt is asked by a peer that is neither the victim nor the leader, greedily and sampled in turn, and something
happens to the victim at a token drawn by lot. The answer must be complete and llama.cpp's own, token by token, as if
nothing had happened; afterwards the victim returns and all must agree again. Everything is drawn from the name of the
case and the number of the round, so that a round can be repeated.

| kind | what happens to the victim |
|---|---|
| kill | kill -9; it is started again |
| stop | SIGSTOP; SIGCONT after the answer |
| nap | the same for a minute: a laptop that sleeps |
| cut | no link to any other host |
| part | it and another peer are parted from the rest, which has a majority and every expert |
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from random import Random
from typing import Any, Final

from capabilities.errors import SwarmError
from tests.netns.swarm import BedNode, BedSwarm, Params, within
from tests.swarm_tools import logged

ROLES: Final = ("worker", "leader")
KINDS: Final = ("kill", "stop", "cut", "nap", "part")
CASES: Final = tuple(f"{role}-{kind}" for kind in KINDS for role in ROLES)
NAP_SECONDS: Final = 60.0
BACK_SECONDS_MAX: Final = 15.0
ALONE_SECONDS_MAX: Final = 10.0  # until a minority says that it has no leader
REFUSED_SECONDS_MAX: Final = 5.0  # until a prompt there has failed
FIRST_TOKENS: Final = 3  # of an answer, before anything happens
_STORIES: Final = ("A story about a lighthouse:", "Why does bread rise?", "How to mend a net:", "List five rivers.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one round came to, as a line of the resume file. Times in seconds, None where it did not come to that."""

    case: str
    round: int
    sampled: bool
    asker: str
    victim: str
    struck_at: int  # tokens that the asker had by then
    tokens: int
    complete: bool
    equal: bool
    pause_s: float | None  # the longest wait for a token after the fault
    elected_s: float | None  # from the leader's fault until the last of the majority knew the next one, by their logs
    back_s: float | None  # from the victim's return until all are ready and agree; None if that took too long
    error: dict[str, Any] | None  # what the answer ended with
    faults: tuple[str, ...]  # whatever else was not as it must be

    @property
    def good(self) -> bool:
        return self.complete and self.equal and self.back_s is not None and not self.faults

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "good": self.good}


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays what in a round."""

    victim: BedNode
    companion: BedNode | None  # parted from the rest with the victim
    asker: BedNode

    @classmethod
    def draw(cls, swarm: BedSwarm, role: str, chance: Random) -> Cast:
        """Without a companion where the rest would miss one to answer: a majority, or some expert."""
        leader = swarm.leader
        rows = {row["name"]: row for row in leader.status()["peers"]}
        others = [node for node in swarm.nodes if node is not leader]
        holders = [node for node in others if rows[node.name]["experts_held"]]  # their loss is felt
        victim = leader if role == "leader" else chance.choice(holders)
        votes = {name for name, row in rows.items() if "backbone" in row["roles"]}
        free = [node for node in others if node is not victim]
        spared = [n for n in free if not {n.name, victim.name} <= votes and swarm.can_spare([n, victim])]
        companion = chance.choice(spared) if spared else None
        asker = chance.choice([node for node in free if node is not companion])
        return cls(victim, companion, asker)

    @property
    def minority(self) -> list[BedNode]:
        return [self.victim] if self.companion is None else [self.victim, self.companion]


def strike(swarm: BedSwarm, cast: Cast, kind: str) -> None:
    victim = cast.victim
    if kind == "kill":
        victim.kill()
    elif kind in ("stop", "nap"):
        victim.send_signal(signal.SIGSTOP)
    elif kind == "cut":
        swarm.bed.cut_off(victim.host)
    else:
        minority = {node.host for node in cast.minority}
        swarm.bed.part(minority, set(range(swarm.bed.n)) - minority)


def mend(swarm: BedSwarm, victim: BedNode, kind: str) -> None:
    if kind == "kill":
        victim.start()
        victim.wait_up()
    elif kind in ("stop", "nap"):
        victim.send_signal(signal.SIGCONT)
    else:
        swarm.bed.heal()


def question(case: str, number: int, max_tokens: int) -> Params:
    """Greedy in even rounds, sampled in odd ones."""
    story = Random(f"{case} {number} story").choice(_STORIES)
    params: Params = {"prompt": story, "raw": True, "max_tokens": max_tokens, "ignore_eos": True}
    return params | ({"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0})


def play(
    swarm: BedSwarm, case: str, number: int, max_tokens: int, nap_s: float = NAP_SECONDS, slack: float = 1.0
) -> Outcome:
    """One round of a case, in a swarm whose peers are all ready; they are again if `back_s` is not None.

    slack: how many times as long as promised everything may take, on a machine that runs other things beside it.
    """
    role, kind = case.split("-")
    chance = Random(f"{case} {number}")
    cast = Cast.draw(swarm, role, chance)
    at = chance.randint(FIRST_TOKENS, max_tokens * 2 // 3)
    params = question(case, number, max_tokens)

    self_before = cast.victim.peer
    struck: list[float] = []

    def fault() -> None:
        struck.append(time.time())
        strike(swarm, cast, kind)

    came, tokens, error = watch(cast.asker, params, at, fault)
    faults: list[str] = []
    if kind == "part":
        faults += [fault for node in cast.minority for fault in alone(node, slack)]
    if kind == "nap":
        time.sleep(max(0.0, struck[0] + nap_s - time.time()))
    mend(swarm, cast.victim, kind)
    back_s: float | None = None
    try:
        back_s = round(swarm.wait_ready(swarm.nodes, BACK_SECONDS_MAX * slack), 3)
        if cast.victim.peer != self_before:
            faults.append(f"{cast.victim.name} came back as another peer")
    except AssertionError as late:
        faults.append(str(late))
    gaps = [after - before for before, after in zip(came[at - 1 :], came[at:], strict=False)]
    return Outcome(
        case=case,
        round=number,
        sampled=bool(number % 2),
        asker=cast.asker.name,
        victim=cast.victim.name,
        struck_at=at,
        tokens=len(tokens),
        complete=error is None and len(tokens) == max_tokens,
        equal=tokens == swarm.expected(params)[: len(tokens)],
        pause_s=round(max(gaps), 3) if gaps else None,
        elected_s=elected_after(swarm, cast, struck[0]) if role == "leader" else None,
        back_s=back_s,
        error=error,
        faults=tuple(faults),
    )


def elected_after(swarm: BedSwarm, cast: Cast, since_s: float) -> float | None:
    """Seconds until each of those who were not struck had said in its log who leads next; None if one never did."""
    seconds = []
    for node in swarm.nodes:
        if node not in cast.minority:
            known = [line for line in logged(node, "leader.known") if line["leader"] and _instant_s(line) > since_s]
            if not known:
                return None
            seconds.append(_instant_s(known[0]) - since_s)
    return round(max(seconds), 3)


def _instant_s(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def alone(node: BedNode, slack: float) -> list[str]:
    """What is wrong with a node of the minority: it must say that nobody leads, and refuse prompts at once."""

    def knows() -> bool:
        status = node.status()  # a leader that just does not answer the question may still be there for prompts
        return status["leader"] is None and "did not answer" not in status["reason"]

    try:
        within(ALONE_SECONDS_MAX * slack, knows)
    except AssertionError:
        return [f"{node.name} still counts on a leader after {ALONE_SECONDS_MAX * slack:g} s alone"]
    started = time.monotonic()
    try:
        node.call("ask", **question("", 0, 5))
    except SwarmError as error:
        seconds = time.monotonic() - started
        if error.type == "no_leader" and seconds <= REFUSED_SECONDS_MAX * slack:
            return []
        return [f"{node.name} refused a prompt after {seconds:.1f} s: {error.to_json()}"]
    return [f"{node.name} answered a prompt without a majority"]


def watch(
    asker: BedNode, params: Params, at: int, fault: Callable[[], None]
) -> tuple[list[float], list[int], dict[str, Any] | None]:
    """(when each token came, the tokens, the error that the answer ended with); the fault happens after `at` tokens."""
    came: list[float] = []
    tokens: list[int] = []
    struck = False
    try:
        with asker.stream(**params) as call:
            for event in call:
                if event["event"] != "token" or event["token"] is None:
                    continue
                assert event["index"] == len(tokens), "a token was lost or repeated"
                came.append(time.monotonic())
                tokens.append(event["token"])
                if len(tokens) == at:
                    struck = True
                    fault()
    except SwarmError as failed:
        return came, tokens, failed.to_json()
    finally:
        if not struck:
            fault()  # whoever mends it finds it broken
    return came, tokens, None
