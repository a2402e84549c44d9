"""What every test gets: no sight of the daemon of whoever runs it. And which tests run beside each other."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
import structlog

# A shell that starts this in the background has it ignore Ctrl-C, and all children with it; some of these are sent one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines that run tests are shared, and there NumPy's threads wait for each other far longer than they compute. NumPy
# reads this when it is loaded, which the tests themselves do.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# For the same reason: how long an example took says nothing about the code. And the examples are the same each time, so
# that no change is stopped by what it has nothing to do with: `pytest --hypothesis-profile=explore` looks for new ones.
for profile, derandomize in (("explore", False), ("shared", True)):
    hypothesis.settings.register_profile(
        profile,
        deadline=None,
        derandomize=derandomize,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )
hypothesis.settings.load_profile("shared")

# Tests that start daemons wait more than they compute, but their daemons mind each other's load. With two processes
# (`make test`) one runs all of these, one file after the other, and the other one everything else, file by file.
STARTS_DAEMONS: Final = re.compile(r"^from .*\b(local_swarm|swarm_tools|netns|demo|demo_model|bench)\b", re.MULTILINE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with daemons first, since they take longest."""
    groups = {path: _group(path) for path in {item.path for item in items}}
    items.sort(key=lambda item: groups[item.path] != "daemons")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What is sent to one process as a whole. (xdist 3.8's own groups are lost on pytest 9.2, which keeps ids of its
    own.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _group(config.rootpath / nodeid.split("::")[0])

    return ByGroup(config, log)


@cache
def _group(path: Path) -> str:
    return "daemons" if STARTS_DAEMONS.search(path.read_text()) else path.stem


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
