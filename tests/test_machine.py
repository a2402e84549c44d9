"""The machine's name: one for all daemons on it, lasting, and not the machine id itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode import machine
from swarmnode.machine import machine_name


def test_daemons_of_one_machine_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MACHINE_ID_FILE", tmp_path / "id")
    (tmp_path / "id").write_text("0123456789abcdef\n")
    name = machine_name(tmp_path / "a")
    assert machine_name(tmp_path / "b") == name
    assert len(name) == 32
    assert "0123456789abcdef" not in name
    (tmp_path / "id").write_text("another\n")
    assert machine_name(tmp_path / "a") != name


@pytest.mark.parametrize("there", [True, False])
def test_without_a_machine_id_a_name_is_kept(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MACHINE_ID_FILE", tmp_path / "id")
    if there:
        (tmp_path / "id").write_text("\n")  # an image that was never booted
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    first = machine_name(tmp_path / "a")
    assert machine_name(tmp_path / "a") == first
    assert machine_name(tmp_path / "b") != first
