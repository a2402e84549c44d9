"""The log in the data folder: bounded, private, readable while it is written, and shown by `swarmctl logs`."""

from __future__ import annotations

import contextlib
import json
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from swarmnode import log_file, logs
from swarmnode.cli import common, ctl
from tests.control_threads import SWARMCTL
from tests.patience import PATIENCE_S

FILE_BYTES = 64 << 10


@pytest.fixture
def write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., None]]:
    logs.configure("info", "json", file=log_file.BoundedLogFile(tmp_path / "logs", FILE_BYTES))
    yield structlog.get_logger("swarmnode.test").info
    logs.configure()  # closes the file


def numbers(tmp_path: Path, count: int) -> list[int]:
    return [line["number"] for line in log_file.last_lines(tmp_path / "logs", count)[0]]


def test_it_is_bounded_private_and_read_across_its_parts(tmp_path: Path, write: Callable[..., None]) -> None:
    for number in range(1000):
        write("line", number=number, prompt="a secret")
    parts = sorted((tmp_path / "logs").iterdir())
    assert len(parts) == log_file.PARTS
    assert FILE_BYTES // 2 < sum(part.stat().st_size for part in parts) <= FILE_BYTES
    assert {stat.S_IMODE(part.stat().st_mode) for part in parts} == {0o600}
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700
    assert "a secret" not in "".join(part.read_text() for part in parts)
    assert numbers(tmp_path, 300) == list(range(700, 1000))


def test_half_a_line_and_a_broken_one_are_left_out(tmp_path: Path, write: Callable[..., None]) -> None:
    write("line", number=1)
    path = tmp_path / "logs" / log_file.NAME
    with path.open("a") as file:
        file.write('{"number": 2\n{"numb')
    shown, offset = log_file.last_lines(tmp_path / "logs", 10)
    assert [line["number"] for line in shown] == [1]
    with path.open("a") as file:
        file.write('er": 3}\n')
    with contextlib.closing(log_file.follow(tmp_path / "logs", offset)) as lines:  # type: ignore[type-var]
        assert next(lines)["number"] == 3


def test_a_disk_that_takes_nothing_costs_the_log_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    logs.configure("info", "json", file=log_file.BoundedLogFile(tmp_path / "logs", FILE_BYTES))
    for number in range(3):
        structlog.get_logger("swarmnode.test").info("line", number=number)
    err = capsys.readouterr().err
    assert err.count("cannot be written") == 1
    assert err.count('"event": "line"') == 3


def test_following_misses_no_line_when_a_part_is_full(tmp_path: Path, write: Callable[..., None]) -> None:
    write("line", number=0)
    command = [*SWARMCTL, "logs", "--follow", "--json", "--data-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["number"] == 0
        for number in range(1, 100):  # over a part's end, and not over two
            write("line", number=number)
        assert [json.loads(child.stdout.readline())["number"] for _ in range(1, 100)] == list(range(1, 100))
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE_S) == 0


def test_for_people_a_line_has_no_control_characters(
    tmp_path: Path, write: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    write("peer.came", name="attic")
    with (tmp_path / "logs" / log_file.NAME).open("a") as file:
        file.write(json.dumps({"event": "odd\x1b[2J", "level": "info", "timestamp": "x"}) + "\n")
    capsys.readouterr()
    assert common.main(ctl.swarmctl, "swarmctl", ["logs", "--data-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "peer.came" in out
    assert "name=attic" in out
    assert "\x1b" not in out


def test_no_log_says_where_to_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert common.main(ctl.swarmctl, "swarmctl", ["logs", "--data-dir", str(tmp_path)]) == 2
    assert "log.file_mib" in capsys.readouterr().err
