"""Several clients of one daemon: each has a share, the many of one wait behind the few of another, and see where."""

from __future__ import annotations

import json
from typing import Any

import trio

from swarmnode.prompt_messages import Queued
from tests.api_tools import HELLO, Conversation, Served, done, post, serving_http, token
from tests.patience import PATIENCE_S, turns

KEYS = ("the-first-clients-key", "the-other-clients-key")
CHAT = "/v1/chat/completions"


def ask_as(key: str, **more: Any) -> bytes:
    return post(json.dumps({**HELLO, **more}).encode(), CHAT, f"Authorization: Bearer {key}")


def finish(conversation: Conversation) -> None:
    conversation.say(Queued(0), token(0, "x"), done())


async def connected(served: Served, request: bytes) -> trio.SocketStream:
    stream = await served.connect()
    await stream.send_all(request)
    await turns()
    return stream


async def test_the_many_of_one_key_wait_behind_the_one_of_another() -> None:
    async with serving_http(keys=KEYS, parallel=1) as served:
        many = [await connected(served, ask_as(KEYS[0], user=f"many {i}")) for i in range(3)]
        few = await connected(served, ask_as(KEYS[1], stream=True, max_tokens=7))
        heard = bytes(await few.receive_some())
        while b": place 1 in the queue" not in heard:
            heard += await few.receive_some()
        assert len(served.swarm.conversations) == 1, "one at a time"
        finish(served.swarm.conversations[0])
        with trio.fail_after(PATIENCE_S):
            assert b"200" in await many[0].receive_some()
            while len(served.swarm.conversations) < 2:  # noqa: ASYNC110 (nothing tells)
                await trio.sleep(0.01)
        assert served.swarm.conversations[1].ask.max_tokens == 7, "the other's turn"
        for stream in (*many, few):
            await stream.aclose()


async def test_whoever_leaves_the_queue_makes_room() -> None:
    async with serving_http(parallel=1, waiting_per_client=2) as served, served.client() as client:
        first, second = [await connected(served, post(json.dumps(HELLO).encode())) for _ in range(2)]
        refused = await client.post(CHAT, json=HELLO)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_answers")
        assert refused.headers["retry-after"]
        await second.aclose()
        await turns()
        third = await connected(served, post(json.dumps(HELLO).encode()))
        assert len(served.swarm.conversations) == 1
        await first.aclose()
        await turns()
        assert len(served.swarm.conversations) == 2
        finish(served.swarm.conversations[1])
        assert b"200" in await third.receive_some()
        await third.aclose()


async def test_answers_a_minute_are_counted_for_each_key() -> None:
    async with serving_http(finish, keys=KEYS, answers_per_minute=3) as served, served.client() as client:

        async def statuses(key: str, answers: list[int]) -> list[int]:
            headers = {"authorization": f"Bearer {key}"}
            got = [await client.post(CHAT, json={**HELLO, "n": n}, headers=headers) for n in answers]
            assert all(20 <= int(r.headers["retry-after"]) <= 40 for r in got if r.status_code == 429)
            return [response.status_code for response in got]

        assert await statuses(KEYS[0], [1, 2, 1, 2]) == [200, 200, 429, 429]
        assert await statuses(KEYS[1], [3]) == [200]
