"""Progress of a long command, on standard error: that it lives, what it does, how far it is, since when.

A thread of its own shows it, since many a step (a decode, a wait for others) reports nothing between its begin and its
end: on a terminal one line that is redrawn in place, elsewhere a line for each step that takes over two seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

import click

from swarmnode.printable import printable_line

REDRAW_S = 0.2
QUIET_S = 2.0  # without a terminal: what takes less needs no word
AGAIN_S = 10.0  # and what takes long gets one this often
STEP_CHARS_MAX = 60


class ProgressLine:
    """Call it with (step, done, total); a total of 0 or 1 shows no percentage. Use it as a context manager."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._turn = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._step = ""
        self._share = ""
        self._begin = self._next = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.clear()

    def __call__(self, step: str, done: int, total: int) -> None:
        with self._turn:
            if step != self._step:
                self._begin = time.monotonic()
                self._next = self._begin + (0.0 if self._live else QUIET_S)
            self._step = step
            self._share = f" {done * 100 // total} %" if total > 1 else ""

    def clear(self) -> None:
        """Take the line away, for other output; the next call brings it back."""
        with self._turn:
            if self._live and self._step:
                click.echo("\r\x1b[K", err=True, nl=False)
            self._step = ""

    def _run(self) -> None:
        while not self._stop.wait(REDRAW_S):
            with self._turn:
                now = time.monotonic()
                if not self._step or now < self._next:
                    continue
                self._next = now if self._live else now + AGAIN_S
                elapsed_s = int(now - self._begin)
                clock = f"({elapsed_s // 60}:{elapsed_s % 60:02d})"
                text = f"{printable_line(self._step)[:STEP_CHARS_MAX]}{self._share} {clock}"
                click.echo(f"\r\x1b[K{text}" if self._live else text, err=True, nl=not self._live)
