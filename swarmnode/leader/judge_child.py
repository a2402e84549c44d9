"""The process that recomputes answers for a leader: a frame in, a frame out, until the other end closes.

    python -m swarmnode.leader.judge_child      standard input is the socket (judge_frames.py)

Nothing that awaits is imported here: it must start at once, and be small.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from backends.device import Device
from backends.expert_source import MappedExperts
from backends.ggml import be_silent
from backends.gguf_file import GGUFFile
from backends.manifest import ExpertSource, Manifest
from backends.variant_frames import Frames, Header
from capabilities.errors import Internal, SwarmError
from swarmnode.leader.judge_frames import judged_frame, sample_of
from swarmnode.leader.recomputing import Judged, Recomputing, Steps, advance
from swarmnode.shards.files import ShardFiles

_NICE: Final = 10  # a tenth of a token's share where both want a processor


class _Service:
    """One model. asks: experts are not here before they are asked for."""

    def __init__(self, manifest: Manifest, lies_at: Path) -> None:
        self._manifest = manifest
        self._asks = lies_at.is_dir()
        source: ExpertSource
        source = ShardFiles(lies_at, manifest) if self._asks else MappedExperts(GGUFFile.open(lies_at), manifest)
        self._recomputing = Recomputing(manifest, source, partial(Device, threads=1))
        self._steps: Steps | None = None
        self._until_s = time.process_time()  # what came before is counted: of each answer all that it took

    def answer(self, header: Header, body: bytearray) -> tuple[Header, list[bytes]]:
        if header["op"] == "judge":
            self._steps = self._recomputing.steps(sample_of(header, body, self._manifest))
        assert self._steps is not None
        while not isinstance(found := advance(self._steps), Judged):
            if self._asks:
                return {"needs": found}, []
        now_s = time.process_time()
        took_s, self._until_s = now_s - self._until_s, now_s
        return judged_frame(replace(found, cpu_s=took_s))


def main() -> int:
    be_silent()
    frames = Frames(socket.socket(fileno=os.dup(0)))
    with contextlib.suppress(EOFError, OSError):
        header, body = frames.receive()
        try:
            service = _Service(Manifest.from_bytes(bytes(body)), Path(header["lies_at"]))
        except SwarmError as error:
            frames.send({"error": error.to_json()})
            return 1
        with contextlib.suppress(OSError, AttributeError):  # where there are no priorities
            os.nice(_NICE)  # not before: a third of a second of imports would take half a minute on a busy machine
        frames.send({})
        while True:
            header, body = frames.receive()
            try:
                reply, bodies = service.answer(header, body)
            except SwarmError as error:
                reply, bodies = {"error": error.to_json()}, []
            except MemoryError:
                reply, bodies = {"error": Internal("out of memory").to_json()}, []
            frames.send(reply, *bodies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
