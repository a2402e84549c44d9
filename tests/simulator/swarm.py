"""One run: a swarm under faults, then healed. `simulate(seed)` tells how it went, and always the same for one seed."""

from __future__ import annotations

import contextlib
import traceback
from dataclasses import dataclass

from capabilities.backbone import BackboneSet, Member
from capabilities.errors import UsageError
from scheduler.election_roles import Role
from scheduler.election_state import DamagedState, HardState
from tests.election_tools import OWNER, SWARM, backbone_of, sign_as, vote_file
from tests.simulator.checks import Breach, Checks, read_votes
from tests.simulator.election import VOTES, BackbonePeer, Orders, Parts, Worker
from tests.simulator.forger import Forger
from tests.simulator.host import Behaviour, Host
from tests.simulator.nemesis import Nemesis
from tests.simulator.network import Network
from tests.simulator.world import StandsStill, World

SIZES = (1, 2, 3, 3, 3, 4, 5, 5, 7)  # of the first backbone
SPARES = 2
WORKERS = 2
OWNER_S = 0.7  # between two attempts of the owner to get a backbone accepted
RECOVERY_S_MAX = 6.0  # from healing to a leader, at worst; the distribution's limit is for many runs together
AGREEMENT_S_MAX = 15.0  # from healing to everybody agreeing
PLAGUE_S = 10.0
POLL_S = 0.05
STEADY_S = 2.0  # that agreement must last


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run went. `breach` is what must not happen and did, None if all is well. Seconds of simulated time."""

    seed: int
    trace_hash: str
    breach: str | None
    recovery_s: float | None  # from healing to a leader
    terms: int
    orders: int
    mistakes: int
    events: int
    trace: tuple[str, ...]
    answers: int = 0  # complete ones
    failures: int = 0  # requests that ended with an error
    went_on: int = 0  # answers that more than one leader gave
    replaced: int = 0  # parts of layers that another holder computed


class Swarm:
    """The hosts of one run, and the owner of the swarm."""

    def __init__(
        self,
        seed: int,
        parts: Parts,
        size: int | None = None,
        spares: int = SPARES,
        sizes: tuple[int, ...] = SIZES,
    ) -> None:
        """`size`: of the first backbone (None draws one of `sizes`); `spares`: peers that may be added to it."""
        self.world = World(seed)
        self.network = Network(self.world)
        self.random = self.world.chance("swarm")
        self.parts = parts
        size = size or self.random.choice(sizes)
        self.backbone = [f"B{n}" for n in range(1, size + spares + 1)]
        self.workers = self._member_names()
        self.hosts: dict[str, Host] = {}
        self.forger = Forger(self.world, self.network, self.backbone, self.workers)
        self.first = backbone_of(self.backbone[:size])
        self._owners = [self.first]  # every version that the owner made
        self.checks = Checks(self.hosts, self._owners, self.forger.forged)
        self.network.taps += [self.checks.sent, self.forger.overhear]
        for name in (*self.backbone, *self.workers):
            self.hosts[name] = Host(self.world, self.network, name, self._behaviours, skewed=True)
        for name in self.backbone:
            self.hosts[name].disk.files[VOTES] = HardState(SWARM, vote_file(name)).to_file()  # joining wrote it

    @property
    def wanted(self) -> BackboneSet:
        """The owner's newest backbone."""
        return self._owners[-1]

    def _member_names(self) -> list[str]:
        """Whoever obeys leaders, and is no backbone peer."""
        return [f"W{n}" for n in range(1, WORKERS + 1)]

    def _behaviours(self, host: Host) -> list[Behaviour]:
        if host.name in self.workers:
            own: list[Behaviour] = [Worker(host, self.parts, self.checks)]
        else:
            first = self.first if host.name in self.first.peers else None
            peer = self.parts.backbone_peer(host, self.parts, self.checks, first)
            own = [Orders(peer, tuple(self.workers)), peer]
        return own + self.parts.more(host)

    # -- looking in ---------------------------------------------------------------------------------------------

    def peer(self, host: Host) -> BackbonePeer | None:
        """The backbone peer on a host, if it is up and has begun."""
        peer = host.behaviours.get("election")
        return peer if isinstance(peer, BackbonePeer) and peer.election is not None else None

    def peers(self) -> list[BackbonePeer]:
        return [peer for name in self.backbone if (peer := self.peer(self.hosts[name])) is not None]

    def leaders(self) -> list[Host]:
        """Who believes that it leads."""
        return [p.host for p in self.peers() if p.election is not None and p.election.role is Role.LEADER]

    def stored(self, peer: str) -> HardState | None:
        """What a backbone peer's disk holds; None: torn."""
        try:
            return read_votes(self.hosts[peer].disk.files[VOTES])
        except DamagedState:
            return None

    def keeps_seat(self, member: Member) -> bool:
        """Whether a member's disk holds the vote file that the owner knows; else its votes are lost."""
        state = self.stored(member.peer)
        return state is not None and state.vote_file == member.vote_file

    def acts(self) -> bool:
        """Whether the owner's newest backbone acts for somebody."""
        return any(peer.election is not None and peer.election.backbone == self.wanted for peer in self.peers())

    def led(self) -> int:
        """The newest term whose leader a quorum follows, 0 if there is none."""
        elections = {peer.host.name: peer.election for peer in self.peers() if peer.election is not None}
        terms = [0]
        for name, leader in elections.items():
            if leader.role is Role.LEADER and leader.backbone is not None:
                following = [other for other, e in elections.items() if (e.term, e.leader) == (leader.term, name)]
                terms.append(leader.term * leader.backbone.is_quorum(following))
        return max(terms)

    def agreed(self) -> bool:
        """Whether members follow one leader under the owner's newest backbone, the rest knows itself outside, and
        workers obey that leader."""
        views = set()
        for peer in self.peers():
            assert peer.election is not None
            member = next((member for member in self.wanted.members if member.peer == peer.host.name), None)
            seated = member is not None and self.keeps_seat(member)
            if seated != (peer.election.role is not Role.OUTSIDER):
                return False
            if seated:
                views.add((peer.election.backbone, peer.election.term, peer.election.leader))
        if len(views) != 1:
            return False
        backbone, term, leader = views.pop()
        behaviours = [self.hosts[name].behaviours["orders"] for name in self.workers]
        mandates = [behaviour.guard.obeyed for behaviour in behaviours if isinstance(behaviour, Worker)]
        obeyed = all(mandate is not None and mandate.term == term for mandate in mandates)
        return backbone == self.wanted and leader is not None and obeyed

    # -- what people and the nemesis do -------------------------------------------------------------------------

    def report(self, name: str, *, eligible: bool, covers: bool) -> None:
        """A peer's fitness to lead changes."""
        peer = self.peer(self.hosts[name])
        if peer is not None and not peer.host.stopped:
            peer.report(eligible, covers)

    def hand_over(self, host: Host) -> None:
        peer = self.peer(host)
        if peer is not None and peer.election is not None and not host.stopped:
            peer.take(peer.election.hand_over(host.now()))

    def may_tear(self, host: Host) -> bool:
        """Whether this host's disk may lie: only while the members that keep their votes are a quorum without it, in
        every version that may still have to act by what the other disks hold."""
        if host.name in self.workers:
            return True
        states = [self.stored(peer) for peer in self.backbone if peer != host.name]
        acting = [state.enactment.current.version for state in states if state is not None and state.enactment]
        return all(
            sum(self.keeps_seat(member) and member.peer != host.name for member in backbone.members) >= backbone.quorum
            for backbone in self._owners[max(acting, default=1) - 1 :]
        )

    def change_backbone(self) -> None:
        """The owner makes the next version, once the last one acts: a lost member goes first."""
        if not self.acts():
            return
        members, seats = self.wanted.members, [member.peer for member in self.wanted.members]
        lost = [member for member in members if not self.keeps_seat(member)]
        absent = [peer for peer in self.peers() if peer.host.name not in seats]
        if lost:
            after = [member for member in members if member != lost[0]]
        elif absent and (len(members) == 1 or self.random.random() < 0.5):
            chosen = self.random.choice(absent)
            assert chosen.election is not None
            after = [*members, Member(chosen.host.name, chosen.election.status().vote_file)]
        elif len(members) > 1:
            leaver = self.random.choice(members)
            after = [member for member in members if member != leaver]
        else:
            return
        self._owners.append(BackboneSet.make(SWARM, after, sign_as(OWNER), self.wanted))
        self.world.note(f"the owner wants backbone {self.wanted.version}: {self.wanted.peers}")

    def insist(self) -> None:
        """The owner gives the newest version to somebody, again and again until it acts."""
        ready = [peer for peer in self.peers() if not peer.host.stopped]
        if ready and not self.acts():
            peer = self.random.choice(ready)
            assert peer.election is not None
            with contextlib.suppress(UsageError):  # it is behind, or not done with the version before
                peer.take(peer.election.propose(self.wanted, peer.host.now()))
        self.world.at(self.world.now + OWNER_S, self.insist)


def simulate(seed: int, parts: Parts | None = None, *, plague_s: float = PLAGUE_S) -> Outcome:
    """One run: `plague_s` seconds of faults, then healing, then quiet."""
    swarm = Swarm(seed, parts or Parts())
    world = swarm.world
    recovery_s = breach = None
    try:
        for host in swarm.hosts.values():
            world.at(swarm.random.uniform(0, 0.5), host.boot)
        Nemesis(swarm, plague_s).begin()
        swarm.insist()
        world.run(plague_s)
        recovery_s = recover(swarm)
        settle(swarm)
    except Exception as found:
        breach = told(world, found)
    checks = swarm.checks
    counts = (len(checks.terms), checks.orders, checks.mistakes, world.events)
    return Outcome(seed, world.trace_hash, breach, recovery_s, *counts, tuple(world.trace))


def told(world: World, found: Exception) -> str:
    """What broke, in a line; the history gets the rest. Whatever an object raises that its shell does not expect would
    end a daemon."""
    if isinstance(found, Breach | StandsStill):
        line = str(found)
    else:
        world.trace.extend(traceback.format_exc().splitlines())
        line = f"{type(found).__name__}: {found}"
    world.note(line)
    return line


def recover(swarm: Swarm) -> float:
    """Run until a leader leads; how long that took."""
    begin = swarm.world.now
    while not swarm.led():
        swarm.world.run(swarm.world.now + POLL_S)
        if swarm.world.now - begin > RECOVERY_S_MAX:
            raise Breach(f"no leader within {RECOVERY_S_MAX} s of healing")
    return swarm.world.now - begin


def settle(swarm: Swarm) -> None:
    """Run until everybody has agreed for a while, without a change of terms."""
    world, checks = swarm.world, swarm.checks
    begin = steady_since = world.now
    term = 0
    while world.now - steady_since < STEADY_S:
        world.run(world.now + POLL_S)
        if not swarm.agreed() or term != max(checks.terms, default=0):
            term, steady_since = max(checks.terms, default=0), world.now
        if world.now - begin > AGREEMENT_S_MAX:
            raise Breach(f"no lasting agreement within {AGREEMENT_S_MAX} s of healing")
