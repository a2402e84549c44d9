"""How long a test waits for what must come, on a machine that is shared and may stand still for seconds.

What has happened ends a wait at once, so patience costs nothing but where a test fails. A promise of seconds is looked
at with `LOADED` times as many, and beside it, wherever that is possible, at what it was that ended the wait. Where
nothing tells that the others on this event loop have done their part, they get turns: seconds may pass without any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

PATIENCE_S: Final = 100.0
"""Less than a test's own time limit (pyproject.toml), so that the wait that failed is named."""

LOADED: Final = 5.0
"""How many times slower than promised a machine may be that runs other things beside the tests."""

_TURN_S: Final = 0.002


async def turns(count: int = 50) -> None:
    """So many rounds of the event loop, each with what has arrived by then."""
    for _ in range(count):
        await trio.sleep(_TURN_S)


async def stuck(progress: Callable[[], int]) -> None:
    """Until turns change nothing any more."""
    before = -1
    while before != (before := progress()):
        await turns()
