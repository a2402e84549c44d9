"""Nurseries as an implementation detail: their exception groups stay inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_groups() -> Iterator[None]:
    """One exception comes out as itself, not in the groups of nurseries that the caller knows nothing of."""
    error: BaseException
    try:
        yield
        return
    except BaseExceptionGroup as group:
        error = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    raise error
