"""Every command has a schema of what it prints, made from the documents; `conforms` holds real answers to it."""

from __future__ import annotations

import json

import pytest

from capabilities.errors import NoDaemon, UsageError
from swarmnode.cli import common, ctl
from swarmnode.cli.schema import commands, schema_of_command
from tests.schema_checks import conforms


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


def test_times_have_fractions() -> None:
    conforms("requests", {"requests": [{"asked_at": 1.5}]})
    conforms("verify", {"asked_at": 1.5})
    conforms("placement", {"without": {"token_ms_after": 1.5}})


def test_a_group_that_is_a_command_itself_has_a_schema() -> None:
    assert schema_of_command("peer") == schema_of_command("peer show")
    assert schema_of_command("audit") == schema_of_command("audit show")


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
