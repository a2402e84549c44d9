"""The token that a request needs which changes what this daemon does: who can read the data folder may.

A page in a browser, and any other program of this machine, may ask prompts; that is what the interface is for. Leaving
the swarm's work is another matter.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path
from typing import Final

from starlette.requests import Request

from swarmnode.api.errors import Refusal
from swarmnode.durable import write_whole

HEADER: Final = "x-swarmnode-token"
_BYTES: Final = 24


class Token:
    """Anew at each start; in a file that only this user can read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._value = secrets.token_hex(_BYTES)

    def write(self) -> None:
        """Blocks. Raises OSError."""
        write_whole(self._path, f"{self._value}\n".encode())

    def check(self, request: Request) -> None:
        """Refusal unless the request shows it."""
        if not hmac.compare_digest(request.headers.get(HEADER, "").encode(), self._value.encode()):
            message = f"this needs the token in {self._path}: send it as the header {HEADER}"
            raise Refusal(403, message, "invalid_token")
