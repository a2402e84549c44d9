"""The control channel over real sockets: answers, errors, cancellation, and callers and daemons that misbehave."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from capabilities.errors import DeadlineExceeded, ExpertsUnavailable, NoDaemon, SwarmError, UsageError
from swarmnode import control, control_client
from swarmnode.control import ControlReply, serve_control
from swarmnode.control_client import Call, request
from tests.patience import PATIENCE_S

Limits = Callable[[object, str, float], None]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """Sets a limit for the length of a test."""
    return monkeypatch.setattr


class Daemon:
    """Handlers as a daemon has them, and what became of the long one."""

    def __init__(self) -> None:
        self.started = trio.Event()
        self.ended = trio.Semaphore(0)  # one more for each handler that was cancelled
        names = ("echo", "count", "hang", "fail", "group", "crash", "flood", "nan")
        self.handlers = {name: getattr(self, name) for name in names}

    async def echo(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        return params

    async def count(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        for index in range(params["n"]):
            await reply.event("token", index=index, text="é")
        return {"n": params["n"]}

    async def hang(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        self.started.set()
        try:
            await trio.sleep_forever()
        finally:
            self.ended.release()

    async def flood(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        self.started.set()
        try:
            while True:
                await reply.event("token", text="x" * 10_000)
        finally:
            self.ended.release()

    async def fail(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        raise ExpertsUnavailable("layer 3 lost", layer=3, experts=[1, 2], peer="12D3", cause="timeout")

    async def group(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.fail, params, reply)
            nursery.start_soon(trio.sleep_forever)
        return {}

    async def crash(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        raise ZeroDivisionError("secret detail")

    async def nan(self, params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        return {"x": float("nan")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "control.sock"


@pytest.fixture
async def daemon(path: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon()
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, daemon.handlers)
        yield daemon
        nursery.cancel_scope.cancel()


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    with trio.fail_after(PATIENCE_S):
        return await trio.to_thread.run_sync(partial(function, *args))


def events_and_result(path: Path, method: str, params: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with Call(path, method, params) as call:
        return list(call), call.result


async def test_events_come_in_order_then_the_result(path: Path, daemon: Daemon) -> None:
    events, result = await in_thread(events_and_result, path, "count", {"n": 300})
    assert events == [{"event": "token", "index": index, "text": "é"} for index in range(300)]
    assert result == {"n": 300}


async def test_many_callers_at_once(path: Path, daemon: Daemon) -> None:
    results = {}

    async def caller(n: int) -> None:
        results[n] = await in_thread(request, path, "count", {"n": n})

    async with trio.open_nursery() as nursery:
        for n in range(20):
            nursery.start_soon(caller, n)
    assert results == {n: {"n": n} for n in range(20)}


@pytest.mark.parametrize("method", ["fail", "group"])
async def test_typed_errors_arrive_as_themselves(path: Path, daemon: Daemon, method: str) -> None:
    with pytest.raises(ExpertsUnavailable, match="layer 3 lost") as caught:
        await in_thread(request, path, method, {})
    assert caught.value.details == {"layer": 3, "experts": [1, 2], "peer": "12D3", "cause": "timeout"}


@pytest.mark.parametrize("method", ["crash", "nan"])
async def test_a_bug_in_a_handler_is_internal_and_the_daemon_lives(path: Path, daemon: Daemon, method: str) -> None:
    with pytest.raises(SwarmError) as caught:
        await in_thread(request, path, method, {})
    assert caught.value.type == "internal"
    assert "secret" not in caught.value.message
    assert await in_thread(request, path, "echo", {"a": 1}) == {"a": 1}


async def test_unknown_command(path: Path, daemon: Daemon) -> None:
    with pytest.raises(UsageError, match="knows no command 'dance'"):
        await in_thread(request, path, "dance", {})


async def test_leaving_early_cancels_the_handler_at_once(path: Path, daemon: Daemon, limits: Limits) -> None:
    limits(control, "KEEPALIVE_SECONDS", 2 * PATIENCE_S)  # it is not by writing that this is noticed
    call = await in_thread(Call, path, "hang", {})
    with trio.fail_after(PATIENCE_S):
        await daemon.started.wait()
        assert daemon.ended.value == 0
        with call:
            pass
        await daemon.ended.acquire()


async def test_killed_caller_cancels_the_handler(path: Path, daemon: Daemon) -> None:
    script = f"from swarmnode.control_client import *; request(Path({str(path)!r}), 'flood', {{}})"
    child = await trio.lowlevel.open_process([sys.executable, "-c", script])
    with trio.fail_after(PATIENCE_S):
        await daemon.started.wait()
        child.send_signal(signal.SIGKILL)
        await child.wait()
    with trio.fail_after(PATIENCE_S):
        await daemon.ended.acquire()


async def test_caller_that_reads_nothing_is_given_up(path: Path, daemon: Daemon, limits: Limits) -> None:
    limits(control, "WRITE_SECONDS_MAX", 0.3)
    with await in_thread(Call, path, "flood", {}), trio.fail_after(PATIENCE_S):
        await daemon.ended.acquire()


async def test_silence_is_kept_alive_by_a_living_daemon(path: Path, daemon: Daemon, limits: Limits) -> None:
    limits(control, "KEEPALIVE_SECONDS", 0.05)
    limits(control_client, "SILENCE_SECONDS_MAX", 2.0)

    async def slow(params: dict[str, Any], reply: ControlReply) -> dict[str, Any]:
        await trio.sleep(2.5)
        return {"slow": True}

    daemon.handlers["slow"] = slow
    assert await in_thread(request, path, "slow", {}) == {"slow": True}


def test_suspended_daemon_is_noticed(path: Path, limits: Limits) -> None:
    limits(control_client, "SILENCE_SECONDS_MAX", 0.3)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(5)
        with pytest.raises(DeadlineExceeded, match="said nothing"):
            request(path, "echo", {})


async def test_stopping_daemon_says_so(path: Path) -> None:
    daemon = Daemon()
    failure: list[SwarmError] = []

    async def caller() -> None:
        try:
            await in_thread(request, path, "hang", {})
        except SwarmError as error:
            failure.append(error)

    async with trio.open_nursery() as nursery, trio.open_nursery() as server:
        await server.start(serve_control, path, daemon.handlers)
        nursery.start_soon(caller)
        await daemon.started.wait()
        server.cancel_scope.cancel()
    assert failure[0].type == "cancelled"
    assert "stopping" in failure[0].message
    assert path.name not in os.listdir(path.parent)


def test_no_daemon(path: Path) -> None:
    for where in (path, path.parent / ("x" * 200), Path("a\0b")):
        with pytest.raises(NoDaemon, match="no daemon listens at"):
            request(where, "echo", {})


async def test_socket_is_for_this_user_alone(path: Path, daemon: Daemon) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700


async def test_second_daemon_is_refused_and_leaves_the_first_alone(path: Path, daemon: Daemon) -> None:
    with pytest.raises(UsageError, match="another daemon already runs"):
        await serve_control(path, {})
    assert await in_thread(request, path, "echo", {"a": 1}) == {"a": 1}


async def test_socket_of_a_dead_daemon_is_replaced(path: Path) -> None:
    os.mkdir(path.parent)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NoDaemon):
        request(path, "echo", {})
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, Daemon().handlers)
        assert await in_thread(request, path, "echo", {"a": 1}) == {"a": 1}
        nursery.cancel_scope.cancel()


def test_file_in_the_way_is_named_and_kept(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("precious")
    with pytest.raises(UsageError, match="cannot listen at"):
        trio.run(serve_control, path, {})
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\n", "not JSON"),
        (b"\xff\xfe\n", "not JSON"),
        (b"[" * 500_000 + b"\n", "not JSON"),
        (b"[]\n", "a request is"),
        (b'{"method": 3}\n', "a request is"),
        (b'{"method": "echo", "params": []}\n', "a request is"),
    ],
)
async def test_malformed_requests_are_refused(path: Path, daemon: Daemon, data: bytes, message: str) -> None:
    async with await trio.open_unix_socket(str(path)) as stream:
        with trio.fail_after(PATIENCE_S):
            await stream.send_all(data)
            reply = b"".join([chunk async for chunk in stream])
    error = json.loads(reply)["error"]
    assert error["type"] == "usage"
    assert message in error["message"]


async def test_endless_request_is_cut_off(path: Path, daemon: Daemon) -> None:
    async with await trio.open_unix_socket(str(path)) as stream:
        with trio.fail_after(PATIENCE_S), pytest.raises(trio.BrokenResourceError):
            await stream.send_all(bytes(8 << 20))
    assert await in_thread(request, path, "echo", {"a": 1}) == {"a": 1}


async def test_caller_that_never_asks_is_given_up(path: Path, daemon: Daemon, limits: Limits) -> None:
    limits(control, "REQUEST_SECONDS_MAX", 0.1)
    async with await trio.open_unix_socket(str(path)) as stream:
        with trio.fail_after(PATIENCE_S):
            assert b"no request came" in b"".join([chunk async for chunk in stream])


async def test_connections_are_bounded_and_come_free_again(path: Path, daemon: Daemon, limits: Limits) -> None:
    limits(control, "CONNECTIONS_MAX", 3)
    held = [await in_thread(Call, path, "hang", {}) for _ in range(3)]
    await wait_all_tasks_blocked()
    with pytest.raises(SwarmError) as caught:
        await in_thread(request, path, "echo", {})
    assert caught.value.type == "overloaded"
    with trio.fail_after(PATIENCE_S):
        for call in held:
            with call:
                pass
            await daemon.ended.acquire()
    assert await in_thread(request, path, "echo", {"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "no_daemon"),
        (b'{"event": "token"}\n', "no_daemon"),
        (b"junk\n", "internal"),
        (b"[1]\n", "internal"),
        (b"{}\n", "internal"),
        (b'{"error": {"type": "experts_unavailable", "message": "x", "layer": 2}}\n', "experts_unavailable"),
        (b'{"result": 3}\n', "internal"),
    ],
)
def test_daemon_that_answers_oddly(path: Path, data: bytes, kind: str) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        with Call(path, "echo", {}) as call:
            connection, _ = listener.accept()
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            with connection, pytest.raises(SwarmError) as caught:
                list(call)
    assert caught.value.type == kind


def test_line_without_end_is_bounded(path: Path, limits: Limits) -> None:
    limits(control_client, "REPLY_LINE_BYTES_MAX", 1000)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        with Call(path, "echo", {}) as call:
            connection, _ = listener.accept()
            connection.sendall(b"x" * 5000)
            with connection, pytest.raises(SwarmError, match="over 1000 bytes"):
                list(call)


def test_request_that_is_too_long_is_refused_before_it_is_sent(path: Path) -> None:
    with pytest.raises(UsageError, match="bytes"):
        request(path, "ask", {"prompt": "x" * control_client.REQUEST_LINE_BYTES_MAX})


def test_client_starts_fast() -> None:
    """swarmctl feels slow with trio and libp2p behind it: the client's imports stay small."""
    script = "import sys, swarmnode.control_client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"trio", "libp2p", "numpy", "pydantic", "structlog"} & set(loaded)
