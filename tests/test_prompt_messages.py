"""Messages of the prompt protocol: what goes in comes out, and no bytes of a peer raise anything but a PeerMistake."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import ExpertsUnavailable, PeerMistake, UsageError
from scheduler.requests import Timings, Usage
from scheduler.sampling import SamplingParams
from scheduler.tool_calls import ToolCall
from swarmnode import limits
from swarmnode.chat_messages import chat
from swarmnode.prompt_frames import decode_ask, decode_reply, encode_ask, encode_reply
from swarmnode.prompt_messages import (
    Alive,
    Ask,
    Done,
    Failed,
    Queued,
    Reply,
    Token,
    new_request_id,
    new_seed,
)
from swarmnode.wire import Frame, encode_frame, split_frame

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1_000_000),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
)
NAME = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True)
TOOLS = st.lists(NAME, max_size=3, unique=True).map(
    lambda names: tuple({"type": "function", "function": {"name": name, "parameters": {"a": [1]}}} for name in names)
)
CALL = st.builds(lambda name, text: {"id": name, "function": {"name": name, "arguments": text}}, NAME, TEXT)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT},
    optional={"name": TEXT, "tool_call_id": TEXT},
) | st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | TEXT, "tool_calls": st.lists(CALL, min_size=1, max_size=2)}
)
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=4)
FORM = st.fixed_dictionaries({}, optional={"grammar": TEXT}) | st.fixed_dictionaries({}, optional={"json_schema": TEXT})
ASKS = st.builds(
    lambda text, tools, form, **rest: Ask(
        **({"prompt": text} if isinstance(text, str) else {"messages": tuple(text), "tools": tools}), **form, **rest
    ),
    TEXT | MESSAGES,
    TOOLS,
    FORM,
    request_id=st.from_regex(r"[0-9A-Za-z_.:-]{1,64}", fullmatch=True),
    params=PARAMS,
    max_tokens=st.none() | st.integers(0, limits.MAX_TOKENS_MAX),
    stop=st.lists(TEXT.filter(bool), max_size=16).map(tuple),
    deadline_s=st.none() | st.floats(0.001, 86_400),
    ignore_eos=st.booleans(),
    generated=st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple),
    attempt=st.integers(0, 2**31),
    choice=st.integers(0, 2**32 - 1),
    logprobs=st.none() | st.integers(0, 20),
    tool_choice=st.sampled_from(["none", "auto"]),
)
COUNT = st.integers(0, 2**31)
SECONDS = st.floats(0, 1e9)
LOGPROB = st.floats(-1e9, 0)
PIECE = st.binary(max_size=limits.TOKEN_BYTES_MAX)
REPLIES = st.one_of(
    st.builds(Queued, COUNT),
    st.builds(Token, COUNT, COUNT, TEXT),
    st.builds(
        Token, COUNT, COUNT, TEXT, LOGPROB, st.lists(st.tuples(COUNT, LOGPROB, PIECE), max_size=20).map(tuple), PIECE
    ),
    st.just(Alive()),
    st.builds(
        Done, st.sampled_from(["stop", "length"]), TEXT, st.builds(Usage, COUNT, COUNT, COUNT),
        st.builds(Timings, SECONDS, SECONDS, SECONDS), st.booleans(),
        tool_calls=st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=3).map(tuple),
    ),
)  # fmt: skip


def frame(data: bytes, allowed: limits.FrameLimits) -> Frame:
    found, end = split_frame(data, allowed)
    assert end == len(data)
    return found


@given(ASKS)
def test_a_request_comes_out_as_it_went_in(ask: Ask) -> None:
    assert decode_ask(frame(encode_ask(ask), limits.PROMPT_REQUEST)) == ask


@given(REPLIES)
def test_a_reply_comes_out_as_it_went_in(reply: Reply) -> None:
    assert decode_reply(frame(encode_reply(reply), limits.PROMPT_REPLY)) == reply


def test_an_error_keeps_what_it_names() -> None:
    error = ExpertsUnavailable("gone", layer=3, experts=[1, 2], peer="12D3", cause="timeout", request_id="req-1")
    reply = decode_reply(frame(encode_reply(Failed(error)), limits.PROMPT_REPLY))
    assert isinstance(reply, Failed)
    assert reply.error.to_json() == error.to_json()


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
HEADERS = VALUES | st.fixed_dictionaries(
    {},
    optional={
        "kind": st.sampled_from(["ask", "queued", "token", "done", "error"]) | VALUES, "id": VALUES, "i": VALUES,
        "t": VALUES, "position": VALUES, "finish_reason": VALUES, "prompt_tokens": VALUES, "completion_tokens": VALUES,
        "queue_s": VALUES, "prefill_s": VALUES, "decode_s": VALUES, "error": VALUES, "top_k": VALUES, "seed": VALUES,
        "temperature": VALUES, "top_p": VALUES, "min_p": VALUES, "frequency_penalty": VALUES,
        "presence_penalty": VALUES, "max_tokens": VALUES, "deadline_s": VALUES, "ignore_eos": VALUES,
        "generated": st.integers(-1, 20) | VALUES, "attempt": VALUES, "options": VALUES, "choice": VALUES,
        "logprobs": VALUES, "logprob": VALUES, "bytes": VALUES, "top_t": VALUES, "top_logprob": VALUES,
        "top_bytes": VALUES, "cached_tokens": VALUES, "calls_bytes": VALUES,
    },
)  # fmt: skip


@given(HEADERS, st.binary(max_size=60) | TEXT.map(str.encode))
def test_no_header_and_no_payload_surprises(header: Any, payload: bytes) -> None:
    hostile = Frame(msgpack.unpackb(msgpack.packb(header), strict_map_key=False), payload)
    with contextlib.suppress(PeerMistake):
        decode_reply(hostile)
    with contextlib.suppress(PeerMistake, UsageError):
        decode_ask(hostile)


GOOD = {
    "kind": "ask", "id": "req-1", "top_k": 0, "seed": 1, "temperature": 0.0, "top_p": 1.0, "min_p": 0.0,
    "frequency_penalty": 0.0, "presence_penalty": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff", b"null", b"[]", b'"x"', b"[" * 200_000, b'{"prompt":1}', b'{"messages":{"a":1}}',
     b'{"messages":[1]}', b'{"prompt":"x","stop":"y"}', b'{"prompt":"x","stop":[1]}', b'{"prompt":"x","grammar":1}',
     b'{"prompt":"x","json_schema":{}}', b'{"prompt":"x","logit_bias":[1]}', b'{"prompt":"x","logit_bias":{"-1":1}}',
     b'{"prompt":"x","logit_bias":{"%b":1}}' % (b"1" * 5000), b'{"prompt":"x","tools":{"a":1}}',
     b'{"prompt":"x","tool_choice":1}'],
    ids=lambda payload: repr(payload[:20]),
)  # fmt: skip
def test_texts_that_are_none(payload: bytes) -> None:
    with pytest.raises(PeerMistake):
        decode_ask(Frame(GOOD, payload))


@pytest.mark.parametrize(
    "payload",
    [b"{}", b'{"prompt":"x","messages":[{"role":"user","content":"y"}]}', b'{"messages":[{"role":"user"}]}',
     b'{"messages":[{"role":"root","content":"y"}]}', b'{"messages":[{"role":"user","content":5}]}',
     b'{"prompt":"x","logit_bias":{"1":"a"}}', b'{"prompt":"x","logit_bias":{"1":101}}',
     b'{"prompt":"x","grammar":"a","json_schema":"{}"}', b'{"prompt":"x","grammar":"%b"}' % (b"a" * (1 << 17)),
     b'{"prompt":"x","stop":[""]}', b'{"prompt":"x","stop":["%b"]}' % (b"y" * 513),
     b'{"messages":[%b{"role":"user","content":""}]}' % (b'{"role":"user","content":""},' * 1024)],
    ids=lambda payload: repr(payload[:40]),
)  # fmt: skip
def test_requests_that_cannot_be_served(payload: bytes) -> None:
    with pytest.raises(UsageError):
        decode_ask(Frame(GOOD, payload))


@pytest.mark.parametrize(
    ("count", "payload"),
    [(1, b'{"prompt":"x"}'), (9, b""), (1, b'{"prompt":"x"}\xff\xff\xff\xff'), (-1, b'{"prompt":"x"}'),
     (limits.MAX_TOKENS_MAX + 1, b'{"prompt":"x"}'), (None, b'{"prompt":"x"}\x00\x00\x00\x00')],
)  # fmt: skip
def test_answers_so_far_that_are_none(count: int | None, payload: bytes) -> None:
    with pytest.raises(PeerMistake):
        decode_ask(Frame({**GOOD, "generated": count}, payload))


ONE = {"type": "function", "function": {"name": "one"}}


@pytest.mark.parametrize(
    "fields",
    [{"tools": ({},)}, {"tools": ({"type": "function"},)}, {"tools": ({**ONE, "type": "web"},)},
     {"tools": (ONE, ONE)}, {"tools": ({"type": "function", "function": {"name": "a b"}},)},
     {"tools": ({"type": "function", "function": {"name": "a", "parameters": []}},)},
     {"tools": ({"type": "function", "function": {"name": "a", "description": 1}},)},
     {"tools": ({**ONE, "x": "y" * limits.TOOLS_BYTES_MAX},)},
     {"tools": tuple({"type": "function", "function": {"name": f"f{i}"}} for i in range(limits.TOOLS_MAX + 1))},
     {"tool_choice": "required"}, {"tool_choice": "often"}, {"tool_choice": {"type": "function"}},
     {"tool_choice": {"type": "function", "function": {"name": "one"}}},
     {"tools": (ONE,), "tool_choice": {"type": "function", "function": {"name": "two"}}}, {"logprobs": 21}],
    ids=lambda fields: repr(fields)[:40],
)  # fmt: skip
def test_tools_and_choices_that_cannot_be_meant(fields: dict[str, Any]) -> None:
    Ask("req-1", SamplingParams(), messages=chat("q", None), tools=(ONE,), tool_choice=ONE)
    with pytest.raises(UsageError):
        Ask("req-1", SamplingParams(), messages=chat("q", None), **fields)


@pytest.mark.parametrize(
    "message",
    [{"role": "user", "content": None}, {"role": "user", "content": "a", "tool_calls": []}, {"role": "user"},
     {"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "tool", "content": "a", "tool_call_id": 1},
     {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
     {"role": "assistant", "content": None, "tool_calls": [{"x": 1, "function": {"name": "f", "arguments": ""}}]},
     {"role": "user", "content": "a", "picture": "b"}],
    ids=lambda message: repr(message)[:60],
)  # fmt: skip
def test_messages_that_are_none(message: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Ask("req-1", SamplingParams(), messages=(message,))


def test_older_peers_are_understood() -> None:
    """Their frames, as they made them."""
    ask = decode_ask(Frame(GOOD, b'{"prompt": "x", "stop": []}'))
    assert (ask.choice, ask.logprobs, ask.grammar, ask.tools, ask.options) == (0, None, None, (), frozenset())
    assert decode_reply(Frame({"kind": "queued", "position": 3}, b"")) == Queued(3, frozenset())
    assert decode_reply(Frame({"kind": "token", "i": 0, "t": 5}, b"a")) == Token(0, 5, "a")
    times = {"queue_s": 1.0, "prefill_s": 2.0, "decode_s": 3.0}
    done = {"kind": "done", "finish_reason": "stop", "prompt_tokens": 4, "completion_tokens": 5, **times}
    assert decode_reply(Frame(done, b"!")) == Done("stop", "!", Usage(4, 5), Timings(1.0, 2.0, 3.0))


def test_a_token_with_the_longest_alternatives_fits_its_frame() -> None:
    piece = bytes(2 * limits.TOKEN_BYTES_MAX)
    token = Token(2**31, 2**31, "x", -1.5, ((2**31, -1e-300, piece),) * limits.TOP_LOGPROBS_MAX, piece)
    came = decode_reply(frame(encode_reply(token), limits.PROMPT_REPLY))
    assert isinstance(came, Token)
    assert (came.bytes, came.top[19][2]) == (bytes(limits.TOKEN_BYTES_MAX),) * 2


def test_text_and_tokens_have_limits_of_their_own() -> None:
    text = b'{"prompt":"%b"}' % (b"x" * limits.REQUEST_TEXT_BYTES_MAX)
    with pytest.raises(PeerMistake):
        decode_ask(Frame({**GOOD, "generated": 1}, text + bytes(4)))
    with pytest.raises(UsageError, match="tokens"):
        Ask("req-1", SamplingParams(), prompt="x", generated=(0,) * (limits.MAX_TOKENS_MAX + 1))
    ask = Ask("req-1", SamplingParams(), prompt="x", generated=(2**31 - 1,) * limits.MAX_TOKENS_MAX)
    assert decode_ask(frame(encode_ask(ask), limits.PROMPT_REQUEST)) == ask


def test_surrogates_do_not_reach_the_wire() -> None:
    """A JSON text may hold half a character; what leaves is UTF-8 all the same."""
    ask = decode_ask(Frame(GOOD, b'{"prompt":"a\\ud800b"}'))
    assert decode_ask(frame(encode_ask(ask), limits.PROMPT_REQUEST)).prompt == "a?b"


def test_a_text_beyond_the_limit_is_refused_here() -> None:
    with pytest.raises(UsageError, match="bytes of text"):
        encode_ask(Ask("req-1", SamplingParams(), prompt="é" * (limits.REQUEST_TEXT_BYTES_MAX // 2)))


def test_frames_of_the_largest_requests_fit_their_limits() -> None:
    ask = Ask("r" * 64, SamplingParams(seed=2**64 - 1), prompt="x" * (limits.REQUEST_TEXT_BYTES_MAX - 40))
    frame(encode_ask(ask), limits.PROMPT_REQUEST)
    error = ExpertsUnavailable("m" * 5000, hint="h" * 5000, layer=1, experts=list(range(5000)), peer="p" * 500)
    frame(encode_reply(Failed(error)), limits.PROMPT_REPLY)


def test_names_for_requests() -> None:
    assert chat("q", None) == ({"role": "user", "content": "q"},)
    assert [message["role"] for message in chat("q", "s")] == ["system", "user"]
    assert len({new_request_id() for _ in range(100)}) == len({new_seed() for _ in range(100)}) == 100
    assert decode_ask(Frame({**GOOD, "id": new_request_id(), "seed": new_seed()}, b'{"prompt":"x"}')).prompt == "x"
    assert encode_frame(GOOD)  # the header alone is within a frame
    assert "x" not in repr(Ask("req-1", SamplingParams(), prompt="xxxx", stop=("xx",))).replace("max", "")
