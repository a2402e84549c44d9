"""What a leader and its judge's process say to each other, as frames of backends/variant_frames.py.

    open     the model's manifest, and where its experts lie; answered once the judge is ready
    judge    an answer of a peer; answered by a verdict, or by experts that must be readable first
    go on    they are; answered likewise

Any may be answered by an error instead. Both ends are one program on one machine, so what is said is not doubted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backends.manifest import Manifest
from backends.variant_frames import Header
from capabilities.row_grades import Graded
from swarmnode.leader.recomputing import Judged, Sample

_OF_SAMPLE = ("x", "tokens", "experts", "weights", "answer")


def sample_frame(sample: Sample) -> tuple[Header, list[bytes]]:
    """An answer of a peer."""
    arrays = [(name, getattr(sample, name)) for name in _OF_SAMPLE]
    header = {
        "op": "judge",
        "peer": sample.peer,
        "layer": sample.layer.layer,
        "shapes": {name: list(array.shape) for name, array in arrays if array is not None},
        "rounded": sample.rounded,
        "ask_f32": sample.ask_f32,
        "whole": sample.whole,
    }
    return header, [np.ascontiguousarray(array).data.cast("B").tobytes() for _, array in arrays if array is not None]


def sample_of(header: Header, body: bytes | bytearray, manifest: Manifest) -> Sample:
    arrays: dict[str, Any] = {"weights": None}
    at = 0
    for name, shape in header["shapes"].items():
        count = int(np.prod(shape))
        kind = np.int32 if name in ("tokens", "experts") else np.float32
        arrays[name] = np.frombuffer(body, kind, count, at).reshape(shape)
        at += arrays[name].nbytes
    flags = {name: header[name] for name in ("rounded", "ask_f32", "whole")}
    return Sample(peer=header["peer"], layer=manifest.experts_of(header["layer"]), **arrays, **flags)


def judged_frame(judged: Judged) -> tuple[Header, list[bytes]]:
    graded = judged.graded
    arrays = (graded.grade, graded.distance, graded.ratio, judged.experts)
    header = {"rows": len(judged.experts), "telling": judged.telling, "cpu_s": judged.cpu_s}
    return header, [np.ascontiguousarray(array).tobytes() for array in arrays]


def judged_of(header: Header, body: bytes) -> Judged:
    rows = header["rows"]
    ends = np.cumsum([0, rows, 8 * rows, 8 * rows])
    kinds = (np.int8, np.float64, np.float64, np.int32)
    parts = [np.frombuffer(body, kind, rows, int(at)) for kind, at in zip(kinds, ends, strict=True)]
    grade, distance, ratio, experts = parts
    return Judged(Graded(grade, distance, ratio), experts, header["telling"], header["cpu_s"])
