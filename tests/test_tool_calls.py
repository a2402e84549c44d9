"""Calls of tools: read out of an answer's text, shown to models by their templates, and forced where one insists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.chat_template import ChatTemplate
from capabilities.errors import UsageError
from capabilities.tool_form import HERMES, LLAMA, MISTRAL, ToolForm, ToolUse
from scheduler.answer import Answer, Vocabulary
from scheduler.requests import Request
from scheduler.sampling import SamplingParams
from scheduler.tool_calls import CALLS_MAX, ToolCall, ToolCallReader, call_id
from tests.tool_templates import HERMES_TEMPLATE, LLAMA_TEMPLATE, MISTRAL_TEMPLATE, XML_TEMPLATE

NAMES = frozenset({"weather", "add"})
W = ("weather", '{"city": "Oslo"}')
A = ("add", '{"a": 1, "b": [2]}')
HERMES_W = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES_A = '<tool_call>{"name":"add","arguments":{"a":1,"b":[2]}}</tool_call>'


def read(form: ToolForm, *pieces: str) -> tuple[str, str, list[tuple[str, str]]]:
    """What was shown, what was left at the end, and the calls."""
    reader = ToolCallReader(ToolUse(form, NAMES))
    shown = "".join(map(reader.feed, pieces))
    return shown, *reader.finish()


@pytest.mark.parametrize(
    ("form", "text", "shown", "rest", "calls"),
    [
        (HERMES, HERMES_W, "", "", [W]),
        (HERMES, f"Let me see.\n{HERMES_W}\n{HERMES_A}", "Let me see.\n", "", [W, A]),
        (HERMES, HERMES_A.removesuffix("call>"), "", "", [A]),
        (HERMES, f"{HERMES_A} Done.", "", "Done.", [A]),
        (HERMES, HERMES_W.removesuffix("\n</tool_call>"), "", "", [W]),  # the end token came first
        (HERMES, '<tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call>', "", "", [("add", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name":"add"}</tool_call>', "", "", [("add", "{}")]),
        (HERMES, '<tool_call>{"name":"weather","arguments":{"city":"</tool_call>"}}</tool_call>', "", "",
         [("weather", '{"city": "</tool_call>"}')]),
        (MISTRAL, 'Hm. [TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": [2]}}, '
         '{"name": "weather", "arguments": {"city": "Oslo"}, "id": "123456789"}]', "Hm. ", "", [A, W]),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2]}', "", "", [A]),
        (MISTRAL, '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": [2]}[TOOL_CALLS]weather{"city": "Oslo"}',
         "", "", [A, W]),
        (LLAMA, '{"name": "weather", "parameters": {"city": "Oslo"}}', "", "", [W]),
        (LLAMA, '\n <|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', "\n ", "", [W]),
        (LLAMA, '\n{"name": "weather", "parameters": {"city": "Oslo"}}; {"name": "add", "parameters": {}}', "", "",
         [W, ("add", "{}")]),
    ],
)  # fmt: skip
def test_calls_are_read(form: ToolForm, text: str, shown: str, rest: str, calls: list[tuple[str, str]]) -> None:
    assert read(form, text) == (shown, rest, calls)
    assert read(form, *text) == (shown, rest, calls)  # and wherever tokens cut it


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "Just text, 1 < 2."), (HERMES, "<tool_call"), (HERMES, "<tool_call>no JSON</tool_call>"),
        (HERMES, '<tool_call>{"name":"unknown","arguments":{}}</tool_call>'), (HERMES, "<tool_call>[]</tool_call>"),
        (HERMES, '<tool_call>{"name":"add","arguments":[1]}</tool_call>'), (HERMES, HERMES_W[:-30]),
        (HERMES, HERMES_W + "<tool_call>{"),
        (HERMES, "<tool_call>" + "[" * 100_000), (HERMES, '<tool_call>{"name":[]}'),
        (HERMES, HERMES_A * (CALLS_MAX + 1)), (HERMES, '<tool_call>{"name":"add","arguments":"no JSON"}'),
        (MISTRAL, "[TOOL_CALLS]"), (MISTRAL, "[TOOL_CALLS] 5"), (MISTRAL, '[TOOL_CALLS][{"name": "add"}] and'),
        (MISTRAL, "[TOOL_CALLS]add[ARGS]"), (MISTRAL, "[TOOL_CALLS]{}"), (MISTRAL, "array[TOOL"),
        (LLAMA, '{"name": "weather"'), (LLAMA, '{"city": "Oslo"}'), (LLAMA, "{}"), (LLAMA, "   "),
        (LLAMA, "<|python_tag|>x = 1"),
        (LLAMA, 'Here: {"name": "weather", "parameters": {}}'), (LLAMA, '{"name": "add", "parameters": {}} and so on'),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_what_is_no_call_is_text(form: ToolForm, text: str) -> None:
    for pieces in ([text], list(text[:5_000])) if len(text) < 5_000 else ([text],):
        shown, rest, calls = read(form, *pieces)
        assert (shown + rest, calls) == (text, [])


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    '{"name": "add", "arguments": {}}',
    "<",
    "[",
    " ",
]


@given(
    st.sampled_from([HERMES, MISTRAL, LLAMA]),
    st.lists(st.sampled_from(MARKS) | st.text(max_size=3), max_size=12),
    st.data(),
)
def test_where_tokens_cut_a_text_changes_nothing(form: ToolForm, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(form, text)
    assert read(form, *pieces) == whole
    if not whole[2]:
        assert whole[0] + whole[1] == text


def test_call_ids_are_nine_letters_and_digits_and_differ() -> None:
    ids = {call_id(request, choice, n) for request in ("a", "b") for choice in (0, 1) for n in (0, 1)}
    assert len(ids) == 8
    assert all(len(each) == 9 and each.isalnum() for each in ids)


VOCABULARY = Vocabulary(300, lambda token: bytes([token]) if token < 256 else b"", lambda token: token == 299)


@pytest.mark.parametrize("reason", ["tool_calls", "length"])
@pytest.mark.parametrize("known", range(0, 30, 7))
def test_an_answer_that_calls_a_tool_ends_with_the_call(reason: str, known: int) -> None:
    """Also where another leader began it, and where the mark is a control token, which is no text otherwise."""
    script = [*b"Well. ", 290, *b'[{"name": "add", "arguments": {"a": 1}}]', 299]
    use = ToolUse(MISTRAL, NAMES, {290: b"[TOOL_CALLS]"})
    greedy = SamplingParams(temperature=0)
    n = len(script) if reason == "tool_calls" else 20
    request = Request("r", (1,), greedy, n, tools=use, generated=tuple(script[: min(known, n - 1)]))
    answer = Answer(request, 100, VOCABULARY, 0.0)
    text = ""
    while answer.ended is None:
        logits = np.zeros(300, np.float32)
        logits[script[answer.completion]] = 1
        effect = answer.take(logits, 1.0)
        text += effect.text if effect else ""
    end = answer.finish(2.0)
    assert end.finish_reason == reason
    assert text == "Well. "[known:]
    if reason == "length":
        assert (end.text, end.tool_calls) == ('[TOOL_CALLS][{"name": "add"'[: 12 + 20 - 7], ())
    else:
        assert (end.text, end.tool_calls) == ("", (ToolCall(call_id("r", 0, 0), "add", '{"a": 1}'),))


# -- templates --------------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "weather"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
]


@pytest.mark.parametrize(
    ("source", "form", "call"),
    [(HERMES_TEMPLATE, HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'),
     (MISTRAL_TEMPLATE, MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]'),
     (LLAMA_TEMPLATE, LLAMA, '{"name": "weather", "parameters": {"city": "Oslo"}}')],
)  # fmt: skip
def test_a_template_is_told_of_tools_and_calls(source: str, form: ToolForm, call: str) -> None:
    template = ChatTemplate(source, "<s>", "</s>")
    assert template.tool_form is form
    prompt = template.render(CONVERSATION, [TOOL])
    assert call in prompt
    assert '"description": "", "parameters": {"type": "object", "properties": {}}' in prompt
    assert ("rain" in prompt, "None" in prompt) == (True, False)
    assert "description" not in template.render(CONVERSATION)
    broken = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{no"}}]}]
    assert "{no" in template.render(broken)


@pytest.mark.parametrize("source", ["{{ messages[0].content }}", XML_TEMPLATE, "{% set x = tools %}<tool_call>"])
def test_a_template_without_a_known_form_of_tools_says_so(source: str) -> None:
    template = ChatTemplate(source, "<s>", "</s>")
    assert template.render([{"role": "user", "content": "Hi"}])
    with pytest.raises(UsageError, match="no tools"):
        template.render([{"role": "user", "content": "Hi"}], [TOOL])
