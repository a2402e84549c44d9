"""What every test gets: no sight of the daemon of whoever runs it."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import structlog

# Machines that run tests are shared: how long an example took says nothing about the code.
hypothesis.settings.register_profile(
    "shared",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("shared")


@pytest.fixture(autouse=True)
def _logs_of_its_own() -> Iterator[None]:
    """A test that configures logging must not silence those that look at logs."""
    yield
    structlog.reset_defaults()


@pytest.fixture(autouse=True, scope="session")
def _no_daemon_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands that name no data folder must not find the one of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWARMNODE_DATA_DIR", str(tmp_path_factory.mktemp("nobody")))
        patch.setenv("NO_COLOR", "1")
        yield
