"""HTTP as strangers speak it: too much, too slowly, malformed, from the wrong page, and away in the middle."""

from __future__ import annotations

import json
import math
import socket
import sys
from typing import Any

import pytest
import trio

from capabilities.errors import ContextLengthExceeded, NoLeader, NotReady, Overloaded, UsageError
from swarmnode import logs
from swarmnode.api import limits
from swarmnode.prompt_messages import Failed, Queued
from tests.api_tools import HELLO, Conversation, answer, done, post, serving_http, token
from tests.patience import PATIENCE_S, turns

CHAT = "/v1/chat/completions"
STREAM = {**HELLO, "stream": True}


def events_of(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_an_answer_whole_and_as_a_stream() -> None:
    async with serving_http(answer) as served, served.client() as client:
        whole = (await client.post(CHAT, json=HELLO)).json()
        assert whole["choices"][0]["message"]["content"] == "Good day."
        streamed = await client.post(CHAT, json=STREAM)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *told, end = events_of(streamed.text)
        assert end == "[DONE]"
        assert "".join(each["choices"][0]["delta"].get("content", "") for each in told) == "Good day."


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (UsageError("top_k must be small", parameter="top_k"), 400, "invalid_value", False),
        (ContextLengthExceeded("too long"), 400, "context_length_exceeded", False),
        (NoLeader("nobody leads"), 503, "no_leader", True),
        (NotReady("wait"), 503, "not_ready", True),
        (Overloaded("too many"), 429, "overloaded", True),
        (Overloaded("too many", retry_after_s=6.2), 429, "overloaded", True),
    ],
)
@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "stream"])
async def test_what_fails_at_once_has_its_status(
    monkeypatch: pytest.MonkeyPatch, error: Any, status: int, code: str, retry: bool, body: Any
) -> None:
    monkeypatch.setattr(limits, "STREAM_PATIENCE_SECONDS", PATIENCE_S)
    async with serving_http(lambda c: c.say(Queued(0), Failed(error))) as served, served.client() as client:
        response = await client.post(CHAT, json=body)
    told = response.json()["error"]
    assert (response.status_code, told["code"]) == (status, code)
    after = math.ceil(error.details.get("retry_after_s", limits.RETRY_SECONDS))
    assert response.headers.get("retry-after") == (str(after) if retry else None)
    assert told["param"] == {"invalid_value": "top_k", "context_length_exceeded": "messages"}.get(code)


async def test_a_refusal_names_the_field_and_speaks_of_no_commands() -> None:
    too_long = ContextLengthExceeded("too long")
    async with serving_http(lambda c: c.say(Failed(too_long))) as served, served.client() as client:
        told = (await client.post("/v1/completions", json={"prompt": "x"})).json()["error"]
        assert told["param"] == "prompt"
    wrong = UsageError("stop strings are too many")
    async with serving_http(lambda c: c.say(Failed(wrong))) as served, served.client() as client:
        told = (await client.post(CHAT, json=HELLO)).json()["error"]
        assert told["message"] == "stop strings are too many"
        told = (await client.post(CHAT, json=HELLO | {"logprobs": True, "top_logprobs": 21})).json()["error"]
        assert told["param"] == "top_logprobs"


async def test_what_fails_later_is_an_event_and_the_end() -> None:
    def broken(conversation: Conversation) -> None:
        conversation.say(Queued(0), token(0, "Good "), Failed(NoLeader("it was lost")))

    async with serving_http(broken) as served, served.client() as client:
        response = await client.post(CHAT, json=STREAM)
    assert response.status_code == 200
    *_, text, error = events_of(response.text)
    assert text["choices"][0]["delta"]["content"] == "Good "
    assert error["error"]["code"] == "no_leader"


async def test_whoever_waits_sees_the_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STREAM_COMMENT_SECONDS", 0.3)
    async with serving_http() as served, await served.connect() as stream:
        await stream.send_all(post(json.dumps(STREAM).encode()))
        conversation = await served.swarm.next()
        conversation.say(Queued(3))
        heard = await _heard(stream, b": place 3 in the queue\n\n")
        heard += await _heard(stream, b": the swarm is at it\n\n")
        conversation.say(Queued(0), token(0, "x"), done())
        heard += await _heard(stream, b"data: [DONE]\n\n")
    assert heard.startswith(b"HTTP/1.1 200")


async def _heard(stream: trio.SocketStream, end: bytes) -> bytes:
    """What comes, until this has come."""
    heard = bytearray()
    with trio.fail_after(PATIENCE_S):
        while end not in heard:
            part = await stream.receive_some()
            assert part, heard
            heard += part
    return bytes(heard)


# -- clients that leave, or do not read --------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["whole", "stream"])
@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_client_that_leaves_frees_the_leader_at_once(body: Any, how: str) -> None:
    async with serving_http() as served:
        stream = await served.connect()
        await stream.send_all(post(json.dumps(body).encode()))
        conversation = await served.swarm.next()
        conversation.say(Queued(0), token(0, "Good "))
        if body is STREAM:
            await stream.receive_some()
        if how == "reset":
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await stream.aclose()
        with trio.fail_after(PATIENCE_S):  # the answer itself goes on for ever
            await conversation.ended.wait()


async def test_requests_follow_each_other() -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving_http() as served, await served.connect() as stream:
        for _ in range(3):
            await stream.send_all(request)
            await _heard(stream, b"ok\n")
        await stream.send_all(request * 2)
        heard = await _heard(stream, b"ok\n")
        if heard.count(b"ok\n") < 2:
            await _heard(stream, b"ok\n")


async def test_a_client_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_SECONDS_MAX", 0.3)
    async with serving_http() as served, await served.connect() as stream:
        await stream.send_all(post(json.dumps(STREAM).encode()))
        conversation = await served.swarm.next()
        conversation.say(*(token(i, "x" * 100_000) for i in range(200)))
        with trio.fail_after(PATIENCE_S):
            await conversation.ended.wait()


async def test_a_daemon_that_stops_says_so_and_waits_for_nobody() -> None:
    async with serving_http() as served, await served.connect() as reader, await served.connect() as sleeper:
        for stream in (reader, sleeper):
            await stream.send_all(post(json.dumps(STREAM).encode()))
            await served.swarm.next()
        first, second = served.swarm.conversations
        first.say(token(0, "Good "))
        second.say(*(token(i, "x" * 100_000) for i in range(200)))
        heard = bytes(await reader.receive_some())
        await turns()
        served.stop.cancel()
        with trio.fail_after(limits.WRITE_SECONDS_MAX / 2):
            async for part in reader:
                heard += part
            await served.ended.wait()
    assert b"the daemon is stopping" in heard


# -- too much, too slowly ----------------------------------------------------------------------------------------------


async def test_a_body_that_is_too_large_is_refused_however_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_BYTES_MAX", 1000)

    async def chunks() -> Any:
        for _ in range(50):
            yield b"x" * 1000

    async with serving_http(answer) as served, served.client() as client:
        for content in (b"x" * 300_000, chunks()):
            response = await client.post(CHAT, content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        assert (await client.post(CHAT, json=HELLO)).status_code == 200, "and nothing is held of them"


@pytest.mark.parametrize("expect", [[], ["Expect: 100-continue"]])
async def test_a_body_that_will_be_too_large_is_refused_before_it_comes(expect: list[str]) -> None:
    size = limits.BODY_BYTES_MAX + 1
    async with serving_http(answer) as served, await served.connect() as stream:
        await stream.send_all(post(b"", CHAT, *expect).replace(b"Length: 0", b"Length: %d" % size))
        heard = await _heard(stream, b'"code":"body_too_large"}}')
        assert b"HTTP/1.1 413" in heard
        assert b"connection: close" in heard
        await stream.send_all(b"x" * size)  # a client that only looks afterwards has lost nothing
        with trio.fail_after(30):
            assert b"".join([part async for part in stream]) == b""


async def test_bodies_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODIES_BYTES_MAX", 1000)
    async with serving_http(answer) as served, await served.connect() as stream, served.client() as client:
        await stream.send_all(post(b"x" * 900)[:-50])  # it is read, and never whole
        await turns()
        response = await client.post(CHAT, content=b"x" * 200)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        await stream.aclose()
        await turns()
        assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_a_body_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS_MAX", 0.2)
    async with serving_http(answer) as served:
        assert b" 408 " in await served.raw(post(b"{}")[:-1])


async def test_headers_that_drip_or_never_come_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_SECONDS_MAX", 0.3)
    async with serving_http(answer) as served:
        for data in (b"", b"GET /healthz HTTP/1.1\r\nHost: loc"):
            assert await served.raw(data) == b""
        heard = await served.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")  # then it is idle
        assert heard.startswith(b"HTTP/1.1 200")
        async with await served.connect() as stream:
            with trio.fail_after(PATIENCE_S), pytest.raises(trio.BrokenResourceError):
                await _drip(stream, b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 1000)


async def _drip(stream: trio.SocketStream, data: bytes) -> None:
    for letter in data:
        await stream.send_all(bytes([letter]))
        await trio.sleep(0.02)


async def test_headers_that_are_too_long_are_refused() -> None:
    async with serving_http(answer) as served:
        heard = await served.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000)
    assert heard.startswith(b"HTTP/1.1 431")


async def test_too_many_connections_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONNECTIONS_MAX", 2)
    async with serving_http(answer) as served:
        first, second = await served.connect(), await served.connect()
        await turns()
        refused = await served.raw(b"")
        assert refused.startswith(b"HTTP/1.1 429")
        assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "overloaded"
        await first.aclose()
        await second.aclose()
        await turns()
        async with served.client() as client:
            assert (await client.get("/healthz")).status_code == 200


# -- malformed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello?\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),  # TLS
        (b"GET /healthz HTTP/1.1\r\n\r\n", b"400"),  # no host
        (post(b"", CHAT, "Content-Length: 5"), b"400"),
        (post(b"", CHAT, "Transfer-Encoding: gzip"), b"501"),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"400"),
        (b"GET /v1/%ff%fe HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"404"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"4"),
        (
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
            b"403",
        ),
        (
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings, close\r\n"
            b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
            b"200",
        ),
    ],
)
async def test_what_is_no_http_of_ours_ends_with_its_connection(data: bytes, status: bytes) -> None:
    async with serving_http(answer) as served:
        heard = await served.raw(data)
        assert heard.split(b" ", 2)[1].startswith(status), heard
        async with served.client() as client:
            assert (await client.get("/healthz")).text == "ok\n"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"messages": "\xff"}', "invalid_json"),
        (b"[]", "invalid_value"),
        (b'{"messages": 5}', "invalid_value"),
        (b'{"messages": [{"role": "user"}]}', "missing_required_parameter"),
        (b"{}", "missing_required_parameter"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": true}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "unsupported_parameter"),
        (b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"x": 1}}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "x"}}', "invalid_value"),
        (b'{"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}', "invalid_value"),
    ],
)
async def test_what_is_no_request_is_said(content: bytes, code: str) -> None:
    async with serving_http(answer) as served, served.client() as client:
        response = await client.post(CHAT, content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


async def test_other_paths_and_methods_are_told_as_json() -> None:
    async with serving_http(answer) as served, served.client() as client:
        for method, path, status in (("GET", "/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)):
            response = await client.request(method, path)
            assert response.status_code == status
            assert response.json()["error"]["code"] in ("not_found", "method_not_allowed")
        assert response.headers["allow"] == "GET, HEAD" or response.headers["allow"] == "HEAD, GET"


async def test_a_fault_of_ours_is_told_without_what_was_asked(capsys: pytest.CaptureFixture[str]) -> None:
    def break_down(conversation: Conversation) -> None:
        raise ValueError(f"no way to say {conversation.ask.messages}")

    logs.configure("debug", "json", sys.stdout)
    body = {"messages": [{"role": "user", "content": "quartz"}]}
    async with serving_http(break_down) as served, served.client() as client:
        for asked in (body, {**body, "stream": True}):
            response = await client.post(CHAT, json=asked)
            assert (response.status_code, response.json()["error"]["code"]) == (500, "internal")
    written = "".join(capsys.readouterr())
    assert '"error": "ValueError"' in written
    assert "break_down" in written, "where it was"
    assert "quartz" not in written
