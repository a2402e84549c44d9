"""The process that runs one kernel library for another process: a frame in, a frame out, until the other end closes.

    python -m backends.variant_child FILE THREADS       standard input is the socket (variant_frames.py)

FILE is a backend library of ggml; the ggml that was built with it lies beside it. Empty: the installed ggml. The child
knows the experts of any number of backends, by numbers that the other side chooses. While a layer is loaded it asks for
one slice at a time, so that no layer is ever in memory twice. What a kernel prints goes to standard error, with all
that anybody prints.

Nothing here imports more than NumPy and msgpack: it also runs on an emulated processor, where every import is slow.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from backends.device import Device
from backends.experts import F32, GgmlExperts
from backends.ggml import choose_kernels, library
from backends.manifest import ExpertTensor, LayerExperts
from backends.program import ExpertProgram
from backends.row_operators import GgmlRows
from backends.variant_frames import Frames, Header
from capabilities.errors import Internal, SwarmError

PROTOCOL = 1


def describe_layer(layer: LayerExperts) -> dict[str, Any]:
    """A layer as a header carries it. Hashes stay behind: who sends it has checked them."""
    numbers = {key: getattr(layer, key) for key in ("layer", "n_expert", "n_used", "n_in", "n_out", "program")}
    return numbers | {"tensors": [[t.name, t.type, list(t.shape), t.nbytes] for t in layer.tensors]}


def described_layer(value: Mapping[str, Any]) -> LayerExperts:
    tensors = tuple(ExpertTensor(name, kind, tuple(shape), nbytes) for name, kind, shape, nbytes in value["tensors"])
    return LayerExperts(**{**value, "tensors": tensors, "hashes": ()})


class _Service:
    def __init__(self, frames: Frames, device: Device) -> None:
        self._frames, self._device = frames, device
        self._rows = GgmlRows(device)
        self._backends: dict[int, GgmlExperts] = {}

    def serve(self) -> None:
        """Until the other side is gone (EOFError)."""
        while True:
            header, body = self._frames.receive()
            if header["op"] in ("unload", "close"):  # nobody waits for these
                self._forget(header)
                continue
            try:
                out = self._answer(header, body)
                self._frames.send({}, out.tobytes())
            except SwarmError as error:
                self._frames.send({"error": error.to_json()})
            except MemoryError:
                self._frames.send({"error": Internal("out of memory").to_json()})

    def _answer(self, header: Header, body: bytearray) -> F32:
        match header["op"]:
            case "load":
                self._load(header)
                return np.empty(0, np.float32)
            case "compute":
                return self._compute(header, body)
            case "softmax" | "rms_norm" as op:
                x = np.frombuffer(body, np.float32).reshape(header["shape"])
                return np.ascontiguousarray(getattr(self._rows, op)(x))
            case other:
                raise Internal(f"there is no operation {other!r}")

    def _load(self, header: Header) -> None:
        layer = described_layer(header["layer"])
        backend = self._backends.setdefault(header["backend"], GgmlExperts(self._device))
        program = ExpertProgram.from_bytes(header["program"])
        backend.load_layer(layer, program, header["experts"], self._slice)

    def _slice(self, expert: int, index: int) -> memoryview:
        self._frames.send({"slice": [int(expert), int(index)]})
        header, body = self._frames.receive()
        if "failed" in header:
            raise Internal("the other side has no such slice")
        return memoryview(body)

    def _compute(self, header: Header, body: bytearray) -> F32:
        n_tokens, n_in, n_rows = header["shape"]
        x, ids = (
            np.frombuffer(body, np.float32, n_tokens * n_in),
            np.frombuffer(body, np.int32, offset=4 * n_tokens * n_in),
        )
        tokens, experts = (np.array(part, np.int32) for part in ids.reshape(2, n_rows))
        backend = self._backends[header["backend"]]
        return backend.compute(header["layer"], x.reshape(n_tokens, n_in), tokens, experts, ask_f32=header["ask_f32"])

    def _forget(self, header: Header) -> None:
        backend = self._backends.get(header["backend"])
        if backend is not None and header["op"] == "unload":
            backend.unload_layer(header["layer"])
        elif backend is not None:
            backend.close()
            del self._backends[header["backend"]]


def main() -> int:
    frames = Frames(socket.socket(fileno=os.dup(0)))
    os.dup2(2, 1)
    file, threads = sys.argv[1], int(sys.argv[2])
    try:
        if file:
            choose_kernels(Path(file))
        device = Device(threads=threads)
        version = library().ggml_version().decode()
    except SwarmError as error:
        frames.send({"error": error.to_json()})
        return 1
    info = device.info
    frames.send({"protocol": PROTOCOL, "ggml": version, "device": info.description, "backend": info.backend})
    try:
        _Service(frames, device).serve()
    except (EOFError, OSError):
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
