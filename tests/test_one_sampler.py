"""One place samples, whoever asks, and no other code chooses a token."""

from __future__ import annotations

import ast
import re

import pytest

from tests.documents import ROOT

LIKELIEST = re.compile(r"(nan)?arg(max|partition)|multinomial|categorical|gumbel|topk|top_k_indices")
"""By what a token may be chosen from logits."""

CHOOSE_OTHER_THINGS = {
    "scheduler/sampling.py": "the sampler",
    "scheduler/placing_repair.py": "which experts go where",
    "backends/numpy_functions.py": "a block's largest activation",
    "backends/demo_measure.py": "compares models",
    "capabilities/equivalence.py": "compares models",
    "capabilities/task_level.py": "compares models",
    "capabilities/precision.py": "a probe's worst width",
    "swarmnode/equivalence/causes.py": "rows that differ most",
    "swarmnode/leader/audit_evidence.py": "the row that is furthest off",
}


def names_of(tree: ast.AST) -> set[str]:
    """What a module takes from the scheduler, by whichever path: a module, one of its names, or the package's."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "scheduler":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.rpartition(".")[2] for alias in node.names if alias.name.startswith("scheduler")}
    return found


def draws(source: str) -> bool:
    """Whether a module has the sampler, or all of a module that has it."""
    return "scheduler" in source and bool({"sample", "sampling", "scheduler", "*"} & names_of(ast.parse(source)))


def picks(source: str) -> bool:
    """Whether it looks for the largest of some values."""
    named = (ast.Attribute, ast.alias, ast.Name)
    nodes = ast.walk(ast.parse(source)) if LIKELIEST.search(source) else ()
    return any(isinstance(node, named) and LIKELIEST.fullmatch(_name(node)) for node in nodes)


def _name(node: ast.Attribute | ast.alias | ast.Name) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else node.id


def modules() -> dict[str, str]:
    folders = ("swarmnode", "scheduler", "backends", "capabilities")
    return {str(path.relative_to(ROOT)): path.read_text() for each in folders for path in (ROOT / each).rglob("*.py")}


def test_one_module_samples_and_only_who_leads_or_compares_uses_it() -> None:
    every = modules()
    assert {name for name, source in every.items() if draws(source)} == {"scheduler/answer.py", "scheduler/__init__.py"}
    assert {name for name, source in every.items() if picks(source)} == set(CHOOSE_OTHER_THINGS)
    users = {name for name, source in every.items() if "Batcher" in source and "Batcher" in names_of(ast.parse(source))}
    assert users
    assert not [name for name in users if "worker" in name or "experts" in name or "compute" in name or "asker" in name]


@pytest.mark.parametrize(
    "source",
    [
        "from scheduler import sample",
        "from scheduler.sampling import sample as draw",
        "from scheduler.answer import sample",
        "from scheduler import sampling",
        "import scheduler.sampling",
        "import scheduler\nscheduler.sample",
        "def f():\n    from scheduler import *",
    ],
)
def test_a_second_place_that_samples_is_found(source: str) -> None:
    assert draws(source)
    assert not draws("from scheduler.sampling import SamplingParams")


@pytest.mark.parametrize("source", ["logits.argmax()", "np.argpartition(x, 3)", "from numpy import argmax"])
def test_a_second_place_that_takes_the_likeliest_token_is_found(source: str) -> None:
    assert picks(source)
