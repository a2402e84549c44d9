"""Experts whose kernels run in a process of their own: the same interface, over a socket pair.

ggml's libraries of one name cannot live twice in a process, kernels of another processor cannot live in it at all, and
a driver that crashes should take nobody along. `KernelProcess` is that process (variant_child.py). It starts at the
first use, serves any number of `KernelExperts`, one call at a time, and ends with its owner. Every wait has a deadline.
A process that dies, hangs or speaks nonsense is ended, and whatever it held is lost: who used it gets `KernelFailed`
from then on, and new experts start a new process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from backends.experts import F32, I32, ReadSlice, check_rows, not_held, places_of
from backends.ggml import GGML_VERSIONS
from backends.manifest import LayerExperts
from backends.program import ExpertProgram
from backends.variant_child import PROTOCOL, describe_layer
from backends.variant_frames import Frames, Header
from capabilities.errors import KernelFailed, LibraryMismatch, SwarmError

LINES_KEPT: Final = 5  # of what the process printed last, for the error when it dies
LINE_CHARS_MAX: Final = 300
SLICES_ASKED_MAX: Final = 1 << 17  # 4096 experts of 16 tensors, each twice
NOTICE_S: Final = 2.0  # for a frame that nobody answers: it fits the socket's buffer unless the process hangs
END_S: Final = 1.0  # from closing the socket until the process is killed


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel process is started.

    name: of the backend. meaning: of its kernels, for people. command: all but the arguments that variant_child takes
    last, its file and threads. file: the library, or None for the installed ggml.
    start_s, call_s: deadlines of starting and of one call; an emulated processor needs more.
    """

    name: str
    meaning: str
    command: tuple[str, ...]
    file: Path | None
    is_cpu: bool
    environ: Mapping[str, str] = field(default_factory=dict)
    start_s: float = 60.0
    call_s: float = 60.0


class _Running:
    """One process from its start to its end."""

    def __init__(self, launch: Launch, threads: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            self.process = subprocess.Popen(
                [*launch.command, str(launch.file or ""), str(threads)], stdin=theirs.fileno(), stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, env={**os.environ, **launch.environ},
            )  # fmt: skip
            on_failure.pop_all()
        self.frames = Frames(ours)
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=_keep_lines, args=(self.process.stdout, self.lines), daemon=True)
        self._reader.start()
        self.end = weakref.finalize(self, _end, self.process, self.frames)

    def last_words(self) -> str:
        self._reader.join(0.2)
        return " | ".join(self.lines)


def _keep_lines(pipe: IO[bytes], lines: deque[str]) -> None:
    with pipe:
        while line := pipe.readline(LINE_CHARS_MAX):
            if text := line.decode(errors="replace").strip():
                lines.append(text)


def _end(process: subprocess.Popen[bytes], frames: Frames) -> None:
    frames.close()  # which tells it to end
    try:
        process.wait(END_S if process.poll() is None else 0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class KernelProcess:
    """Calls are taken from any thread, one at a time."""

    def __init__(self, launch: Launch, *, threads: int = 1) -> None:
        self.launch = launch
        self._threads = threads
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._numbers = itertools.count()

    def experts(self, *, ask_f32: bool = False) -> KernelExperts:
        """A fresh ExpertBackend. `ask_f32`: its products always ask to be added in F32."""
        return KernelExperts(self, next(self._numbers), ask_f32)

    def softmax(self, x: F32) -> F32:
        return self._of_rows("softmax", x)

    def rms_norm(self, x: F32) -> F32:
        return self._of_rows("rms_norm", x)

    def _of_rows(self, op: str, x: F32) -> F32:
        x = np.ascontiguousarray(x, np.float32)
        with self._turn():
            out = self._call(self._start(), {"op": op, "shape": list(x.shape)}, [x], x.nbytes)
        return np.frombuffer(out, np.float32).reshape(x.shape)

    def close(self) -> None:
        """End the process. Experts that it held fail from now on."""
        with self._turn():
            self._stop()

    @property
    def pid(self) -> int | None:
        running = self._running
        return None if running is None else running.process.pid

    def start(self) -> None:
        """Start the process now, if it does not run."""
        with self._turn():
            self._start()

    # -- for KernelExperts --------------------------------------------------------------------------------------------

    def load(self, header: Header, read: ReadSlice) -> object:
        """Load a layer; what is returned stands for the process that holds it."""
        with self._turn():
            running = self._start()
            self._call(running, header, [], 0, read)
            return running

    def compute(self, held_by: object, header: Header, bodies: Sequence[F32 | I32], out_bytes: int) -> bytearray:
        with self._turn():
            running = self._running
            if running is None or running is not held_by:
                raise KernelFailed(f"the process of {self.launch.name} that held these experts is gone")
            return self._call(running, header, bodies, out_bytes)

    def notify(self, held_by: object, header: Header) -> None:
        """Tell the process that something is not needed any more, if it still runs."""
        with self._turn():
            running = self._running
            if running is not None and running is held_by:
                try:
                    running.frames.send(header, seconds=NOTICE_S)
                except OSError:
                    self._stop()

    # -- the process --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self.launch.start_s + self.launch.call_s):
            raise KernelFailed(f"{self.launch.name} is busy with other calls")
        try:
            yield
        finally:
            self._lock.release()

    def _start(self) -> _Running:
        if self._running is not None:
            return self._running
        try:
            running = self._running = _Running(self.launch, self._threads)
        except OSError as error:
            raise KernelFailed(f"the process of {self.launch.name} cannot be started: {error}") from error
        with self._ending_what_fails(running, "start", self.launch.start_s):
            header, _ = running.frames.receive(seconds=self.launch.start_s, body_bytes_max=0)
            if "error" in header:
                raise _typed(header)
            if (header.get("protocol"), header.get("ggml")) != (PROTOCOL, GGML_VERSIONS[0]):
                raise LibraryMismatch(f"{self.launch.name} was built from another version: {str(header)[:200]}")
        return running

    def _call(
        self,
        running: _Running,
        header: Header,
        bodies: Sequence[F32 | I32],
        out_bytes: int,
        read: ReadSlice | None = None,
    ) -> bytearray:
        """One question and its answer of exactly `out_bytes`; slices that are asked for meanwhile come from `read`."""
        parts = [body.tobytes() for body in bodies]
        error: Exception | None = None
        asked = 0
        with self._ending_what_fails(running, "answer", self.launch.call_s):
            running.frames.send(header, *parts, seconds=self.launch.call_s)
            while True:
                answer, body = running.frames.receive(seconds=self.launch.call_s, body_bytes_max=out_bytes)
                if "error" in answer:
                    error = error or _typed(answer)
                    break
                if "slice" not in answer:
                    if len(body) != out_bytes:
                        raise ValueError(f"{len(body)} bytes instead of {out_bytes}")
                    return body
                asked += 1
                if read is None or asked > SLICES_ASKED_MAX:
                    raise ValueError("it asks for weights in the middle of a computation, or without an end")
                error = self._send_slice(running, header, answer["slice"], read)
        raise error

    def _send_slice(self, running: _Running, load: Header, wanted: Any, read: ReadSlice) -> Exception | None:
        """Answer a question for weights. What goes wrong while they are read is the caller's fault, not the child's."""
        match wanted:
            case [int(expert), int(index)] if expert in load["experts"] and 0 <= index < len(load["layer"]["tensors"]):
                try:
                    piece = memoryview(read(expert, index))
                except Exception as error:
                    running.frames.send({"failed": True}, seconds=self.launch.call_s)
                    return error
                running.frames.send({}, piece, seconds=self.launch.call_s)
                return None
            case _:
                raise ValueError(f"it asks for a slice {str(wanted)[:40]}")

    @contextlib.contextmanager
    def _ending_what_fails(self, running: _Running, what: str, seconds: float) -> Iterator[None]:
        """Whatever ends an exchange in the middle ends the process, too: nobody knows what it would say next."""
        try:
            yield
        except BaseException as error:
            self._stop()
            name = self.launch.name
            match error:
                case TimeoutError():
                    raise KernelFailed(f"the process of {name} did not {what} within {seconds:.0f} s") from None
                case EOFError() | OSError():
                    status, words = running.process.returncode, running.last_words()
                    raise KernelFailed(
                        f"the process of {name} ended with status {status}{': ' * bool(words)}{words}"
                    ) from None
                case ValueError():
                    raise KernelFailed(f"the process of {name} speaks nonsense: {error}") from None
            raise

    def _stop(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.end()


def _typed(header: Header) -> SwarmError:
    error = header["error"]
    if not isinstance(error, dict):
        raise ValueError("an error that is no map")
    return SwarmError.from_json(error)


class KernelExperts:
    """ExpertBackend of a KernelProcess."""

    waits_for_process: Final = True
    """A call may take as long as the process's deadlines: never on an event loop."""

    def __init__(self, process: KernelProcess, number: int, ask_f32: bool) -> None:
        self.name = process.launch.name + (":f32" if ask_f32 else "")
        self.declares = ("f32", "unknown") if process.launch.is_cpu else ("unknown", "unknown")
        self._process = process
        self._number = number
        self._ask_f32 = ask_f32
        self._layers: dict[int, tuple[LayerExperts, I32]] = {}
        self._held_by: object = None

    def start(self) -> None:
        """Start the process now, so that the first layer does not wait for it."""
        self._process.start()

    def load_layer(self, layer: LayerExperts, program: ExpertProgram, experts: Sequence[int], read: ReadSlice) -> None:
        self.unload_layer(layer.layer)
        program.check_shapes(layer.n_in, layer.n_out, {t.name: t.shape for t in layer.tensors})
        places = places_of(layer, experts)
        header = {"op": "load", "backend": self._number, "layer": describe_layer(layer), "program": program.to_bytes()}
        held_by = self._process.load(header | {"experts": [int(expert) for expert in experts]}, read)
        if held_by is not self._held_by:  # the process that held other layers is gone
            self._layers.clear()
        self._held_by, self._layers[layer.layer] = held_by, (layer, places)

    def unload_layer(self, layer: int) -> None:
        if self._layers.pop(layer, None) is not None:
            self._process.notify(self._held_by, {"op": "unload", "backend": self._number, "layer": layer})

    def held(self, layer: int) -> frozenset[int]:
        held = self._layers.get(layer)
        return frozenset() if held is None else frozenset(np.flatnonzero(held[1] >= 0).tolist())

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        held = self._layers.get(layer)
        if held is None:
            raise not_held(layer)
        spec, places = held
        if len(check_rows(spec, places, x, tokens, experts)) == 0:
            return np.empty((0, spec.n_out), np.float32)
        header = {
            "op": "compute", "backend": self._number, "layer": layer, "shape": [*x.shape, len(experts)],
            "ask_f32": ask_f32 or self._ask_f32,
        }  # fmt: skip
        bodies = (np.asarray(x, np.float32), np.asarray(tokens, np.int32), np.asarray(experts, np.int32))
        out = self._process.compute(self._held_by, header, bodies, 4 * len(experts) * spec.n_out)
        return np.frombuffer(out, np.float32).reshape(len(experts), spec.n_out)

    def close(self) -> None:
        self._layers.clear()
        if self._held_by is not None:
            self._process.notify(self._held_by, {"op": "close", "backend": self._number})
            self._held_by = None
