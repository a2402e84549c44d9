"""What an audit measured, as the sequential tests count it, as a verdict carries it, and as it was kept of each peer.

An audit's worst row stands for it. Of each peer the newest pieces are kept, for the verdict that they may end in.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import replace
from typing import Final

from backends.gguf_types import GGML_TYPES
from capabilities.agreement import SAME_WORST_LIMIT
from capabilities.errors import SwarmError
from capabilities.row_grades import HALVES_TIMES, NEAR, Grade
from capabilities.verdict import Evidence, EvidenceKind
from scheduler.audit_tests import Found
from swarmnode.leader.recomputing import Judged, Sample

_EVIDENCE_KEPT: Final = 8  # of each peer: the newest
_PEERS_KEPT: Final = 256  # as many as there may be members


class AnotherFunction(SwarmError):
    """A worker computes something else than the model, as the leader's own recomputation showed again and again."""

    type = "another_function"
    default_hint = (
        "Compare its version, its model and its hardware with the others'. It gets no work until the swarm's owner"
        " releases it: `swarmctl peer release PEER`."
    )


class OutOfTolerance(SwarmError):
    """A worker computes the model, and its rows are not precise enough for output ranks."""

    type = "out_of_tolerance"
    default_hint = (
        "It holds layers before the output ranks, and is fit again once its rows are. `swarmctl status` shows what was"
        " measured of its backend."
    )


class KeptEvidence:
    """By peer, as long as it is wanted."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, list[Evidence]] = OrderedDict()

    def of(self, peer: str) -> list[Evidence]:
        """The newest last."""
        return self._of.get(peer, [])

    def add(self, peer: str, evidence: Evidence) -> Evidence:
        """As it is kept."""
        kept = self._of.setdefault(peer, [])
        self._of.move_to_end(peer)
        kept.append(evidence := evidence.bounded())
        del kept[:-_EVIDENCE_KEPT]
        while len(self._of) > _PEERS_KEPT:
            self._of.popitem(last=False)
        return evidence

    def amend(self, peer: str, evidence: Evidence, more: str) -> None:
        """Something else is known about a piece, if it is still there: the newest of those that are alike."""
        kept = self.of(peer)
        at = next((at for at in reversed(range(len(kept))) if kept[at] == evidence), None)
        if at is not None:
            kept[at] = replace(evidence, text=f"{evidence.text}; {more}").bounded()

    def forget(self, peer: str) -> None:
        self._of.pop(peer, None)


def found_of(sample: Sample, judged: Judged) -> Found:
    """What the sequential tests count of an audit."""
    graded = judged.graded
    return Found(
        rows=len(graded.grade),
        identical=graded.count(Grade.SAME) == len(graded.grade),
        wrong=graded.count(Grade.WRONG),
        coarse=graded.count(Grade.COARSE),
        odd=int(graded.odd.sum()),
        ask_f32=sample.ask_f32,
        telling=judged.telling,
        took_s=judged.cpu_s,
        kernels_s=judged.kernels_s,
    )


def evidence_of_audit(kind: EvidenceKind, sample: Sample, judged: Judged) -> Evidence:
    """What an audit measured; the worst row stands for it."""
    distance, ratio = judged.graded.distance, judged.graded.ratio
    worst = int(distance.argmax())
    grade = Grade(int(judged.graded.grade.max()))
    limit = NEAR
    if grade == Grade.WRONG:
        limit = HALVES_TIMES * distance[worst] / ratio[worst] if ratio[worst] > 0 else SAME_WORST_LIMIT
    layer, expert = sample.layer.layer, int(judged.experts[worst])
    says = {Grade.WRONG: "another function", Grade.COARSE: "out of tolerance"}
    how = says.get(grade, "other bits, within tolerance")
    if odd := int(judged.graded.odd.sum()):
        how += f" (of {len(distance)} rows {odd} off as no rounding is)"
    return Evidence(
        kind=kind,
        text=f"layer {layer}, expert {expert}: {how}, {distance[worst]:.2g} off the leader's own rows",
        layer=layer,
        expert=expert,
        weight_type=",".join(sorted({GGML_TYPES[tensor.type].name for tensor in sample.layer.tensors})),
        median_relative_l2=float(sorted(distance)[len(distance) // 2]),
        extreme_relative_l2=float(distance[worst]),
        limit=float(limit),
        count=int((judged.graded.grade >= Grade.COARSE).sum()),
        at_s=int(time.time()),
    )


def why_convicted(found: Found) -> str:
    """What to add to the evidence of the audit that convicted."""
    if found.wrong:
        return "convicted, as audit after audit had wrong rows"
    return "convicted, as audit after audit had rows further off than half-precision sums are, or by length alone"


def evidence_of_error(kind: EvidenceKind, error: SwarmError) -> Evidence:
    """What the probe, or crafted rows, found."""
    details = error.details
    experts = details.get("experts") or [-1]
    return Evidence(
        kind=kind, text=error.message, layer=details.get("layer", -1), expert=experts[0], at_s=int(time.time())
    )
