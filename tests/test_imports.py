"""Who may import whom, and what the scheduler may touch: the rules of docs/architecture.md, read off the source.

    capabilities <- scheduler, backends <- swarmnode;  trio and libp2p in swarmnode alone, llama_cpp in backends alone
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("capabilities", "scheduler", "backends", "swarmnode")
MAY_IMPORT = {
    "capabilities": {"capabilities"},
    "scheduler": {"scheduler", "capabilities"},
    "backends": {"backends", "capabilities"},
    "swarmnode": set(PACKAGES),
}
ONLY_IN = {
    "trio": ("swarmnode",),
    "libp2p": ("swarmnode/net/", "swarmnode/identity.py"),
    "llama_cpp": ("backends",),
    "llguidance": ("backends",),
}
# What a decision needs. No clock, no randomness, no files, no threads: those come in as events and values.
SCHEDULER_MAY_USE = frozenset(
    (
        "__future__", "abc", "bisect", "codecs", "collections", "contextlib", "dataclasses", "enum", "fractions",
        "functools", "hashlib", "heapq", "itertools", "json", "math", "numpy", "operator", "re", "struct",
        "types", "typing",
    )
)  # fmt: skip
NUMPY_MAY_NOT_USE = frozenset(("random", "load", "save", "memmap", "fromfile"))
SCHEDULER_MAY_NOT_CALL = frozenset(("open", "print", "input", "exec", "eval", "__import__"))


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every imported module with its line, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""


def faults(file: str, source: str) -> list[str]:
    """What in a file (its path from the root) breaks the rules."""
    package, tree = file.split("/")[0], ast.parse(source)
    found = []
    for line, module in imported(tree):
        top = module.split(".")[0]
        if top in PACKAGES and top not in MAY_IMPORT[package]:
            found.append(f"{file}:{line}: {package} must not import {top}")
        if top in ONLY_IN and not file.startswith(ONLY_IN[top]):
            found.append(f"{file}:{line}: {top} belongs to {' and '.join(ONLY_IN[top])}")
        if package == "scheduler" and top not in SCHEDULER_MAY_USE | MAY_IMPORT["scheduler"]:
            found.append(f"{file}:{line}: the scheduler is pure, and {top} is not")
    if package == "scheduler":
        found += [f"{file}:{line}: the scheduler is pure, and {what} is not" for line, what in _impure(tree)]
    return found


def _impure(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield node.lineno, "async"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in SCHEDULER_MAY_NOT_CALL:
            yield node.lineno, node.func.id
        elif isinstance(node, ast.Attribute) and node.attr in NUMPY_MAY_NOT_USE and ast.unparse(node.value) == "np":
            yield node.lineno, f"numpy.{node.attr}"


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_file_keeps_the_rules(path: Path) -> None:
    assert faults(path.relative_to(ROOT).as_posix(), path.read_text()) == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("capabilities/x.py", "from scheduler.sampling import sample"),
        ("scheduler/x.py", "import backends.ggml"),
        ("backends/x.py", "def f():\n    from scheduler import sample"),
        ("backends/x.py", "import trio"),
        ("scheduler/x.py", "from llama_cpp import llama_decode"),
        ("swarmnode/leader/x.py", "import llama_cpp"),
        ("swarmnode/leader/x.py", "from libp2p.peer.id import ID"),
        ("scheduler/x.py", "import time"),
        ("scheduler/x.py", "from random import choice"),
        ("scheduler/x.py", "import os.path"),
        ("scheduler/x.py", "async def f(): ..."),
        ("scheduler/x.py", "import numpy as np\nx = np.random.default_rng(1)"),
        ("scheduler/x.py", "print(1)"),
    ],
)
def test_a_breach_is_found(file: str, source: str) -> None:
    assert faults(file, source)


def test_bootstrap_needs_nothing_installed() -> None:
    tree = ast.parse((ROOT / "swarmnode" / "bootstrap.py").read_text())
    assert {module.split(".")[0] for _, module in imported(tree)} <= sys.stdlib_module_names
