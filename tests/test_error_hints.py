"""Every error says what to do next: its class does, or whoever raises it, and nobody takes that away."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

import backends
import capabilities
import scheduler
import swarmnode
from capabilities.errors import SwarmError
from tests.documents import ROOT
from tests.test_docs import COMMANDS, fault_of

PACKAGES = (capabilities, scheduler, backends, swarmnode)
PROGRAMS = {"swarmnode.__main__"}


def modules() -> Iterator[ModuleType]:
    for package in PACKAGES:
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name not in PROGRAMS:
                yield importlib.import_module(found.name)


@pytest.fixture(scope="module")
def kinds() -> dict[str, type[SwarmError]]:
    """Every class of errors, by its name, all modules loaded."""
    return {
        name: value
        for module in modules()
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, SwarmError) and value is not SwarmError
    }


def test_every_kind_of_error_has_a_next_step(kinds: dict[str, type[SwarmError]]) -> None:
    assert len(kinds) > 20
    assert [name for name, kind in kinds.items() if not kind("no").hint] == []


@pytest.fixture(scope="module")
def made(kinds: dict[str, type[SwarmError]]) -> list[tuple[str, ast.expr | None]]:
    """Everywhere that such an error is made, and the hint that it gets there."""
    return [
        (where, next((keyword.value for keyword in call.keywords if keyword.arg == "hint"), None))
        for where, call in calls(kinds)
    ]


def calls(kinds: dict[str, type[SwarmError]]) -> Iterator[tuple[str, ast.Call]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package.__name__).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_nobody_who_raises_one_leaves_it_without(made: list[tuple[str, ast.expr | None]]) -> None:
    assert len(made) > 300
    for where, hint in made:
        if hint is not None:
            texts = [node.value for node in ast.walk(hint) if isinstance(node, ast.Constant)]
            assert "" not in texts, f"{where}: an empty hint"


def test_hints_name_commands_that_there_are(
    kinds: dict[str, type[SwarmError]], made: list[tuple[str, ast.expr | None]]
) -> None:
    hints = [kind.default_hint for kind in kinds.values()]
    hints += [str(hint.value) for _, hint in made if isinstance(hint, ast.Constant)]
    named = [span for hint in hints for span in hint.split("`")[1::2] if span.split(" ")[0] in COMMANDS]
    assert len(named) > 20
    for span in named:
        assert fault_of(span.split(" "), whole=False) is None, span
