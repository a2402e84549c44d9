"""What a request may ask of its answer, on a real (if tiny) model: grammars, schemas, logprobs, choices, tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from backends.llama import LlamaModel, LlamaSettings
from capabilities.errors import UsageError
from scheduler.answer import Vocabulary
from scheduler.batching import Batcher
from scheduler.sampling import SamplingParams
from swarmnode.leader.engine import DecodeEngine
from swarmnode.leader.prompts import PromptService
from swarmnode.prompt_messages import Ask, Done, Failed, Reply, Token
from swarmnode.undivided import Undivided
from tests.expert_models import tiny_file
from tests.prompt_leaders import settled_at_once
from tests.tool_templates import HERMES_TEMPLATE, LLAMA_TEMPLATE, MISTRAL_TEMPLATE

CONTEXT = 1_200


class Nobody:
    """An executor for a model that is whole."""

    routings = 0
    mixed = False

    def begin_step(self, requests: Sequence[str]) -> None:
        pass


@asynccontextmanager
async def leader(template: str | None = None) -> AsyncIterator[PromptService]:
    settings = LlamaSettings(context_tokens=CONTEXT, sequences=2, batch_tokens=64)
    with LlamaModel(tiny_file("olmoe", "f32"), settings) as model:
        v = model.vocabulary
        v.chat_template = template or v.chat_template
        batcher = Batcher(2, model.context_tokens, 64, 8, Vocabulary(v.n_vocab, v.piece, v.is_end))
        engine = DecodeEngine(model, Nobody(), batcher)  # type: ignore[arg-type]
        service = PromptService(engine, v, CONTEXT, 60.0, lambda: None, lambda _: None, lambda _: None, settled_at_once)
        engine.start()
        try:
            yield service
        finally:
            assert await engine.stop()


WARM = SamplingParams(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, frequency_penalty=0.3)


async def replies(service: PromptService, params: SamplingParams = WARM, **fields: Any) -> list[Reply]:
    text = {} if "messages" in fields else {"prompt": "Say something."}
    ask = Ask("req-1", params, **{**text, "max_tokens": 60, **fields})
    async with service.answer(ask, "somebody") as found:
        return [reply async for reply in found]


async def answer(service: PromptService, params: SamplingParams = WARM, **fields: Any) -> tuple[list[Token], str, Done]:
    found = await replies(service, params, **fields)
    done = found[-1]
    assert isinstance(done, Done), done
    tokens = [reply for reply in found if isinstance(reply, Token)]
    return tokens, "".join(token.text for token in tokens) + done.text, done


async def error(service: PromptService, **fields: Any) -> UsageError:
    (failed,) = await replies(service, **fields)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, UsageError)
    return failed.error


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 14}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize("params", [WARM, SamplingParams(temperature=0)], ids=["sampled", "greedy"])
async def test_a_schema_is_obeyed_and_a_new_leader_goes_on_under_it(params: SamplingParams) -> None:
    async with leader() as service:
        whole, text, done = await answer(service, params, json_schema=SCHEMA)
        value = json.loads(text)
        assert value["city"] in ("Oslo", "Rome")
        assert 1 <= value["days"] <= 14
        assert done.finish_reason == "stop"
        ids = tuple(token.token for token in whole)
        for at in (1, len(ids) // 2, len(ids)):
            rest, _, end = await answer(service, params, json_schema=SCHEMA, generated=ids[:at], attempt=1)
            assert [token.token for token in rest] == list(ids[at:])
            assert (end.finish_reason, end.usage) == (done.finish_reason, done.usage)
        short, _, cut = await answer(service, params, json_schema=SCHEMA, max_tokens=3)
        assert ([token.token for token in short], cut.finish_reason) == (list(ids[:3]), "length")
        wrong = await error(service, json_schema=SCHEMA, generated=(5,))
        assert "so far" in wrong.message


async def test_a_grammar_is_obeyed() -> None:
    async with leader() as service:
        seen = set()
        for seed in range(6):
            params = SamplingParams(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
            _, text, done = await answer(service, params, grammar='root ::= "yes" | "no" | "perhaps"')
            assert done.finish_reason == "stop"
            seen.add(text)
        assert seen <= {"yes", "no", "perhaps"}
        assert len(seen) > 1
        _, text, _ = await answer(service, grammar="root ::= [a-c]{5}", stop=("zz",))
        assert len(text) == 5
        assert "root" in (await error(service, grammar='rule ::= "a"')).message
        assert "ignored" in (await error(service, grammar='root ::= "a"', ignore_eos=True)).message
        assert (await error(service, json_schema="{")).message == "the JSON schema is no JSON"


async def test_logprobs_are_told_with_bytes_and_alternatives() -> None:
    async with leader() as service:
        plain, _, _ = await answer(service)
        assert all(token.logprob is None and not token.top for token in plain)
        tokens, text, _ = await answer(service, logprobs=5, max_tokens=20)
        assert [token.token for token in tokens] == [token.token for token in plain[: len(tokens)]]
        shown = b"".join(token.bytes for token in tokens).decode(errors="replace")
        assert text.rstrip("\ufffd") == shown.rstrip("\ufffd")
        for token in tokens:
            assert token.logprob is not None
            logprobs = [logprob for _, logprob, _ in token.top]
            assert len(logprobs) == 5
            assert logprobs == sorted(logprobs, reverse=True)
            assert token.logprob <= logprobs[0]
            assert sum(np.exp(logprobs)) <= 1
            for other, logprob, piece in token.top:
                assert piece
                if other == token.token:
                    assert (logprob, piece) == (token.logprob, token.bytes)
        (bare, *_), _, _ = await answer(service, logprobs=0)
        assert (bare.top, bare.logprob) == ((), tokens[0].logprob)


def test_llama_cpp_alone_answers_under_the_same_rules() -> None:
    """What `swarmctl verify` compares with."""
    whole = Undivided(tiny_file("olmoe", "f32"), context_tokens=CONTEXT, batch_tokens=64)
    asks = [Ask("req-1", WARM, prompt="Say something.", json_schema=SCHEMA, choice=choice) for choice in (0, 1, 2)]
    texts = [b"".join(map(whole.piece, whole.answer(ask).tokens)) for ask in asks]
    whole.close()
    assert all(json.loads(text)["city"] in ("Oslo", "Rome") for text in texts)
    assert len(set(texts)) > 1


async def test_choices_of_one_prompt_differ_and_each_is_always_the_same() -> None:
    async with leader() as service:
        texts = [(await answer(service, choice=choice))[1] for choice in (0, 1, 2, 0, 1, 2)]
        assert texts[:3] == texts[3:]
        assert len(set(texts)) == 3


async def test_bias_bans_and_forces() -> None:
    async with leader() as service:
        force = SamplingParams(temperature=0, logit_bias={ord("q"): 100.0})
        assert (await answer(service, force, max_tokens=4))[1] == "qqqq"
        ban = SamplingParams(temperature=0, logit_bias={ord("q"): -100.0, ord("z"): 100.0})
        assert (await answer(service, ban, max_tokens=4))[1] == "zzzz"
        assert "outside" in (await error(service, params=SamplingParams(logit_bias={320: 1.0}))).message


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"City": {"enum": ["Oslo", "Rome"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
QUESTION = ({"role": "user", "content": "How is it?"},)
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("template", "begin"),
    [(HERMES_TEMPLATE, "<tool_call>"), (MISTRAL_TEMPLATE, "[TOOL_CALLS]"), (LLAMA_TEMPLATE, "{")],
    ids=["hermes", "mistral", "llama"],
)
async def test_a_tool_that_must_be_called_is_called(template: str, begin: str) -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "tools": (WEATHER, CLOCK), "max_tokens": 400}
    async with leader(template) as service:
        whole, text, done = await answer(service, tool_choice=NAMED, **fields)
        (call,) = done.tool_calls
        assert (text, done.finish_reason, call.name) == ("", "tool_calls", "weather")
        assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
        ids = tuple(token.token for token in whole)
        _, _, end = await answer(service, tool_choice=NAMED, generated=ids[:9], attempt=1, **fields)
        assert [(each.name, each.arguments) for each in end.tool_calls] == [(call.name, call.arguments)]
        _, text, done = await answer(service, tool_choice="required", **fields)
        assert done.tool_calls or text.startswith(begin)  # or it is cut in the middle of a call
        assert {each.name for each in done.tool_calls} <= {"weather", "clock"}
        _, text, cut = await answer(service, tool_choice=NAMED, **{**fields, "max_tokens": 12})
        assert (cut.tool_calls, cut.finish_reason, text[:1]) == ((), "length", begin[:1])


async def test_tools_that_may_be_called() -> None:
    fields: dict[str, Any] = {"messages": QUESTION, "tools": (WEATHER, CLOCK)}
    async with leader(HERMES_TEMPLATE) as service:
        with_tools, _, done = await answer(service, **fields)
        assert done.tool_calls == ()
        without, _, _ = await answer(service, **{**fields, "tool_choice": "none"})
        plain, _, _ = await answer(service, messages=QUESTION)
        assert without == plain != with_tools
        _, text, done = await answer(service, json_schema=SCHEMA, **{**fields, "max_tokens": 200})
        assert done.tool_calls or json.loads(text)["city"]
        assert "not both" in (await error(service, grammar='root ::= "a"', **fields)).message
    async with leader() as service:
        assert "no tools" in (await error(service, **fields)).message
