"""`swarmctl audit experiment`: cheats until each is out, honest peers of every kernel under full auditing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import trio

from backends.device import Device
from backends.experts import ExpertBackend
from backends.llama import start_library
from capabilities.errors import KernelFailed, SwarmError, UsageError
from swarmnode.compute import load_factory
from swarmnode.equivalence.restarts import Restarts
from swarmnode.equivalence.targets import STAND_IN, find_target
from swarmnode.experiment.cheats import CHEATS, Cheat, by_name
from swarmnode.experiment.dispatches import Dispatches, open_dispatches
from swarmnode.experiment.report import Kept, cheat_summary, honest_summary, trial_json, watch_json
from swarmnode.experiment.trials import FullAudits, JudgeOne, Standing, cheat_trial, watch_honest
from swarmnode.kernels.store import kernels_called, listing
from swarmnode.leader.judge import Judge
from swarmnode.leader.probe import at_hand

Progress = Callable[[str, int, int], None]

_BLOCK: Final = 250  # audits of an honest peer between two lines of the file
_THREADS: Final = 1
_ALWAYS_HERE: Final = (STAND_IN, "reference:q8", "reference:f32", "reference", "reference:f16")
_TURN_S: Final = 60.0  # of a peer, where they take turns: beside it, to start emulated kernels is little
_BLOCK_OF_TURN: Final = 25  # audits: those of emulated kernels take a second or two each


@dataclass(frozen=True, slots=True)
class Effort:
    """trials: of each cheat and standing. dispatches: after which a cheat counts as missed. audits, minutes: of each
    honest peer, whichever ends first; or in place of both, together_minutes: of all honest peers, who take turns."""

    trials: int
    dispatches: int
    audits: int
    minutes: float
    together_minutes: float | None = None


@dataclass(frozen=True, slots=True)
class Suspect:
    """A cheat to try: its name, how to make it, and of how many dispatches one is wrong (as a class of somebody's own
    says by its `every`; 1 if it says nothing)."""

    name: str
    make: Callable[[], ExpertBackend]
    every: int


def run_experiment(
    model: Path,
    cheats: Sequence[str] | None,
    honest: Sequence[str] | None,
    *,
    seed: int,
    effort: Effort,
    resume: Path | None,
    progress: Progress,
) -> dict[str, Any]:
    """Try; the result is what `--json` prints. Empty: all cheats, or all honest kernels of this machine;
    None: none.

    Raises:
        SwarmError: a name or the model cannot be used, or the file to go on from is another experiment's.
    """
    start_library()
    suspects = [] if cheats is None else [find_cheat(name) for name in cheats or by_name()]
    targets = [] if honest is None else list(honest or honest_targets())
    for name in targets:
        find_target(name)  # what cannot be had is said before hours have passed
    kept = Kept(resume, {"model": model.name, "seed": seed, "dispatches": effort.dispatches})
    with open_dispatches(model, seed, progress) as dispatches:
        return trio.run(_Experiment(dispatches, seed, effort, kept, progress).run, suspects, targets, model.name)


def find_cheat(name: str) -> Suspect:
    """A cheat by its name, or a class as module:Class. UsageError if there is none."""
    if kind := by_name().get(name):
        return Suspect(name, partial(kind.make, threads=_THREADS, every=kind.every, honest_first=0), kind.every)
    if ":" not in name:
        names = ", ".join(each.name for each in CHEATS)
        raise UsageError(f"no cheat is called {name!r}", hint=f"Choose from: {names}; or a class as module:Class.")
    made = load_factory(name)
    every = getattr(made, "every", 1)
    if not isinstance(every, int) or every < 1:
        raise UsageError(f"{name} says that it cheats in one of {every!r:.40} dispatches: it must be a whole number")
    if isinstance(made, type) and issubclass(made, Cheat):
        return Suspect(name, partial(made, threads=_THREADS, every=every, honest_first=0), every)
    return Suspect(name, partial(made, threads=_THREADS), every)


def honest_targets() -> Iterator[str]:
    """Every kernel of this machine, and NumPy in every precision."""
    yield from _ALWAYS_HERE
    for each in listing():
        if each["built"] and not each["missing"]:
            name = each["target"]
            yield from (target for target in (name, f"{name}:f32") if kernels_called(target))


@dataclass(slots=True)
class _Honest:
    """A peer with these kernels, whose sequential tests go on through all of its audits."""

    target: str
    tests: FullAudits
    watches: list[dict[str, Any]] = field(default_factory=list)
    restarts: Restarts = field(default_factory=Restarts)
    reason: str | None = None  # why it computes no more

    @property
    def audits(self) -> int:
        return sum(watch["audits"] + watch["refused"] for watch in self.watches)

    @property
    def seconds(self) -> float:
        return sum((float(watch["seconds"]) for watch in self.watches), 0.0)

    @property
    def convicted(self) -> bool:
        return any(watch["changes"].get("quarantined") for watch in self.watches)

    @property
    def ended(self) -> bool:
        """It is convicted, or its kernels end over and over again."""
        return self.convicted or self.reason is not None


class _Experiment:
    def __init__(self, dispatches: Dispatches, seed: int, effort: Effort, kept: Kept, progress: Progress) -> None:
        self._dispatches = dispatches
        self._seed = seed
        self._effort = effort
        self._kept = kept
        self._progress = progress

    async def run(self, suspects: Sequence[Suspect], targets: Sequence[str], model: str) -> dict[str, Any]:
        judge = Judge(self._dispatches.manifest, self._dispatches.source, partial(Device, threads=_THREADS), at_hand)
        async with judge.at_work() as judge_one:
            cheats = [each for suspect in suspects for each in await self._cheat(suspect, judge_one)]
            honest = await self._honest(targets, judge_one)
        missed = [each["name"] for each in cheats if not each["pass"]]
        convicted = [each["target"] for each in honest if not each["pass"]]
        reasons = [f"missed or late: {', '.join(dict.fromkeys(missed))}"] if missed else []
        reasons += [f"honest and convicted: {', '.join(convicted)}"] if convicted else []
        return {
            "model": model,
            "seed": self._seed,
            "pass": not reasons,
            "reason": "; ".join(reasons) or None,
            "cheats": cheats,
            "honest": honest,
        }

    async def _cheat(self, suspect: Suspect, judge_one: JudgeOne) -> list[dict[str, Any]]:
        """One summary for a new peer, one for a peer that was trusted for long."""
        summaries, backend = [], None
        try:
            for standing in get_args(Standing):
                trials = []
                for number in range(self._effort.trials):
                    self._progress(f"{suspect.name}, {standing}", number, self._effort.trials)
                    key = f"cheat {suspect.name} {standing} {number}"
                    if (found := self._kept.get(key)) is None:
                        backend = backend or self._load(suspect.name, suspect.make)
                        trial = await cheat_trial(
                            self._dispatches, backend, judge_one, standing, self._of(key), self._effort.dispatches
                        )
                        found = self._kept.put(key, trial_json(trial))
                    trials.append(found)
                summaries.append(cheat_summary(suspect.name, standing, suspect.every, trials))
        finally:
            if backend is not None:
                backend.close()
        return summaries

    async def _honest(self, targets: Sequence[str], judge_one: JudgeOne) -> list[dict[str, Any]]:
        peers = [_Honest(target, FullAudits(self._of(target).to_bytes(8, "big") * 2)) for target in targets]
        if (together := self._effort.together_minutes) is None:
            for peer in peers:
                await self._watch(peer, judge_one, 60 * self._effort.minutes, self._effort.audits, _BLOCK)
        else:
            await self._take_turns(peers, judge_one, 60 * together)
        return [honest_summary(peer.target, peer.watches, peer.reason) for peer in peers]

    async def _take_turns(self, peers: Sequence[_Honest], judge_one: JudgeOne, seconds: float) -> None:
        """Each at least once; whoever had the least time is next."""
        turn_s = min(_TURN_S, seconds / max(1, len(peers)))
        while left := [peer for peer in peers if not peer.ended]:
            peer = min(left, key=lambda each: each.seconds)
            if peer.watches and sum(each.seconds for each in peers) >= seconds:
                return
            await self._watch(peer, judge_one, peer.seconds + turn_s, None, _BLOCK_OF_TURN)

    async def _watch(self, peer: _Honest, judge_one: JudgeOne, until_s: float, audits: int | None, block: int) -> None:
        """Audit a peer until so many seconds, or audits, are spent on it, or it is convicted."""
        backend = None
        try:
            while not peer.ended and peer.seconds < until_s and (audits is None or peer.audits < audits):
                self._progress(f"{peer.target}, honest", peer.audits, audits or 0)
                key = f"honest {peer.target} {len(peer.watches)}"
                if (found := self._kept.get(key)) is None:
                    backend = backend or self._load_honest(peer)
                    before, started = len(peer.restarts.reasons), time.monotonic()
                    count = block if audits is None else min(block, audits - peer.audits)
                    watch = await watch_honest(self._dispatches, backend, judge_one, peer.tests, self._of(key), count)
                    restarts = len(peer.restarts.reasons) - before
                    found = self._kept.put(key, watch_json(watch, time.monotonic() - started, restarts))
                peer.watches.append(found)
        except KernelFailed as error:  # however often it was started anew: what it answered until then counts
            peer.reason = error.message
        finally:
            if backend is not None:
                backend.close()

    def _load_honest(self, peer: _Honest) -> ExpertBackend:
        target = find_target(peer.target)
        peer.restarts = target.restarts
        return self._load(peer.target, target.make)

    def _load(self, name: str, make: Callable[[], ExpertBackend]) -> ExpertBackend:
        try:
            backend = make()
            self._dispatches.load(backend)
        except SwarmError:
            raise
        except Exception as error:  # whatever a class of somebody's own raises
            raise UsageError(
                f"{name} cannot be made: {type(error).__name__}: {error}",
                hint="It is called with `threads=` and gives an ExpertBackend (docs/development.md).",
            ) from error
        return backend

    def _of(self, key: str) -> int:
        """A seed of its own for each part."""
        return random.Random(f"{self._seed} {key}").getrandbits(63)
