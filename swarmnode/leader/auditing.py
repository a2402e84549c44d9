"""What the leader makes of audits: it has answers judged one by one, and acts on what the sequential tests say.

A worker that computes another function is quarantined: it gets no work, its experts go to others, and whoever's request
it had a part in since its last good audit begins anew or ends as tainted. One that computes the model, and not
precisely enough, is unfit for output ranks until its rows are right again. Of one that does not repeat itself, that is
counted. Every such change is a verdict on the board
(capabilities/verdict.py), where a successor finds it; a release by the owner makes a peer as new.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Any, Final, Protocol

import structlog
import trio

from capabilities.agreement import Agreement
from capabilities.errors import SwarmError
from capabilities.verdict import EvidenceKind, VerdictBoard
from scheduler.audit_choice import AGREED_FIRST, Chosen
from scheduler.audit_tests import Change, PeerAudits
from scheduler.audits import Audits
from scheduler.rates import TokenBucket
from swarmnode.leader.audit_evidence import (
    AnotherFunction,
    KeptEvidence,
    OutOfTolerance,
    evidence_of_audit,
    evidence_of_error,
    found_of,
    why_convicted,
)
from swarmnode.leader.audit_tap import REQUESTS_REMEMBERED_MAX, AuditTap
from swarmnode.leader.members import Member, Members
from swarmnode.leader.recomputing import Judged, Sample
from swarmnode.leader.repeating import Repeat, Repeating, rows_again
from swarmnode.leader.settling import Settling
from swarmnode.net.interface import PeerId

_log = structlog.get_logger(__name__)


_SHARE_OF_TIME: Final = 0.25  # of one core while answers are under way: thirty answers a second of a large model
_BURST_S: Final = 1.0  # so that newcomers are judged at once: some hundreds of answers
_SILENT_S: Final = 10.0  # between complaints: while nothing can be judged, every answer is a reason to
_IDLE_S: Final = 60.0  # without an answer to judge, until what judging takes is freed
_GATHER_S: Final = 0.05  # until what waits is looked at again: each look interrupts the decode thread
_MADE_ANEW_MAX: Final = 2  # times that a request is made anew for rows of a peer that is not convicted yet
_LOOK_S: Final = 0.25  # how soon the end of the last request is noticed; each look interrupts the decode thread


class Owner(Protocol):
    """Whom audits tell: the placer."""

    @property
    def idle(self) -> bool:
        """No request is running."""

    def convicted(self, member: Member, trusted: int) -> None:
        """A worker is quarantined; its answers up to that number are believed."""

    def doubted(self, requests: Sequence[str]) -> None:
        """Something that went into these requests is wrong."""

    def fitness_changed(self, member: Member) -> None:
        """A worker was found unfit, or fit again."""

    def usable_changed(self) -> None:
        """Somebody can be used, or cannot any more, or is of another numeric class."""

    def reconsider(self, member: Member) -> None:
        """A worker that was quarantined is not any more."""


class Judging(Protocol):
    """Who recomputes answers: judge_process.JudgeProcess, or judge.Judge."""

    def at_work(self) -> AbstractAsyncContextManager[Callable[[Sample], Awaitable[Judged]]]:
        """Within the context: what judges an answer. That raises SwarmError if it cannot."""

    async def prepare(self) -> None:
        """Somebody new will answer soon, and what starts only then would let a hundred answers pass. Cannot fail."""

    async def rest(self) -> None:
        """Nothing is to be judged for a while."""


class Auditing:
    """`run` never ends. `tap` is for the decode thread."""

    def __init__(
        self, owner: Owner, members: Members, judge: Judging, repeating: Repeating, board: VerdictBoard, secret: bytes
    ) -> None:
        """secret: drawn by this leader for itself."""
        self.tap = AuditTap(Audits(secret), self._waits)
        self._owner = owner
        self._members = members
        self._judge = judge
        self._repeating = repeating
        self._board = board
        self._token = trio.lowlevel.current_trio_token()
        self._something = trio.Event()
        self._evidence = KeptEvidence()
        self._new = False  # somebody will serve soon whose first answers are all audited
        self._silent_until_s = 0.0
        self.settling = Settling(self.tap, self._hurry_up)
        self._hurry = trio.Event()
        self._wrong: OrderedDict[str, int] = OrderedDict()  # by request: how often something in it was found wrong
        self._time = TokenBucket(_BURST_S, _SHARE_OF_TIME, trio.current_time())  # seconds of the judge's

    async def run(self, audits: bool) -> None:
        """audits: whether to have live work recomputed. What others find is heard of in any case."""
        with self._board.on_change(self._board_changed):
            if audits:
                await self._audit()
            await trio.sleep_forever()

    async def _audit(self) -> None:
        async with self._judge.at_work() as judge_one, trio.open_nursery() as nursery:
            nursery.start_soon(self._repeating.run, self._repeated)
            self.tap.open = True
            try:
                while True:
                    if self._new:
                        self._new = False
                        await self._judge.prepare()
                    while (waiting := self.tap.take()) is not None:
                        await self._rest(await self._have_judged(judge_one, *waiting))
                    while (refused := self.tap.convicted()) is not None:
                        peer, changes, error = refused
                        self._evidence.add(peer, evidence_of_error("audit", error))
                        self._act(peer, changes)
                    await self._pause(_GATHER_S)
                    self._something = trio.Event()
                    if not self._new and self.tap.sleep():
                        await self._wait()
            finally:
                self.tap.open = False

    async def _wait(self) -> None:
        """Until something waits to be judged."""
        with trio.move_on_after(_IDLE_S) as idle:
            await self._something.wait()
        if idle.cancelled_caught:
            await self._judge.rest()
            await self._something.wait()

    async def _rest(self, worked_s: float) -> None:
        """The judge reads experts anew, which costs more than their rows: while somebody waits for tokens it keeps to
        its share of time. What waits meanwhile is judged when nobody does, as far as there is room to wait."""
        if self._owner.idle:
            return
        rested_at = trio.current_time() + self._time.owe(trio.current_time(), worked_s)
        while trio.current_time() < rested_at and not self._owner.idle:
            await self._pause(_LOOK_S)

    def _hurry_up(self) -> None:
        self._hurry.set()

    async def _pause(self, seconds: float) -> None:
        """So long, or until an answer waits for its end."""
        self._hurry = trio.Event()
        with trio.move_on_after(seconds):
            await self._hurry.wait()

    async def _have_judged(
        self, judge_one: Callable[[Sample], Awaitable[Judged]], chosen: Chosen, sample: Sample
    ) -> float:
        """Seconds of a processor that it took."""
        try:
            judged = await judge_one(sample)
        except SwarmError as error:  # the expert cannot be had, or there is no memory
            if trio.current_time() >= self._silent_until_s:
                self._silent_until_s = trio.current_time() + _SILENT_S
                _log.warning("audit.not_made", peer=chosen.peer, layer=sample.layer.layer, reason=error.message)
            self.tap.dropped(chosen)
            self.settling.judged()
            return 0.0
        self._judged(chosen, sample, judged)
        self.settling.judged()
        return judged.cpu_s

    def _waits(self) -> None:
        """On the decode thread: something was shown."""
        self._token.run_sync_soon(self._something.set)

    # -- events -------------------------------------------------------------------------------------------------

    def joined(self, member: Member) -> None:
        """A worker said hello: what is held of it, here or on the board, counts from the beginning."""
        self._look_at_board(str(member.peer))
        with self.tap.lock:
            held = self.tap.audits.held(str(member.peer))
        self._apply(member, held)

    def expect(self, member: Member) -> None:
        """A worker is to prove what it holds, and will answer then."""
        with self.tap.lock:
            held = self.tap.audits.held(str(member.peer))
        if held.in_a_row < AGREED_FIRST:
            self._new = True
            self._something.set()

    def found_unfit(self, member: Member, kind: EvidenceKind) -> None:
        """The probe, or crafted rows, found it unfit (`member.unfit` says why)."""
        peer = str(member.peer)
        with self.tap.lock:
            known = self.tap.audits.held(peer).unfit
            self.tap.audits.mark_unfit(peer)
        if not known and member.unfit is not None:
            self._evidence.add(peer, evidence_of_error(kind, member.unfit))
            self._publish(peer)

    def found_precise(self, member: Member, precise: bool) -> None:
        """Crafted rows showed how a worker adds that is unfit."""
        with self.tap.lock:
            changes = self.tap.audits.found_precise(str(member.peer), precise)
        self._act(str(member.peer), changes)

    def found_wrong(self, member: Member, error: SwarmError) -> None:
        """The probe found rows of another function: as a wrong audit."""
        peer = str(member.peer)
        self._evidence.add(peer, evidence_of_error("probe", error))
        with self.tap.lock:
            changes = self.tap.audits.found_wrong(peer)
        self._act(peer, changes)

    def adopt(self, records: Mapping[str, PeerAudits]) -> None:
        """What a predecessor left."""
        with self.tap.lock:
            self.tap.audits.adopt(records)

    # -- what is known ------------------------------------------------------------------------------------------

    def records(self) -> dict[str, PeerAudits]:
        """What to leave to a successor."""
        with self.tap.lock:
            return dict(self.tap.audits.records())

    def statistics(self, peer: str) -> dict[str, Any]:
        """Counters of a peer, for `status`."""
        self.tap.look()
        with self.tap.lock:
            audits = self.tap.audits
            held, counts, share = audits.held(peer), audits.counts(peer), audits.standing(peer).share
        return {
            "agreed": held.agreed,
            "differed": held.differed,
            "self_differed": held.self_differed,
            "answers": counts.answered,
            "audited": counts.audited,
            "dropped": counts.dropped,
            "repeated": counts.repeated,
            "share": share,
        }

    def totals(self) -> dict[str, Any]:
        """Of all peers together, since this leader began."""
        self.tap.look()
        with self.tap.lock:
            counts, overhead = self.tap.audits.totals(), self.tap.audits.overhead
        return {**asdict(counts), "overhead": overhead}

    # -- inside -------------------------------------------------------------------------------------------------

    def _judged(self, chosen: Chosen, sample: Sample, judged: Judged) -> None:
        found, evidence = found_of(sample, judged), None
        if found.off:
            evidence = self._evidence.add(chosen.peer, evidence_of_audit("audit", sample, judged))
        with self.tap.lock:
            audits = self.tap.audits
            changes = audits.found(chosen, found)
            if evidence is not None and Change.QUARANTINED in changes:
                self._evidence.amend(chosen.peer, evidence, why_convicted(found))
            if audits.asks_again(chosen, found, rows_again(sample)):
                repeat = Repeat(chosen, sample, judged, found, evidence)
                if not self._repeating.offer(repeat):
                    audits.not_repeated(repeat.rows)
        requests = self.tap.judged(chosen)
        if found.wrong and Change.QUARANTINED not in changes:
            self._doubt(requests)
        self._act(chosen.peer, changes)

    def _doubt(self, requests: Sequence[str]) -> None:
        """A row that went into these was wrong, whoever is convicted of it or nobody."""
        for request in requests:
            self._wrong[request] = self._wrong.get(request, 0) + 1
            self._wrong.move_to_end(request)
        while len(self._wrong) > REQUESTS_REMEMBERED_MAX:
            self._wrong.popitem(last=False)
        if again := [request for request in requests if self._wrong[request] <= _MADE_ANEW_MAX]:
            self._owner.doubted(again)

    def _repeated(self, repeat: Repeat, same: bool | None) -> None:
        """An answer was asked for again. same: whether the same bits came; None: none did."""
        peer = repeat.chosen.peer
        with self.tap.lock:
            audits = self.tap.audits
            if same is None:
                audits.not_repeated(repeat.rows)
                return
            changes = audits.repeated(repeat.chosen, repeat.found, same)
            times = audits.held(peer).self_differed
        if not same:
            _log.info("audit.differs_from_itself", peer=peer, layer=repeat.sample.layer.layer, times=times)
        if repeat.evidence is not None:
            how = "the same bits" if same else f"other bits ({times} of its answers so far did)"
            self._evidence.amend(peer, repeat.evidence, f"asked again, it answered {how}")
        if Change.SPLIT in changes:
            self._evidence.add(peer, evidence_of_audit("class", repeat.sample, repeat.judged))
        self._act(peer, changes)

    def _act(self, peer: str, changes: tuple[Change, ...]) -> None:
        if not changes:
            return
        member = self._members.by_peer.get(PeerId(peer))
        with self.tap.lock:
            held, trusted = self.tap.audits.held(peer), self.tap.audits.trusted(peer)
        _log.warning("audit.found", peer=peer, changes=[*changes], agreed=held.agreed, differed=held.differed)
        if held.quarantined:
            self.tap.forget(peer)
        if member is not None:
            self._apply(member, held)
        if changes != (Change.SUSPECTED,):
            self._publish(peer)
        if member is None:
            return
        if Change.QUARANTINED in changes:
            self._owner.convicted(member, trusted)
        if Change.UNFIT in changes or Change.FIT in changes:
            self._owner.fitness_changed(member)
        if Change.SPLIT in changes and member.agreement is not None and member.agreement.bit_identical:
            worst = self._evidence.of(peer)[-1]
            member.agreement = Agreement(False, 0.0, worst.median_relative_l2, worst.extreme_relative_l2, 1.0)
            self._owner.usable_changed()

    def _apply(self, member: Member, held: PeerAudits) -> None:
        """Bring a member's verdict up to what is held of its peer."""
        peer = str(member.peer)
        if not held.quarantined:
            member.quarantined = None
        elif member.quarantined is None:
            member.quarantined = AnotherFunction(
                f"peer {member.name} computes something else than the model: {self._why(peer)}", peer=peer
            )
        if not held.unfit:
            member.unfit = None
        elif member.unfit is None:
            member.unfit = OutOfTolerance(
                f"peer {member.name} is out of tolerance in service: {self._why(peer)}", peer=peer
            )

    def _why(self, peer: str) -> str:
        kept = self._evidence.of(peer)
        verdict = self._board.verdict_of(peer)
        texts = [each.text for each in (*(verdict.evidence if verdict is not None else ()), *kept)]
        return texts[-1] if texts else "as an earlier leader found"

    def _publish(self, peer: str) -> None:
        with self.tap.lock:
            held = self.tap.audits.held(peer)
        self._board.publish(peer, held.fitness, self._evidence.of(peer), held.agreed, held.differed)

    # -- the board ----------------------------------------------------------------------------------------------

    def _board_changed(self, peer: str) -> None:
        """A verdict came from elsewhere, or the owner released a peer; our own come here too, and change nothing."""
        self._look_at_board(peer)
        member = self._members.by_peer.get(PeerId(peer))
        if member is None:
            return
        before = member.quarantined, member.unfit
        with self.tap.lock:
            held, trusted = self.tap.audits.held(peer), self.tap.audits.trusted(peer)
        self._apply(member, held)
        if before[0] is None and member.quarantined is not None:
            self._owner.convicted(member, trusted)
        elif before[0] is not None and member.quarantined is None:
            self._owner.reconsider(member)
        elif (before[1] is None) != (member.unfit is None):
            self._owner.fitness_changed(member)

    def _look_at_board(self, peer: str) -> None:
        verdict = self._board.verdict_of(peer)
        with self.tap.lock:
            audits = self.tap.audits
            if audits.release(peer, self._board.released(peer)):
                self._evidence.forget(peer)
            if verdict is not None and verdict.fitness == "quarantined" and not audits.held(peer).quarantined:
                audits.mark_quarantined(peer)
            elif verdict is not None and verdict.fitness == "unfit" and not audits.held(peer).unfit:
                audits.mark_unfit(peer)
