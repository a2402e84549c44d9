"""Which model a leader serves: the rules in their order, and a choice that survives a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from capabilities.errors import NotReady
from swarmnode.model_choice import ModelChoice, choose

IDS = {"old": "0" * 64, "new": "1" * 64}


@pytest.mark.parametrize(
    ("ids", "configured", "swarm_active", "chosen", "name"),
    [
        (IDS, "new", "0" * 64, "old", "new"),
        (IDS, "absent", "0" * 64, "old", "absent"),  # opening it says what is wrong
        (IDS, "", "1" * 64, "old", "new"),
        (IDS, "", "2" * 64, "old", "old"),  # what the swarm served is not here
        (IDS, "", "", "old", "old"),
        ({"old": "0" * 64}, "", "2" * 64, "gone", "old"),
    ],
)
def test_the_rules(ids: dict[str, str], configured: str, swarm_active: str, chosen: str, name: str) -> None:
    assert choose(ids, configured, swarm_active, chosen) == name


def test_without_a_way_to_tell_it_says_what_to_do() -> None:
    with pytest.raises(NotReady, match="`swarmctl model use NAME` with one of new, old"):
        choose(IDS, "", "", "gone")
    with pytest.raises(NotReady, match="`swarmctl model add FILE`"):
        choose({}, "", "0" * 64, "gone")


def test_a_choice_is_remembered_and_the_swarms_word_goes_before_it(tmp_path: Path) -> None:
    choice = ModelChoice(tmp_path / "model", "")
    with pytest.raises(NotReady):
        choice.name(IDS)
    choice.use("new", IDS["new"])
    assert choice.name(IDS) == "new"
    again = ModelChoice(tmp_path / "model", "")
    assert again.name(IDS) == "new"
    again.swarm_active = IDS["old"]
    assert again.name(IDS) == "old"
    again.use("new", IDS["new"])
    assert again.name(IDS) == "new", "a choice is for the swarm, too"
    (tmp_path / "model").write_bytes(b"\xff\xfe")
    with pytest.raises(NotReady):
        ModelChoice(tmp_path / "model", "").name(IDS)
