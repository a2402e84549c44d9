"""What a leader and its judge's process say to each other, as frames of backends/variant_frames.py.

    open     the model's manifest, and where its experts lie; answered once the judge is ready
    judge    an answer of a peer; answered by a verdict, or by experts that must be readable first
    go on    they are; answered likewise

Any may be answered by an error instead. Both ends are one program on one machine, so what is said is not doubted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from backends.manifest import Manifest
from backends.variant_frames import Header
from capabilities.row_grades import Graded
from swarmnode.leader.recomputing import Judged, Sample

_Arrays = Mapping[str, NDArray[Any] | None]
_OF_SAMPLE: Final = ("x", "tokens", "experts", "weights", "answer")
_OF_GRADED: Final = tuple(field.name for field in fields(Graded))


def sample_frame(sample: Sample) -> tuple[Header, list[bytes]]:
    """An answer of a peer."""
    arrays, bodies = _packed({name: getattr(sample, name) for name in _OF_SAMPLE})
    flags = {name: getattr(sample, name) for name in ("rounded", "ask_f32", "whole")}
    return {"op": "judge", "peer": sample.peer, "layer": sample.layer.layer, "arrays": arrays, **flags}, bodies


def sample_of(header: Header, body: bytes | bytearray, manifest: Manifest) -> Sample:
    flags = {name: header[name] for name in ("rounded", "ask_f32", "whole")}
    layer = manifest.experts_of(header["layer"])
    return Sample(peer=header["peer"], layer=layer, **_unpacked(header["arrays"], body), **flags)


def judged_frame(judged: Judged) -> tuple[Header, list[bytes]]:
    graded = {name: getattr(judged.graded, name) for name in _OF_GRADED}
    arrays, bodies = _packed({**graded, "experts": judged.experts})
    return {"arrays": arrays, "telling": judged.telling, "times": [judged.cpu_s, judged.kernels_s]}, bodies


def judged_of(header: Header, body: bytes) -> Judged:
    arrays = _unpacked(header["arrays"], body)
    experts = arrays.pop("experts")
    return Judged(Graded(**arrays), experts, header["telling"], *header["times"])


def _packed(arrays: _Arrays) -> tuple[list[list[Any]], list[bytes]]:
    """Name, type and shape of each, and their bytes. None has no type."""
    described: list[list[Any]] = []
    bodies = []
    for name, array in arrays.items():
        described.append([name, "", []] if array is None else [name, array.dtype.str, list(array.shape)])
        if array is not None:
            bodies.append(array.tobytes())
    return described, bodies


def _unpacked(described: list[list[Any]], body: bytes | bytearray) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    at = 0
    for name, kind, shape in described:
        array = np.frombuffer(body, kind, math.prod(shape), at).reshape(shape) if kind else None
        at += 0 if array is None else array.nbytes
        arrays[name] = array
    return arrays
