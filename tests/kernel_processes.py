"""Kernel processes for tests: the installed ggml in a child, and children that break the protocol."""

from __future__ import annotations

import sys

from backends.variant_process import Launch

COMMAND = (sys.executable, "-m", "backends.variant_child")


def installed_kernels(*, call_s: float = 60.0) -> Launch:
    return Launch("ggml-cpu", "the installed ones", COMMAND, None, is_cpu=True, call_s=call_s)


def script(text: str, *, start_s: float = 20.0, call_s: float = 20.0) -> Launch:
    """A child that runs `text`; in it, `frames` is its end and `hello()` says what a sound child says first."""
    prelude = (
        "import os, socket, sys, time\n"
        "from backends.variant_frames import Frames\n"
        "end = socket.socket(fileno=os.dup(0))\n"
        "frames = Frames(end)\n"
        "hello = lambda: frames.send({'protocol': 1, 'ggml': '0.25.3', 'device': 'none', 'backend': 'none'})\n"
    )
    return Launch("broken", "none", (sys.executable, "-c", prelude + text), None, True, {}, start_s, call_s)
