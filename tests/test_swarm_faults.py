"""Swarms of real processes while something breaks: typed errors in time, and service again without a restart of anyone.

Workers are killed, stopped and cut off in the middle of an answer; peers misbehave through real libp2p from this very
process. Every test ends by asking again, and the answer must be llama.cpp's own.
"""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from capabilities.errors import SwarmError
from swarmnode import limits
from swarmnode.control_client import Call
from swarmnode.expert_messages import PROTOCOL as EXPERTS
from swarmnode.expert_messages import DispatchHead, encode_dispatch, encode_failure, encode_reply
from swarmnode.identity import Identity
from swarmnode.local_swarm import LocalNode, LocalSwarm
from swarmnode.member_messages import PROTOCOL as MEMBER
from swarmnode.member_messages import decode_from_leader, encode
from swarmnode.net.interface import NetworkError, PeerId
from swarmnode.pinger import PROTOCOL as PING
from swarmnode.prompt_messages import PROTOCOL as PROMPT
from swarmnode.shards.messages import PROTOCOL as SHARDS
from swarmnode.status_service import PROTOCOL as STATUS
from swarmnode.wire import encode_frame, read_frame
from tests.fault_tools import (
    FakeWorker,
    Proxy,
    RightAnswers,
    bad_frames,
    fake_worker,
    hello,
    honest,
    is_refused,
    stranger,
)
from tests.net_tools import eventually
from tests.patience import LOADED, PATIENCE_S, turns
from tests.swarm_tools import (
    CONTEXT_TOKENS,
    TWELVE_A_MIB,
    Served,
    ask,
    at_once,
    failure,
    logged,
    long_ask,
    serving,
    wait_until,
)
from tests.tiny_architectures import write_olmoe, write_tiny_model

ERROR_SECONDS_MAX = 5.0 * LOADED  # from a fault to the typed error at the asker
BACK_SECONDS_MAX = 15.0 * LOADED


class Broken(Served):
    """A swarm whose second worker reaches the leader through a proxy."""

    def __init__(self, swarm: LocalSwarm, model: Path, proxy: Proxy) -> None:
        super().__init__(swarm, model)
        self.proxy = proxy

    @property
    def address(self) -> str:
        return str(self.leader.status()["addresses"][0])

    def check_all(self) -> None:
        """Ready again in time; every peer gives llama.cpp's tokens."""
        self.swarm.wait_ready(timeout_s=BACK_SECONDS_MAX)
        for node in self.swarm.nodes:
            wait_until(lambda node=node: node.status()["ready"])
            self.check(node, ask("And now?", 20))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    root = tmp_path_factory.mktemp("broken")
    settings = {
        "leader": {"context_tokens": CONTEXT_TOKENS, "batch_tokens": 64, "own_copy": False, "park_s": 0.0},
        "swarm": {"settle_s": 0.5, "replicas": 2},
    }
    # Each has room for half of the experts: a share waits for its holder, however long that takes to start again.
    swarm = LocalSwarm(root / "swarm", 2, leader=settings, each={"node": {"memory_mib": 1}})
    second = swarm.workers.pop()
    with swarm:
        address = swarm.leader.status()["addresses"][0]
        port = address.split("/")[4]
        proxy = Proxy(int(port))
        second.settings["swarm"] = {"role": "worker", "leader": address.replace(f"/{port}/", f"/{proxy.port}/")}
        second.start()
        second.wait_up()
        swarm.workers.append(second)
        swarm.add_model(write_olmoe(root / "m.gguf", 3, widths=TWELVE_A_MIB["f32"]))
        swarm.wait_ready(timeout_s=PATIENCE_S)
        broken = Broken(swarm, root / "m.gguf", proxy)
        yield broken
        broken.undivided.close()
        proxy.close()


def fails_in_the_middle(asker: LocalNode, fault: Callable[[], Any], tokens: int = 20) -> SwarmError:
    """The error of an answer in whose middle something breaks; it must come in time."""
    with Call(asker.socket, "ask", long_ask()) as call:
        events = (event for event in call if event["event"] == "token")
        for _ in range(tokens):
            next(events)
        fault()
        started = time.monotonic()
        error = failure(lambda: list(events))
        assert time.monotonic() - started < ERROR_SECONDS_MAX
        return error


def check_names_experts(error: SwarmError, worker: LocalNode, peer: str) -> None:
    assert error.type == "experts_unavailable"
    assert error.details["peer"] == peer
    assert error.details["layer"] in range(3)
    assert error.details["experts"]
    assert set(error.details["experts"]) <= set(range(8))
    assert worker.name in error.message or peer in error.message
    assert error.details["request_id"].startswith("req-")


def processes(served: Served) -> list[int]:
    return [node.pid for node in served.swarm.nodes]


# --- Workers ----------------------------------------------------------------------------------------------------------


def test_a_killed_worker(served: Broken) -> None:
    first, second = served.workers
    status = first.status()
    peer, held = status["self"], status["local"]["experts_held"]
    check_names_experts(fails_in_the_middle(second, first.kill), first, peer)
    states = {"leader": "ready", "worker-1": "gone", "worker-2": "ready"}
    wait_until(lambda: {p["name"]: p["state"] for p in second.status()["peers"]} == states)
    status = second.status()
    assert status["ready"] is False
    assert len({(m["layer"], m["expert"]) for m in status["model"]["coverage"]["missing"]}) == held > 0
    assert failure(lambda: second.call("ask", **ask("Too early"))).type == "not_ready"
    first.start()
    first.wait_up()
    served.check_all()


def test_a_stopped_worker(served: Broken) -> None:
    first = served.workers[0]
    peer, before = first.status()["self"], processes(served)
    try:
        error = fails_in_the_middle(served.leader, lambda: first.send_signal(signal.SIGSTOP))
        state = next(p for p in served.leader.status()["peers"] if p["name"] == first.name)["state"]
        assert state in ("suspect", "gone")  # as slow as this machine was
    finally:
        first.send_signal(signal.SIGCONT)
    check_names_experts(error, first, peer)
    assert error.details["cause"] in ("suspended", "timeout")
    served.check_all()
    assert processes(served) == before
    assert served.leader.status()["epoch"] == 1


def test_a_worker_that_sleeps_until_it_is_given_up_comes_back_as_itself(served: Broken) -> None:
    first = served.workers[0]
    first.send_signal(signal.SIGSTOP)
    try:
        gone = lambda: {p["name"]: p["state"] for p in served.leader.status()["peers"]}[first.name] == "gone"  # noqa: E731
        wait_until(gone)
    finally:
        first.send_signal(signal.SIGCONT)
    served.check_all()
    assert [line["adopted"] for line in logged(first, "member.loaded")][-1]


@pytest.mark.parametrize("kind", ["cut", "stalled"])
def test_a_worker_whose_connection_breaks(served: Broken, kind: str) -> None:
    second, before = served.workers[1], processes(served)
    peer = second.status()["self"]
    try:
        error = fails_in_the_middle(served.workers[0], served.proxy.cut if kind == "cut" else served.proxy.stall)
        wait_until(lambda: failure(lambda: second.call("ask", **ask("Hello?"))).type == "no_leader")
    finally:
        served.proxy.mend()
        served.proxy.resume()
    check_names_experts(error, second, peer)
    assert error.details["cause"] in (("disconnected",) if kind == "cut" else ("suspended", "timeout"))
    served.check_all()
    assert processes(served) == before


def test_every_request_ends_when_a_worker_dies_under_many(served: Broken) -> None:
    first, second = served.workers
    asks = [long_ask(f"Story {i}", temperature=1.0, seed=i) for i in range(6)]

    def kill() -> None:
        wait_until(lambda: served.requests()["running"] == 6)
        time.sleep(0.2)
        first.kill()

    calls = [lambda params=params: failure(lambda: second.call("ask", **params)) for params in asks]
    started = time.monotonic()
    *errors, _ = at_once([*calls, kill])
    assert time.monotonic() - started < 2 * ERROR_SECONDS_MAX
    assert {error.type for error in errors} <= {"experts_unavailable"}
    wait_until(lambda: served.requests()["running"] == 0)
    first.start()
    first.wait_up()
    served.check_all()


# --- The leader -------------------------------------------------------------------------------------------------------


def test_a_stopped_leader(served: Broken) -> None:
    first, second = served.workers
    before, leader = processes(served), served.leader_id
    try:
        error = fails_in_the_middle(first, lambda: served.leader.send_signal(signal.SIGSTOP))
        assert (error.type, error.details["peer"]) == ("no_leader", leader)
        seconds = []
        for _ in range(3):
            started = time.monotonic()
            assert failure(lambda: second.call("ask", **ask("Hello?"))).type == "no_leader"
            seconds.append(time.monotonic() - started)
        assert min(seconds) < 1.0  # pings have told
        status = second.status()
        assert (status["ready"], status["leader"]) == (False, None)
        # Until the connections are given up, too.
        wait_until(lambda: all("no connection" in w.status()["reason"] for w in served.workers))
    finally:
        served.leader.send_signal(signal.SIGCONT)
    served.check_all()
    assert processes(served) == before


def test_a_prompt_that_meets_a_leader_just_stopped(served: Broken) -> None:
    served.leader.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert failure(lambda: served.workers[0].call("ask", **ask("Hello?"))).type == "no_leader"
        assert time.monotonic() - started < ERROR_SECONDS_MAX
    finally:
        served.leader.send_signal(signal.SIGCONT)
    served.check_all()


def test_a_killed_leader(served: Broken) -> None:
    error = fails_in_the_middle(served.workers[0], served.leader.kill)
    assert error.type == "no_leader"
    served.leader.start()
    served.leader.wait_up()
    served.check_all()


def test_daemons_that_are_asked_to_stop_in_the_middle_say_so(served: Broken) -> None:
    """SIGTERM: in time, with a typed error for whoever asked, and lines in the log."""
    for node, asker, type_ in (
        (served.workers[0], served.workers[1], "experts_unavailable"),
        (served.leader, served.workers[1], "no_leader"),
        (served.workers[1], served.workers[1], "cancelled"),
    ):
        seen = len(logged(node))
        error = fails_in_the_middle(asker, lambda node=node: node.send_signal(signal.SIGTERM))  # type: ignore[misc]
        assert error.type == type_
        assert node.process is not None
        assert node.process.wait(PATIENCE_S) == 0
        said = [line["event"] for line in logged(node)[seen:]]
        assert "daemon.stopping" in said
        if node is served.leader:
            assert "request.failed" in said
            assert "stopped" in error.message
        node.start()
        node.wait_up()
        served.check_all()


# --- Strangers --------------------------------------------------------------------------------------------------------


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """A blocking call from a test whose own network must go on."""
    return await trio.to_thread.run_sync(function, *args)


async def test_garbage_on_every_protocol_is_refused_and_counted(served: Broken) -> None:
    worker = served.workers[0].status()
    before, worker_before = served.leader.status()["network"], worker["local"]
    async with stranger(served.address, worker["addresses"][0]) as network:
        for name, data in bad_frames():
            for protocol in (PROMPT, MEMBER, STATUS, PING, SHARDS):
                assert await is_refused(network, served.leader_id, protocol, data), (protocol, name)
            for protocol in (EXPERTS, PING):
                assert await is_refused(network, worker["self"], protocol, data), (protocol, name)
        cut = await network.open_stream(PeerId(served.leader_id), PROMPT)
        await cut.send(encode_frame({"kind": "ask"})[:9])
        await cut.aclose()
        after = (await call(served.leader.status))["network"]
        assert after["peer_mistakes"] - before["peer_mistakes"] >= 50
        assert after["handler_errors"] == before["handler_errors"] == 0
        local = (await call(served.workers[0].status))["local"]
        assert local["refused"] - worker_before["refused"] == 15
        assert local["network"]["handler_errors"] == 0
        await call(served.check_all)


async def test_only_the_leader_may_dispatch(served: Broken) -> None:
    worker = served.workers[0].status()
    frame = encode_dispatch(
        term=served.leader.status()["term"],
        epoch=1,
        sequence=1,
        layer=0,
        x=np.ones((1, 64), np.float32),
        tokens=np.zeros(1, np.int32),
        experts=np.zeros(1, np.int32),
    )
    async with stranger(worker["addresses"][0]) as network:
        assert await is_refused(network, worker["self"], EXPERTS, frame)
        local = (await call(served.workers[0].status))["local"]
        assert "only the swarm's leader" in local["last_refusal"]
        assert local["dispatches"] == worker["local"]["dispatches"]


async def test_malformed_prompts_of_strangers_are_typed_refusals(served: Broken) -> None:
    params = {
        "kind": "ask", "id": "req-x", "top_k": 0, "seed": 1, "temperature": 0.0, "top_p": 1.0, "min_p": 0.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "max_tokens": 5,
    }  # fmt: skip
    wrong = [
        ({**params, "temperature": -1.0}, b'{"prompt":"x"}'),
        (params, b"{}"),
        (params, b'{"prompt":"x","messages":[{"role":"user","content":"y"}]}'),
        (params, b'{"messages":[{"role":"nobody","content":"y"}]}'),
        (params, b'{"prompt":"' + b"x" * 5000 + b'"}'),
        (params, b'{"prompt":"x","stop":[""]}'),
        ({**params, "id": "a b"}, b'{"prompt":"x"}'),
        ({**params, "seed": -1}, b'{"prompt":"x"}'),
        (params, b'["prompt"]'),
        (params, b"[" * 100_000),
        (params, b'{"prompt":{"a":1}}'),
        (params, b"\xff\xfe"),
    ]
    async with stranger(served.address) as network:
        for header, payload in wrong:
            data = encode_frame(header, payload)
            assert await is_refused(network, served.leader_id, PROMPT, data), (header, payload[:40])
        assert (await call(served.leader.status))["network"]["handler_errors"] == 0


async def test_a_stranger_cannot_open_streams_without_end(served: Broken) -> None:
    async with stranger(served.address) as network:
        leader, refused = PeerId(served.leader_id), 0

        async def ask_nothing() -> None:
            nonlocal refused
            try:
                await (await network.open_stream(leader, PROMPT)).receive_exactly(1)
            except NetworkError:
                refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask_nothing)
            await eventually(lambda: refused == 20 - limits.PROMPT_STREAMS_PER_PEER_MAX)
            await turns()
            assert refused == 20 - limits.PROMPT_STREAMS_PER_PEER_MAX
            await call(served.check_all)
            nursery.cancel_scope.cancel()
    wait_until(lambda: served.requests()["running"] == 0)


async def test_idle_connections_by_the_hundred(served: Broken) -> None:
    port = int(served.address.split("/")[4])
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    try:
        await call(served.check_all)
        closed = 0
        with trio.move_on_after(PATIENCE_S):
            while closed < 300:
                await trio.sleep(0.2)
                closed = sum(is_closed(sock) for sock in idle)
        assert closed == 300
        assert served.leader.status()["network"]["junk_connections"] >= 300
    finally:
        for sock in idle:
            sock.close()
    await call(served.check_all)


def is_closed(sock: socket.socket) -> bool:
    """Whether the other side has closed; what it said before is dropped."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def test_junk_in_the_control_socket(served: Broken) -> None:
    junks = (
        b"\n", b"\x00" * 66, b"[]\n", b'{"method":5}\n', b'{"method":"ask","params":[]}\n', b"[" * 5000 + b"\n",
        b'{"method":"surprise"}\n', b'{"method":"ask","params":{"prompt":{}}}\n', b"x" * (2 << 20),
    )  # fmt: skip
    for junk in junks:
        for node in served.swarm.nodes:
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(PATIENCE_S)
                sock.connect(str(node.socket))
                try:
                    sock.sendall(junk)
                    sock.shutdown(socket.SHUT_WR)
                    data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
                except OSError:
                    continue
                assert b'"error"' in data, junk[:30]
    served.check_all()


# --- Workers that are none --------------------------------------------------------------------------------------------


async def test_a_member_that_never_loads_disturbs_nobody(served: Broken) -> None:
    before = served.leader.status()["epoch"]
    async with fake_worker(Identity.generate(), served.address, name="lazy", claims_loaded=False) as fake:
        await eventually(lambda: bool(fake.assigned))  # second copies, for which nobody else has room
        for _ in range(3):
            status = await call(served.leader.status)
            states = {p["name"]: (p["state"], p["experts_held"]) for p in status["peers"]}
            assert states["lazy"] == ("loading", 0)
            assert (status["ready"], status["epoch"]) == (True, before)
            await call(served.check_all)


# The swarm below has one real worker and waits for a second one: this process.


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("half")
    model = write_tiny_model(root / "m.gguf", "olmoe")
    settings = {
        "leader": {"context_tokens": CONTEXT_TOKENS, "own_copy": False, "park_s": 0.0},
        "swarm": {"workers_expected": 2, "replicas": 1},
    }
    with LocalSwarm(root / "swarm", 1, leader=settings) as swarm:
        swarm.add_model(model)
        served = Served(swarm, model)
        yield served
        served.undivided.close()


@pytest.fixture(scope="module")
def right(half: Served) -> RightAnswers:
    return RightAnswers(half.leader.folder / "models" / "m" / "manifest.msgpack", half.model)


IMPOSTOR = Identity.generate()


def scaled(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return encode_reply(head.sequence, 1, y * np.float32(1.001))


def swapped(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return encode_reply(head.sequence, 1, np.roll(y, 1, axis=0))


def one_wrong_expert(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    y = y.copy()
    y[-1] *= 1.1
    return encode_reply(head.sequence, 1, y)


def not_finite(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    y = y.copy()
    y[0, 0] = np.nan
    return encode_reply(head.sequence, 1, y)


def too_many_rows(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return encode_reply(head.sequence, 1, np.concatenate([y, y]))


def too_few_bytes(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return encode_frame([4, head.sequence, len(y), 1], y[:-1])


def another_sequence(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return encode_reply(head.sequence + 1, 1, y)


def answered_twice(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return 2 * encode_reply(head.sequence, 1, y)


def huge_length(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return struct.pack("<II", 5, 0xFFFF_FFF0) + b"\x94\x04\x01\x01\x01"


def junk(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return bytes(range(150, 216))


def refuses(head: DispatchHead, y: np.ndarray[Any, Any]) -> bytes:
    return encode_failure(head.sequence, SwarmError("\x1b[31mno\nway" + "!" * 5000))


def silent(head: DispatchHead, y: np.ndarray[Any, Any]) -> None:
    return None


SPOILED = {
    scaled: "computes something else", swapped: "computes something else", one_wrong_expert: "computes something else",
    not_finite: "not finite", too_many_rows: "not an integer in", too_few_bytes: "bytes", another_sequence: "not open",
    answered_twice: "not open", huge_length: "announced", junk: "announced", refuses: "refused", silent: "owes",
}  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
async def test_a_worker_that_answers_wrong_gets_no_work(half: Served, right: RightAnswers, spoil: Any) -> None:
    async with fake_worker(IMPOSTOR, half.leader.status()["addresses"][0], right=right, spoil=spoil):
        error = None
        with trio.fail_after(PATIENCE_S):
            while error is None:
                status = await call(half.leader.status)
                assert not status["ready"]
                row = next((p for p in status["peers"] if p["name"] == "fake"), {})
                error = row.get("error") if row.get("state") != "gone" else None
                await trio.sleep(0.05)
        assert SPOILED[spoil] in error["message"]
        assert error["type"] == "experts_unavailable"
        assert error["peer"] == IMPOSTOR.peer_id
        assert error["experts"]
        assert row["experts_held"] == 0
        refusal = await call(failure, lambda: half.workers[0].call("ask", **ask("Hello")))
        assert refusal.type == "not_ready"
    half.leader.check_alive()
    wait_until(lambda: {p["name"]: p["state"] for p in half.leader.status()["peers"]}["fake"] == "gone")


@pytest.mark.parametrize("turn", [junk, silent, refuses], ids=lambda spoil: spoil.__name__)
async def test_a_worker_that_turns_bad_in_the_middle(half: Served, right: RightAnswers, turn: Any) -> None:
    async with fake_worker(IMPOSTOR, half.leader.status()["addresses"][0], right=right) as fake:
        await ready_with(half, fake)
        await call(half.check, half.workers[0], ask("Two of us", 30))

        def fault() -> None:
            fake.spoil = turn

        error = await call(fails_in_the_middle, half.workers[0], fault)
        check_names_experts(error, LocalNode("fake", Path(), {}), IMPOSTOR.peer_id)
        assert not (await call(half.leader.status))["ready"]
        fake.spoil = honest
        await ready_with(half, fake)
        await call(half.check, half.leader, ask("Two of us again", 30))


async def ready_with(half: Served, fake: FakeWorker) -> None:
    await call(wait_until, lambda: half.leader.status()["ready"], BACK_SECONDS_MAX)
    await eventually(lambda: bool(fake.begun))


async def test_hostile_members_are_refused_and_flooding_costs_them_their_place(half: Served) -> None:
    leader = half.leader.status()
    hellos = [
        encode_frame({"kind": "hello"}),
        encode(hello("x" * 65)),
        encode_frame({"kind": "progress", "term": 1, "epoch": 1, "phase": "loaded", "done": 0, "total": 0}),
        encode_frame({"kind": "assign", "term": 1}),
        encode(hello("x"))[:-1] + b"\x07",
    ]
    async with stranger(leader["addresses"][0]) as network:
        for data in hellos:
            assert await is_refused(network, leader["self"], MEMBER, data), data[:40]
        stream = await network.open_stream(PeerId(leader["self"]), MEMBER)
        other = encode_frame({**dict(hello_fields("old")), "wire": 99})
        await stream.send(other)
        refusal = decode_from_leader(await read_frame(stream, limits.MEMBER_FRAME))
        assert "wire version" in refusal.error.message  # type: ignore[union-attr]
        after = (await call(half.leader.status))["network"]
        assert after["hellos_refused"] >= 1
        assert after["handler_errors"] == 0


def hello_fields(name: str) -> dict[str, Any]:
    fields = hello(name)
    return {"kind": "hello", **{key: getattr(fields, key) for key in fields.__slots__}}


# --- Machines ---------------------------------------------------------------------------------------------------------


def test_too_little_memory_is_named_and_more_of_it_mends_that(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m.gguf", "olmoe", quantisation="q4_k")  # 2.5 MiB of experts
    with LocalSwarm(tmp_path / "swarm", 2, each={"node": {"memory_mib": 1}}) as swarm:
        swarm.add_model(model)
        reason = wait_until(lambda: "more memory" in (r := swarm.leader.status()["reason"]) and r)
        assert "bytes are missing" in reason
        assert failure(lambda: swarm.workers[0].call("ask", **ask("Hello"))).type == "not_ready"
        second = swarm.workers[1]
        stop(second)
        second.settings["node"]["memory_mib"] = 8
        second.start()
        second.wait_up()
        swarm.wait_ready(timeout_s=PATIENCE_S)
        held = {p["name"]: p["memory"]["used_bytes"] for p in swarm.leader.status()["peers"]}
        assert 0 < held["worker-1"] <= 1 << 20 < held["worker-2"]
        assert swarm.workers[0].call("ask", **ask("Hello", 5))["tokens"]


def test_two_daemons_on_one_data_folder(served: Broken) -> None:
    node = served.workers[0]
    command = [sys.executable, "-m", "swarmnode", "run", "--config", str(node.folder / "config.toml")]
    second = subprocess.run(
        [*command, "--data-dir", str(node.folder)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert second.returncode != 0
    lines = second.stderr.strip().splitlines()
    assert any(str(node.pid) in line and "another daemon" in line for line in lines), lines
    assert "Traceback" not in second.stderr
    served.check_all()


def stop(node: LocalNode) -> None:
    assert node.process is not None
    node.process.terminate()
    assert node.process.wait(PATIENCE_S) == 0


def test_recurrent_models_survive_an_aborted_step(tmp_path: Path) -> None:
    with serving(tmp_path, "lfm2moe", park_s=0.0) as served:
        for node in served.swarm.nodes:
            served.check(node, ask("Before", 40, temperature=1.0, seed=3))
        holder = next(node for node in served.workers if node.status()["local"]["experts_held"])
        peer = holder.status()["self"]
        check_names_experts(fails_in_the_middle(served.leader, holder.kill), holder, peer)
        holder.start()
        holder.wait_up()
        served.swarm.wait_ready(timeout_s=BACK_SECONDS_MAX)
        asks = [ask(f"After {i}", 40, temperature=1.0, seed=i) for i in range(4)]
        calls = [lambda params=params: served.workers[1].call("ask", **params) for params in asks]
        for params, answer in zip(asks, at_once(calls), strict=True):
            assert answer["tokens"] == list(served.expected(params).tokens)
