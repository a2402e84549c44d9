"""Comparisons that tests have in common: operators of a few sizes, and every level of a tiny model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from capabilities.equivalence import LEVELS
from swarmnode.equivalence.ops import op_level
from swarmnode.equivalence.passes import WINDOW
from swarmnode.equivalence.recipes import Sizes
from swarmnode.equivalence.run import run_equivalence
from swarmnode.equivalence.targets import find_target
from swarmnode.equivalence.text import bundled_questions
from tests.expert_models import quiet, tiny_file

SMALL = Sizes(("q8_0",), (256, 2048), (1, 40))
OF_MODELS = LEVELS[1:]
WRONG = "tests.equivalence_backends:"


def ops(a: str, b: str, sizes: Sizes = SMALL) -> dict[str, Any]:
    return op_level(find_target(a), find_target(b), sizes, quiet)


def products(level: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in level["ops"] if row["op"] == "matmul"]


@cache
def models(a: str, b: str) -> dict[str, dict[str, Any]]:
    """Every level but op, by its name, on a tiny model, and with a few questions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmnode.equivalence.task.bundled_questions", lambda: bundled_questions()[:5])
        found = run_equivalence(
            a, b, levels=OF_MODELS, model=lambda: tiny_file("olmoe", "q8_0"), own_model=True,
            tokens=3 * WINDOW + 9, prompts=12, answer_tokens=6, progress=quiet,
        )  # fmt: skip
    return {level["level"]: level for level in found["levels"]}
