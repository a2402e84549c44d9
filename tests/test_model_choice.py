"""Which model a leader serves: the rules in their order, and what is remembered over a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from capabilities.errors import NotReady
from swarmnode.model_choice import ModelChoice, choose

IDS = {"old": "0" * 64, "new": "1" * 64}


@pytest.mark.parametrize(
    ("ids", "configured", "swarm_active", "name"),
    [
        (IDS, "new", "0" * 64, "new"),
        (IDS, "absent", "0" * 64, "absent"),  # opening it says what is wrong
        (IDS, "", "1" * 64, "new"),
        ({"old": "0" * 64}, "", "", "old"),
    ],
)
def test_the_rules(ids: dict[str, str], configured: str, swarm_active: str, name: str) -> None:
    assert choose(ids, configured, swarm_active) == name


def test_without_a_way_to_tell_it_says_what_to_do() -> None:
    with pytest.raises(NotReady, match="`swarmctl model use NAME` with one of new, old"):
        choose(IDS, "", "")
    with pytest.raises(NotReady, match="`swarmctl model add FILE`"):
        choose({}, "", "")
    with pytest.raises(NotReady, match=r"the swarm's model, which is not here$"):
        choose({}, "", "0" * 64)
    with pytest.raises(NotReady, match="which is not here: `swarmctl model use NAME` makes it serve one of old"):
        choose({"old": "0" * 64}, "", "1" * 64)


def test_what_the_swarm_serves_is_remembered_for_this_swarm_alone(tmp_path: Path) -> None:
    file = tmp_path / "model"
    choice = ModelChoice(file, "", "home")
    with pytest.raises(NotReady):
        choice.name(IDS)
    choice.remember(IDS["new"])
    assert choice.name(IDS) == "new"
    again = ModelChoice(file, "", "home")
    assert again.name(IDS) == "new"
    again.remember(IDS["old"])
    assert (again.name(IDS), ModelChoice(file, "", "home").name(IDS)) == ("old", "old")
    assert ModelChoice(file, "", "elsewhere").swarm_active == ""
    for damaged in (b"\xff\xfe", b"", b"one", b"a b c"):
        file.write_bytes(damaged)
        assert ModelChoice(file, "", "home").swarm_active == ""
