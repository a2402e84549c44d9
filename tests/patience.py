"""How long a test waits for what must come, on a machine that is shared and may stand still for seconds.

What has happened ends a wait at once, so patience costs nothing but where a test fails. A promise of seconds is looked
at with `LOADED` times as many, and beside it, wherever that is possible, at what it was that ended the wait.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 100.0
"""Less than a test's own time limit (pyproject.toml), so that the wait that failed is named."""

LOADED: Final = 5.0
"""How many times slower than promised a machine may be that runs other things beside the tests."""
