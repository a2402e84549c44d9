"""Every command has a schema of what it prints, made from the documents; `conforms` holds real answers to it."""

from __future__ import annotations

import json

import click
import jsonschema
import pytest

from capabilities.errors import NoDaemon, UsageError
from swarmnode.cli import common, ctl
from swarmnode.cli.schema import commands, schema_of_command
from tests.make_schemas import FOLDER, schemas, text_of
from tests.schema_checks import conforms

WITHOUT = {"completion", "schema", "equivalence all"}
"""They print no object of their own: a script, a schema."""


def leaves(group: click.Group, name: str = "") -> set[str]:
    found: set[str] = set()
    for word, command in group.commands.items():
        whole = f"{name} {word}".strip()
        found |= leaves(command, whole) if isinstance(command, click.Group) else {whole}
    return found


def test_every_command_has_one() -> None:
    assert set(commands()) == leaves(ctl.swarmctl) - WITHOUT


def test_they_are_those_of_the_documents() -> None:
    made = schemas()
    assert set(made) == set(commands())
    for name, schema in made.items():
        text = (FOLDER / f"{name.replace(' ', '-')}.json").read_text()
        assert text == text_of(schema), f"{name}: run `python -m tests.make_schemas`"
        jsonschema.Draft202012Validator.check_schema(schema_of_command(name))


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ({"ready": "yes"}, "ready"),
        ({"peers": [{"rtt_ms": "far"}]}, "peers.0.rtt_ms"),
        ({"peers": {}}, "peers"),
        ({"error": {"message": "no type", "hint": "x"}}, "error"),
    ],
)
def test_a_wrong_answer_is_found(answer: object, wrong: str) -> None:
    with pytest.raises(AssertionError, match=wrong):
        conforms("status", answer)


def test_an_error_is_an_answer_of_every_command() -> None:
    for name in commands():
        conforms(name, {"error": NoDaemon("no daemon").to_json()})


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert common.main(ctl.swarmctl, "swarmctl", ["schema", "model", "show"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "swarmctl model show --json"
    assert common.main(ctl.swarmctl, "swarmctl", ["schema"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == commands()
    with pytest.raises(UsageError) as caught:
        schema_of_command("dance")
    assert "status" in caught.value.hint
