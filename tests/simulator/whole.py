"""One run of a whole swarm: elections, workers, placements, dispatches and answers, under faults and healed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from scheduler.attempts import Attempts
from scheduler.batching import Batcher
from tests.simulator.answers import Answers
from tests.simulator.asker import Asker, Query
from tests.simulator.checks import Breach
from tests.simulator.dispatching import Dispatching
from tests.simulator.election import Orders, Parts
from tests.simulator.engine import Patience
from tests.simulator.harm import Harm
from tests.simulator.host import Behaviour, Host
from tests.simulator.inheritance import Keeper
from tests.simulator.leading import Leading, Prompts
from tests.simulator.member import Member
from tests.simulator.swarm import POLL_S, Outcome, Swarm, recover, settle, told
from tests.simulator.toy import EXPERT_BYTES, EXPERTS, LAYERS, Experts
from tests.simulator.volunteer import Health, Mischief, Volunteer

SIZES = (1, 3, 3, 3, 5)
WORKERS = (2, 3, 3, 4, 5)
PLAGUE_S = (8.0, 20.0, 20.0, 45.0)
SUMS = 0.2  # share of the swarms whose workers add their rows
SERVED_S_MAX = 60.0  # from agreement to an answer for everybody who asks
ASK_AGAIN_S = 1.0
DROPPED_S_MAX = 1.5  # from an asker's leaving to the end of the work for it, its stream's closing on the way
MODEL_BYTES = EXPERT_BYTES * EXPERTS * len(LAYERS)


@dataclass(frozen=True)
class WholeParts(Parts):
    """The further objects of whole swarms."""

    batcher: Callable[..., Batcher] = Batcher
    attempts: Callable[..., Attempts] = Attempts


@dataclass(slots=True)
class Machines:
    """What is drawn for a seed and outlives processes."""

    health: dict[str, Health] = field(default_factory=dict)
    have_file: frozenset[str] = frozenset()  # backbone peers with the model's own file
    releases: Counter[str] = field(default_factory=Counter)  # by the owner


class WholeSwarm(Swarm):
    """See the module."""

    parts: WholeParts

    def __init__(self, seed: int, parts: WholeParts) -> None:
        super().__init__(seed, parts, sizes=SIZES)
        self.experts = Experts(self.world.chance("experts"))
        self.sums = self.random.random() < SUMS
        self.patience = Patience(self.random.choice((0.0, 6.0, 20.0, 20.0)), self.random.random() < 0.5)
        self.answers = Answers(self.checks, self.experts, exact=not self.sums)
        self.plague_s = self.random.choice(PLAGUE_S)
        self.machines = Machines()
        self._draw_machines()

    def _member_names(self) -> list[str]:
        self.volunteers = [f"W{n}" for n in range(1, self.random.choice(WORKERS) + 1)]
        self.askers = ["A1", "B1", "W1"]
        return [*self.volunteers, "A1"]

    def _draw_machines(self) -> None:
        random, health = self.random, self.machines.health
        for name in self.volunteers:
            kind, machine = random.choice(("x", "x", "x", "y", "")), random.choice(("", "", "", "one machine"))
            health[name] = Health(self.draw_budget(), kind, machine)
        self.make_room()
        if random.random() < 0.2:
            name = random.choice(self.volunteers)
            health[name].mischief = Mischief.WRONG
            self.checks.wrong.add(name)
        self.machines.have_file = frozenset(name for name in self.backbone if random.random() < 0.2)

    def draw_budget(self) -> int:
        return round(MODEL_BYTES * self.random.choice((0.5, 0.7, 1.0, 1.0, 2.0)))

    def make_room(self) -> None:
        """See to it that the workers together can hold the model, as all of them well."""
        health = self.machines.health
        if sum(each.budget_bytes for each in health.values()) < 1.5 * MODEL_BYTES:
            health["W1"].budget_bytes = 2 * MODEL_BYTES
            if "W1" in self.hosts and self.hosts["W1"].up:
                self.hosts["W1"].crash()  # its daemon starts again with it

    def release(self, worker: str) -> None:
        """The owner takes back what leaders hold of a worker."""
        self.machines.releases[worker] += 1
        self.checks.released(worker)
        for name in self.backbone:
            leading = self.hosts[name].behaviours.get("members")
            if isinstance(leading, Leading) and leading.placer is not None:
                self.hosts[name].do(partial(leading.placer.owner_released, worker))

    def _behaviours(self, host: Host) -> list[Behaviour]:
        member = Member(host, self.parts, self.checks)
        built: list[Behaviour] = [member]
        if host.name in self.volunteers:
            health = self.machines.health[host.name]
            built.append(Volunteer(host, member, self.hosts, self.experts, health, self.checks))
        if host.name in self.backbone:
            first = self.first if host.name in self.first.peers else None
            peer = self.parts.backbone_peer(host, self.parts, self.checks, first)
            dispatching = Dispatching(host, self.experts, self.answers.combined, sums=self.sums)
            dispatching.replaced = self.answers.took_over
            own_copy = host.name in self.machines.have_file
            keeper = Keeper(host, member)
            leading = Leading(
                peer, dispatching, self.experts, self.parts, self.patience, keeper, self.checks,
                self.machines.releases.__getitem__, own_copy=own_copy,
            )  # fmt: skip
            leading.reaches = self.reaches
            built += [Orders(peer, tuple(self.hosts)), keeper, dispatching, leading, Prompts(leading), peer]
        if host.name in self.askers:
            asker = Asker(host, member, self.hosts, self.experts, self.answers, self.parts.attempts, self.plague_s)
            built.append(asker)
        return built + self.parts.more(host)

    # -- looking in ---------------------------------------------------------------------------------------------

    def reaches(self, host: Host) -> bool:
        """Whether enough workers are up, and connected with this host, to hold every expert."""
        cuts = self.network.cuts
        room = sum(
            self.machines.health[name].budget_bytes
            for name in self.volunteers
            if self.hosts[name].up and (name, host.name) not in cuts and (host.name, name) not in cuts
        )
        return room >= MODEL_BYTES


def simulate_whole(seed: int, parts: WholeParts | None = None) -> Outcome:
    """One run: faults for a while, then healing, then everybody is served."""
    swarm = WholeSwarm(seed, parts or WholeParts())
    world = swarm.world
    recovery_s = breach = None
    try:
        for host in swarm.hosts.values():
            world.at(swarm.random.uniform(0, 0.5), host.boot)
        Harm(swarm, swarm.plague_s).begin()
        swarm.insist()
        _watch(swarm)
        world.run(swarm.plague_s)
        recovery_s = recover(swarm)
        settle(swarm)
        _serve(swarm)
        _rest(swarm)
    except Exception as found:
        breach = told(world, found)
    checks = swarm.checks
    counts = (len(checks.terms), checks.orders, checks.mistakes, world.events)
    answers = swarm.answers
    served = (answers.complete, sum(answers.failures.values()), answers.went_on, answers.replaced)
    return Outcome(seed, world.trace_hash, breach, recovery_s, *counts, tuple(world.trace), *served)


def _watch(swarm: WholeSwarm) -> None:
    """Nothing hangs, all the while."""
    swarm.answers.nothing_hangs(swarm.world.now)
    swarm.world.at(swarm.world.now + 0.5, lambda: _watch(swarm))


def _serve(swarm: WholeSwarm) -> None:
    """Everybody asks until it is answered."""
    world = swarm.world
    begin = world.now
    asked: dict[str, Query] = {}
    served: set[str] = set()
    while len(served) < len(swarm.askers):
        for name in swarm.askers:
            asker = swarm.hosts[name].behaviours["asker"]
            assert isinstance(asker, Asker)
            query = asked.get(name)
            if query is not None and query.finished:
                served.add(name)
            elif query is None or query.ended:
                asked[name] = asker.ask(20.0)
        world.run(world.now + (POLL_S if served else ASK_AGAIN_S))
        if world.now - begin > SERVED_S_MAX:
            why = {name: query.error and query.error.message for name, query in asked.items()}
            raise Breach(f"not served within {SERVED_S_MAX} s of agreement: {why}")


def _rest(swarm: WholeSwarm) -> None:
    """Once nobody waits for anything any more, no leader works for anybody."""
    while swarm.answers.awaited():  # `_watch` sees to it that this ends
        swarm.world.run(swarm.world.now + ASK_AGAIN_S)
    swarm.world.run(swarm.world.now + DROPPED_S_MAX)
    for name in swarm.backbone:
        leading = swarm.hosts[name].behaviours["members"]
        assert isinstance(leading, Leading)
        if leading.engine is not None:
            statistics = leading.engine.batcher.statistics()
            if statistics.running or statistics.waiting:
                raise Breach(f"still at work: {name} has {statistics.running} requests that nobody waits for")
