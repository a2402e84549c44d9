"""A bed for tests, which are skipped, with the reason, where no bed can be made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.netns.bed import Bed, NoNamespaces


@contextmanager
def skipping_without_namespaces() -> Iterator[None]:
    """Skips, with the reason, where namespaces cannot be made."""
    try:
        yield
    except NoNamespaces as error:
        pytest.skip(str(error))


@contextmanager
def bed_or_skip(n: int, **options: Any) -> Iterator[Bed]:
    with ExitStack() as held:
        with skipping_without_namespaces():
            bed = held.enter_context(Bed(n, **options))
        yield bed
