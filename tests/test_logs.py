"""Logs: one form for all loggers, request ids on every line, and nothing in them that must not be there."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest
import structlog
import trio

from swarmnode import logs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, object]]]]:
    """Configures JSON logs; call it for what was written since the last call. The process's logging is put back."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    stream = io.StringIO()
    logs.configure("debug", "json", stream)

    def read() -> list[dict[str, object]]:
        text = stream.getvalue()
        stream.seek(0)
        stream.truncate()
        return [json.loads(line) for line in text.splitlines()]

    yield read
    structlog.reset_defaults()
    root.handlers[:], root.level = before[0], before[1]


def test_structlog_and_stdlib_come_out_alike(lines: Callable[[], list[dict[str, object]]]) -> None:
    structlog.get_logger("swarmnode.worker").info("shard loaded", layer=3, experts=16)
    logging.getLogger("libp2p.host").warning("odd %s", "peer")
    logging.getLogger("libp2p.host").info("not shown")
    ours, theirs = lines()
    assert ours["event"] == "shard loaded"
    assert (ours["layer"], ours["level"], ours["logger"]) == (3, "info", "swarmnode.worker")
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("odd peer", "warning", "libp2p.host")
    assert ours.keys() >= {"timestamp"} <= theirs.keys()


async def test_bound_request_id_is_on_every_line_also_of_tasks(lines: Callable[[], list[dict[str, object]]]) -> None:
    log = structlog.get_logger("swarmnode.x")

    async def child() -> None:
        log.info("child")

    with logs.bound(request_id="r-1"):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child)
        logging.getLogger("other").warning("inside")
    log.info("after")
    assert [line.get("request_id") for line in lines()] == ["r-1", "r-1", None]


def test_prompts_and_tokens_are_withheld_counts_are_not(lines: Callable[[], list[dict[str, object]]]) -> None:
    log = structlog.get_logger("swarmnode.x")
    log.info("request", prompt="my secret", tokens=[1, 2], token=17, text="secret", prompt_tokens=4)
    log.info("request", tokens=12)
    first, second = lines()
    assert "secret" not in json.dumps(first)
    assert first["tokens"] == first["token"] == first["prompt"] == "(withheld)"
    assert first["prompt_tokens"] == 4
    assert second["tokens"] == 12


def test_peers_texts_are_harmless_and_short(lines: Callable[[], list[dict[str, object]]]) -> None:
    log = structlog.get_logger("swarmnode.x")
    log.info("peer", name="\x1b[2Jevil\u202e\n", agent="x" * 10_000, list=["y" * 10_000], raw=b"\x1b")
    log.info("nested", error={"message": "\x1b", "experts": list(range(1000))}, addresses=("/ip4/127.0.0.1",))
    try:
        raise ValueError("\x1b]0;title\x07")
    except ValueError:
        log.exception("failed")
    peer, nested, failed = lines()
    assert nested["error"] == {"message": "\\x1b", "experts": list(range(16))}
    assert nested["addresses"] == ["/ip4/127.0.0.1"]
    assert peer["name"] == "\\x1b[2Jevil\\u202e\\x0a"
    assert len(json.dumps(peer)) < 2_000
    assert "\x1b" not in str(failed["exception"])
    assert str(failed["exception"]).count("\n") > 2


def test_level_filters_ours(lines: Callable[[], list[dict[str, object]]]) -> None:
    stream = io.StringIO()
    logs.configure("warning", "json", stream)
    structlog.get_logger("swarmnode.x").info("no")
    structlog.get_logger("swarmnode.x").warning("yes")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["yes"]
    assert lines() == []


def test_people_get_words_and_no_locals(lines: Callable[[], list[dict[str, object]]]) -> None:
    stream = Terminal()
    logs.configure("info", "auto", stream)
    prompt = "the secret prompt"
    try:
        raise RuntimeError("broke")
    except RuntimeError:
        structlog.get_logger("swarmnode.x").exception("step failed", layer=3)
    shown = stream.getvalue()
    assert "step failed" in shown
    assert "RuntimeError: broke" in shown
    assert prompt not in shown
    assert not shown.startswith("{")


def test_what_peers_provoke_cannot_fill_a_disk(
    lines: Callable[[], list[dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("swarmnode.logs.time.monotonic", lambda: now[0])
    log = structlog.get_logger("swarmnode.x")
    for number in range(5000):
        log.warning("peer mistake", peer=f"peer-{number}")
        log.info("request.begin", request_id=str(number))
    log.warning("member.left", peer="p")
    counted = [line["event"] for line in lines()]
    assert counted.count("peer mistake") == logs.LINES_PER_MINUTE
    assert counted.count("request.begin") == 5000
    assert counted.count("member.left") == 1
    now[0] += 60
    log.warning("peer mistake", peer="p")
    log.warning("peer mistake", peer="p")
    first, second = lines()
    assert first["lines_dropped"] == 5000 - logs.LINES_PER_MINUTE
    assert "lines_dropped" not in second
