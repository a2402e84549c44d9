"""The last comparison of all peers that was made on this machine, so that a page can show it. Without the figures of
each operator: who agreed with whom, level by level."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from swarmnode.durable import write_whole

_NAME: Final = "equivalence.json"
_BYTES_MAX: Final = 4 << 20  # 496 pairs with six levels each take a tenth of it
_LEVEL_KEYS: Final = ("level", "pass", "reason")


def keep_matrix(folder: Path, result: Mapping[str, Any]) -> None:
    """Remember what `run_matrix` gave. Raises OSError."""
    pairs = [{**pair, "levels": [_short(level) for level in pair["levels"]]} for pair in result["pairs"]]
    kept = {**result, "pairs": pairs, "measured_at": round(time.time(), 3)}
    write_whole(folder / _NAME, json.dumps(kept).encode())


def read_matrix(folder: Path) -> dict[str, Any] | None:
    """What was kept, or None."""
    try:
        with (folder / _NAME).open("rb") as file:
            kept = json.loads(file.read(_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return kept if isinstance(kept, dict) else None


def _short(level: Mapping[str, Any]) -> dict[str, Any]:
    return {key: level.get(key) for key in _LEVEL_KEYS}
