"""Whether a real answer is what its command's schema says."""

from __future__ import annotations

from typing import Any

import jsonschema

from swarmnode.cli.schema import schema_of_command


def conforms(command: str, answer: Any) -> None:
    """AssertionError naming the key and what is wrong with it."""
    found = jsonschema.Draft202012Validator(schema_of_command(command)).iter_errors(answer)
    wrong = [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]
    assert not wrong, f"{command}: " + "\n".join(wrong[:20])
