"""How many files this process may have open: the daemon asks for as many as it is allowed."""

from __future__ import annotations

import resource
from typing import Final

FILES_WANTED: Final = 4096
"""A connection to each of 256 peers and as many that are being made, model files, the cache's, control callers: some
hundreds; the rest is room for what others dial at once."""

FILES_MIN: Final = 256
"""Below, a daemon with a dozen peers cannot open its own files any more."""


def raise_files_limit() -> int:
    """Raise the soft limit as far as FILES_WANTED needs and the hard limit allows; what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES_WANTED if hard == resource.RLIM_INFINITY else min(FILES_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return unlimited(soft)


def unlimited(limit: int) -> int:
    """A limit as a number that can be compared."""
    return 2**31 - 1 if limit == resource.RLIM_INFINITY else limit
