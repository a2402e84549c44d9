"""A name for this machine, the same for every daemon on it, which tells nobody anything else about it.

Two copies of an expert on one machine are lost together, so placement has to know who shares one.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import Final

from swarmnode.durable import write_whole

MACHINE_ID_FILE: Final = Path("/etc/machine-id")
_CHARS: Final = 32
_READ_CHARS_MAX: Final = 256


def machine_name(data: Path) -> str:
    """32 hexadecimal digits. Where the system has no machine id one is drawn and kept in the data folder: daemons on
    such a machine count as apart."""
    name = _read(MACHINE_ID_FILE)
    if not name:
        kept = data / "machine-id"
        name = _read(kept)
        if not name:
            name = secrets.token_hex(16)
            write_whole(kept, name.encode())
    return hashlib.sha256(b"swarmnode machine " + name.encode()).hexdigest()[:_CHARS]


def _read(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(_READ_CHARS_MAX).strip()
    except OSError:
        return ""
