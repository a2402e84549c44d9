"""What every test gets: no sight of the daemon of whoever runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_daemon_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that name no data folder must not find the one of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWARMNODE_DATA_DIR", str(tmp_path_factory.mktemp("nobody")))
        patch.setenv("NO_COLOR", "1")
        yield
