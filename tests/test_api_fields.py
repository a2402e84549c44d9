"""The fields of a request: what each comes to in what the swarm is asked, and how a wrong one is told."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnode.limits import MAX_TOKENS_MAX
from swarmnode.prompt_messages import Ask
from tests.api_tools import HELLO, answer, serving_http

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "find", "say")]


async def asked(path: str = CHAT, **body: Any) -> Ask:
    async with serving_http(answer) as served, served.client() as client:
        response = await client.post(path, json={**(HELLO if path == CHAT else {}), **body})
        assert response.status_code == 200, response.text
        return served.swarm.conversations[0].ask


async def refused(**body: Any) -> tuple[str | None, str, str]:
    async with serving_http(answer) as served, served.client() as client:
        response = await client.post(CHAT, json={**HELLO, **body})
        assert (response.status_code, served.swarm.conversations) == (400, [])
        told = response.json()["error"]
        return told["param"], told["code"], told["message"]


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_more_tokens_than_any_context_holds_are_as_many_as_it_holds(field: str) -> None:
    assert (await asked(**{field: 10**12})).max_tokens == MAX_TOKENS_MAX
    assert (await asked("/v1/completions", prompt="x", max_tokens=10**12)).max_tokens == MAX_TOKENS_MAX


async def test_a_choice_of_tools_may_leave_the_model_some() -> None:
    wanted = {"mode": "required", "tools": [TOOLS[0], TOOLS[2]]}
    ask = await asked(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": wanted})
    assert ([tool["function"]["name"] for tool in ask.tools], ask.tool_choice) == (["add", "say"], "required")
    for wrong in ({}, {"mode": "auto"}, {"mode": "all", "tools": TOOLS}, {"mode": "auto", "tools": [{"name": "add"}]}):
        param, code, message = await refused(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": wrong})
        assert (param, code) == ("tool_choice", "invalid_value"), message


async def test_an_earlier_refusal_is_a_part_of_the_conversation() -> None:
    for said in ({"content": None, "refusal": "I can't."}, {"content": [{"type": "refusal", "refusal": "I can't."}]}):
        ask = await asked(messages=[*HELLO["messages"], {"role": "assistant", **said}])
        assert ask.messages[-1]["content"] == "I can't."


async def test_no_alternatives_need_no_logprobs() -> None:
    assert (await asked(top_logprobs=0)).logprobs is None


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"stop": 5}, "stop", "stop should be a text or should be a list"),
        ({"stop": ["a", None]}, "stop[1]", "stop[1] should be a text"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens should be a whole number"),
        ({"messages": []}, "messages", "messages should have at least 1 item, not 0"),
        ({"messages": user(None)}, "messages[0].content", "messages[0].content is required"),
        ({"messages": user(5)}, "messages[0].content", "messages[0].content should be a text or should be a list"),
        ({"messages": user([{"type": "text"}])}, "messages[0].content[0].text", " is required"),
        ({"messages": user([{"text": "a"}])}, "messages[0].content[0].type", " is required"),
        ({"messages": user([{"type": "input_audio"}])}, "messages[0].content[0]", "is of type 'input_audio'"),
        ({"response_format": "json"}, "response_format", "should be an object"),
        ({"logit_bias": {"5": "much"}}, "logit_bias", "should be a number"),
    ],
)
async def test_what_is_wrong_is_told_by_its_place(body: dict[str, Any], param: str, message: str) -> None:
    found, _, told = await refused(**body)
    assert found == param
    assert message in told


async def test_where_json_breaks_off_is_told_and_nothing_of_it() -> None:
    async with serving_http(answer) as served, served.client() as client:
        response = await client.post(CHAT, content=b'{"messages": [{"role": "user", "content": quartz}]}')
        told = response.json()["error"]
        assert (response.status_code, told["code"]) == (400, "invalid_json")
        assert "line 1 column" in told["message"]
        assert "quartz" not in told["message"]
        response = await client.post(CHAT, content=b"\x1f\x8b\x08", headers={"content-encoding": "gzip"})
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
        response = await client.post("/chat/completions", json=HELLO)
        assert response.status_code == 404
        assert CHAT in response.json()["error"]["message"]
