"""The control channel, and the side of it that swarmctl uses: plain sockets, so that a command starts at once.

One connection is one request. All lines are JSON objects in UTF-8:

    -> {"method": "ask", "params": {"prompt": "Hello"}}
    <- {"event": "token", "index": 0, "text": "Hi"}        any number of events
    <-                                                     empty lines: the daemon lives, go on waiting
    <- {"result": {...}}                                   or {"error": {"type", "message", "hint", ...}}, and the end

The caller cancels by closing its socket: the daemon drops the request at once (control.py). Since the daemon sends an
empty line whenever it has nothing to say, silence means that it hangs or is suspended, and the caller gives up.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from capabilities.errors import DeadlineExceeded, Internal, NoDaemon, SwarmError, UsageError

Json = Any

REQUEST_LINE_BYTES_MAX: Final = 1 << 20
"""A prompt that fills a context of 131,072 tokens is about 0.6 MB."""

REPLY_LINE_BYTES_MAX: Final = 16 << 20
"""The longest is the status of a large swarm with experts missing: 60,000 of them take 2 MB."""

CONNECT_SECONDS_MAX: Final = 5.0
"""Connecting and sending the request. The kernel does both for a daemon that is alive, however busy."""

KEEPALIVE_SECONDS: Final = 2.0
SILENCE_SECONDS_MAX: Final = 15.0
"""A busy daemon can be kept from its event loop for seconds (a step of a long prompt), never this long. It is what a
person waits in front of a daemon that was suspended."""

RECEIVE_BYTES: Final = 1 << 16


class Call:
    """One request under way. Iterate over its events; afterwards `result` holds the daemon's answer.

    Raises NoDaemon where none listens or it went away, DeadlineExceeded on silence, and every typed error that the
    daemon answers with. Leaving the `with` block early cancels the request.
    """

    def __init__(self, path: Path, method: str, params: Mapping[str, Json]) -> None:
        self.result: dict[str, Json] = {}
        line = json.dumps({"method": method, "params": params}).encode() + b"\n"
        if len(line) > REQUEST_LINE_BYTES_MAX:
            raise UsageError(f"the request has {len(line)} bytes; {REQUEST_LINE_BYTES_MAX} are the limit")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_SECONDS_MAX)
        try:
            self._socket.connect(str(path))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused unread: its reason can be read
                self._socket.sendall(line)
        except TimeoutError as error:
            self._socket.close()
            raise DeadlineExceeded(f"the daemon at {path} takes no requests", hint=_HANGS) from error
        except (OSError, ValueError) as error:
            self._socket.close()
            raise NoDaemon(f"no daemon listens at {path}", path=str(path)) from error
        except BaseException:
            self._socket.close()
            raise
        self._socket.settimeout(SILENCE_SECONDS_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def __iter__(self) -> Iterator[dict[str, Json]]:
        for line in self._lines():
            value = _parse(line)
            if "event" in value:
                yield value
            elif isinstance(error := value.get("error"), dict):
                raise SwarmError.from_json(error)
            elif isinstance(result := value.get("result"), dict):
                self.result = result
                return
            else:
                raise Internal("the daemon sent a line that is neither event, result nor error")

    def _lines(self) -> Iterator[bytes]:
        """Lines that are not empty, until the daemon closes; and that it may do only after its last word."""
        pending = bytearray()
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError as error:
                message = f"the daemon has said nothing for {SILENCE_SECONDS_MAX:.0f} s"
                raise DeadlineExceeded(message, hint=_HANGS) from error
            except OSError:
                data = b""
            if not data:
                raise NoDaemon("the daemon went away before it answered", hint="Its log says why.")
            *lines, rest = data.split(b"\n")
            for line in lines:
                whole, pending = bytes(pending + line), bytearray()
                if whole:
                    yield whole
            pending += rest
            if len(pending) > REPLY_LINE_BYTES_MAX:
                raise Internal(f"the daemon sent a line of over {REPLY_LINE_BYTES_MAX} bytes")


_HANGS = "It may be suspended or stuck: look at its log, or stop it and start it again."


def request(path: Path, method: str, params: Mapping[str, Json]) -> dict[str, Json]:
    """Call a method and wait for its result; its events are dropped. Raises what Call raises."""
    with Call(path, method, params) as call:
        for _ in call:
            pass
        return call.result


def _parse(line: bytes) -> dict[str, Json]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Internal("the daemon sent a line that is not JSON") from error
    if not isinstance(value, dict):
        raise Internal("the daemon sent a line that is no JSON object")
    return value
