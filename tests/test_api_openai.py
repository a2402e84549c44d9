"""OpenAI's own packages for Python and Node, untouched, against real daemons: a leader, a worker, one in no swarm."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from backends import byte_vocabulary
from swarmnode.local_swarm import STOP_SECONDS_MAX, LocalNode
from swarmnode.paths import shared_cache_folder
from tests.documents import DOCUMENTS
from tests.patience import PATIENCE_S
from tests.swarm_tools import Served, serving, wait_until
from tests.tool_templates import HERMES_TEMPLATE

MODEL = "olmoe"
API = {"api": {"listen": "127.0.0.1:0"}}
FREE: Any = {"extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_vocabulary, "CHAT_TEMPLATE", HERMES_TEMPLATE)
        with serving(tmp_path_factory.mktemp("served"), workers=1, each=API, parallel=4, queue_limit=2) as swarm:
            yield swarm


def client_of(node: LocalNode, **options: Any) -> OpenAI:
    url = node.status()["http"]["url"]
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    """Of the worker: what it answers came from the leader."""
    with client_of(served.workers[0]) as made:
        yield made


@pytest.fixture(scope="module", params=["leader", "worker"])
def each_client(served: Served, request: pytest.FixtureRequest) -> Iterator[OpenAI]:
    with client_of(served.leader if request.param == "leader" else served.workers[0]) as made:
        yield made


def messages(text: str = "Tell me a story.") -> list[Any]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


def test_the_model_is_listed(each_client: OpenAI) -> None:
    client = each_client
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="does not exist") as failure:
        client.models.retrieve("gpt-5")
    assert failure.value.code == "model_not_found"


def test_a_chat_is_llama_cpps_own_answer(served: Served, each_client: OpenAI) -> None:
    client = each_client
    answer = client.chat.completions.create(model=MODEL, messages=messages(), temperature=0, max_tokens=20)
    params = {"prompt": "Tell me a story.", "system": "Be brief.", "temperature": 0, "max_tokens": 20}
    expected = served.check(served.leader, params)
    (choice,) = answer.choices
    assert choice.message.content == expected["text"]
    assert choice.message.role == "assistant"
    assert choice.finish_reason == expected["finish_reason"]
    assert answer.usage is not None
    assert answer.usage.model_dump(include=set(expected["usage"])) == expected["usage"]
    assert answer.object == "chat.completion"
    assert answer.system_fingerprint is not None
    assert answer.system_fingerprint.startswith("fp_")


def test_a_streamed_chat_is_the_same(each_client: OpenAI) -> None:
    client = each_client
    asked: Any = {"model": MODEL, "messages": messages(), "temperature": 0, "max_completion_tokens": 20}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *told, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == whole.choices[0].message.content
    assert told[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert last.choices == []
    assert last.usage == whole.usage


def test_a_completion_continues_its_prompt(served: Served, client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once upon", temperature=0, **FREE)
    params = {"prompt": "Once upon", "raw": True, "temperature": 0, "max_tokens": 16, "ignore_eos": True}
    expected = served.check(served.leader, params)["text"]
    assert answer.choices[0].text == expected
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16, "OpenAI's default"
    streamed = client.completions.create(model=MODEL, prompt="Once upon", temperature=0, stream=True, **FREE)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected


def test_a_seed_repeats_several_answers_to_several_prompts(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": ["One", "Two"], "n": 2, "seed": 5, "temperature": 1.5, "max_tokens": 8}
    first, again = (client.completions.create(**asked, **FREE) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert texts == [choice.text for choice in again.choices]
    assert len(set(texts)) == 4
    assert first.usage is not None
    assert first.usage.completion_tokens == 32


# -- forms of an answer ------------------------------------------------------------------------------------------------


class Weather(BaseModel):
    city: Literal["Oslo", "Rome"]
    warm: bool


PARAMETERS = {**Weather.model_json_schema(), "required": ["city"]}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {**Weather.model_json_schema(), "required": ["city"]},
    },
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


def test_an_answer_obeys_a_schema(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": messages(), "max_tokens": 300, "seed": 3}
    parsed = client.chat.completions.parse(**asked, response_format=Weather).choices[0].message.parsed
    assert parsed is not None
    assert parsed.city in ("Oslo", "Rome")
    answer = client.chat.completions.create(
        **asked, extra_body={"grammar": 'root ::= "yes" | "no"', "temperature": 1.5}
    )
    assert answer.choices[0].message.content in ("yes", "no")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**asked, extra_body={"grammar": "root ::= nothing"})


def test_tokens_come_with_their_probabilities(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": messages(), "max_tokens": 6, "temperature": 0, **FREE}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    chunks = list(client.chat.completions.create(**asked, logprobs=True, top_logprobs=3, stream=True))
    (choice,) = answer.choices
    assert choice.logprobs is not None
    told = choice.logprobs.content
    assert told is not None
    assert len(told) == 6
    assert b"".join(bytes(each.bytes or ()) for each in told).decode(errors="replace") == choice.message.content
    for each in told:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].logprob == each.logprob <= 0, "greedy: the likeliest was taken"
    streamed = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs is not None]
    assert [each for some in streamed for each in some or ()] == told
    legacy = client.completions.create(model=MODEL, prompt="One", max_tokens=3, logprobs=2, temperature=0, **FREE)
    found = legacy.choices[0].logprobs
    assert found is not None
    assert [len(found.tokens or ()), len(found.token_logprobs or ())] == [3, 3]
    assert found.text_offset is not None
    assert found.text_offset[0] == 0


def test_a_bias_decides(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "One", "max_tokens": 4, "temperature": 0, "logit_bias": {"88": 100}}
    assert client.completions.create(**asked, **FREE).choices[0].text == "XXXX"


def test_a_tool_is_called_and_its_result_goes_back(client: OpenAI) -> None:
    asked: Any = {"model": MODEL, "tools": [TOOL], "max_tokens": 300, "seed": 1}
    talk = messages()
    answer = client.chat.completions.create(messages=talk, tool_choice=NAMED, **asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    with client.chat.completions.stream(messages=talk, tool_choice=NAMED, **asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    talk += [answer.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "12 C"}]
    after = client.chat.completions.create(messages=talk, tool_choice="none", **{**asked, "max_tokens": 5}).choices[0]
    assert after.finish_reason in ("stop", "length")
    with pytest.raises(openai.BadRequestError) as failure:
        client.chat.completions.create(messages=messages(), tool_choice="required", model=MODEL)
    assert failure.value.param == "tool_choice"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
        ({"stop": ["."] * 17}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "no name"}}]}, "tools", "invalid_value"),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        ({"extra_body": {"grammar": "root ::= ("}}, "grammar", "invalid_value"),
        ({"extra_body": {"grammar": 'root ::= "a"', "ignore_eos": True}}, "ignore_eos", "invalid_value"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "nothing"}}}},
            "response_format",
            "invalid_value",
        ),
        ({"messages": [{"role": "user", "content": "x" * 4000}]}, "messages", "context_length_exceeded"),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, asked: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        client.chat.completions.create(**{"model": MODEL, "messages": messages(), **asked})
    assert (failure.value.param, failure.value.code) == (param, code)


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as failure:
        client.chat.completions.create(model="gpt-5", messages=messages())
    assert failure.value.code == "model_not_found"


def test_null_is_absent_and_unknown_fields_are_passed_over(client: OpenAI) -> None:
    more = {"top_p": None, "stop": None, "n": None, "logprobs": None, "tools": None, "user": "me", "wished": 1}
    answer = client.chat.completions.create(model=MODEL, messages=messages(), max_tokens=1, extra_body=more)
    assert len(answer.choices) == 1


def test_logs_and_metrics_hold_nothing_of_what_was_asked_and_answered(served: Served, client: OpenAI) -> None:
    secret = "xylophone-quartz"
    asked: Any = {"model": MODEL, "messages": messages(f"Say {secret}."), "max_tokens": 30, **FREE}
    asked["extra_body"] = {"ignore_eos": True, "response_format": None, "user": "user-of-the-quartz"}
    answer = client.chat.completions.create(**asked).choices[0].message.content
    streamed = [c.choices[0].delta.content for c in client.chat.completions.create(**asked, stream=True)]
    for bad in ({"temperature": secret}, {"stop": [secret] * 99}, {"logit_bias": {secret: 1}}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{**asked, "extra_body": bad})
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": secret})
    assert answer
    assert streamed
    for node in served.swarm.nodes:
        log, metrics = node.log.read_text(), httpx.get(f"{node.status()['http']['url']}/metrics").text
        assert "request.begin" in log
        for text in (secret, "quartz", answer[:12]):
            assert text not in log
            assert text not in metrics


def test_a_client_that_leaves_frees_the_leader(served: Served, each_client: OpenAI) -> None:
    before = served.requests()["cancelled"]
    stream = each_client.completions.create(model=MODEL, prompt="One", max_tokens=900, stream=True, **FREE)
    next(iter(stream))
    assert served.requests()["running"] == 1
    stream.close()
    wait_until(lambda: served.requests()["running"] == 0)
    assert served.requests()["cancelled"] == before + 1


def test_metrics_of_a_leader_that_served(served: Served) -> None:
    with client_of(served.leader) as client:
        client.completions.create(model=MODEL, prompt="One", max_tokens=5, **FREE)
    found = httpx.get(f"{served.leader.status()['http']['url']}/metrics").text
    worker = httpx.get(f"{served.workers[0].status()['http']['url']}/metrics").text
    value = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in found.splitlines() if line[0] != "#"}
    assert value["swarmnode_tokens_total"] >= 5
    assert value["swarmnode_layer_seconds_count"] >= 4
    assert value["swarmnode_ready"] == value["swarmnode_leading"] == 1
    assert value["swarmnode_coverage_min_copies"] == 1
    assert "swarmnode_tokens_total" not in worker
    assert "swarmnode_worker_dispatches_total" in worker


def test_outside_of_a_swarm_every_question_has_its_reason(tmp_path: Path) -> None:
    settings: Any = {"node": {"listen": ["/ip4/127.0.0.1/tcp/0"]}, **API, "log": {"format": "json"}}
    node = LocalNode("alone", tmp_path / "alone", settings)
    node.start()
    try:
        node.wait_up()
        with client_of(node) as client:
            for ask in (client.models.list, lambda: client.chat.completions.create(model=MODEL, messages=messages())):
                with pytest.raises(openai.InternalServerError, match="swarmctl join") as failure:
                    ask()
                assert (failure.value.status_code, failure.value.code) == (503, "not_in_swarm")
                assert failure.value.response.headers["retry-after"]
    finally:
        node.kill()


# -- what the documents say -------------------------------------------------------------------------------------------

DOCUMENTED = "http://127.0.0.1:11435"


@pytest.mark.parametrize("name", ["README.md", "api.md"])
def test_documented_curl_commands_answer(served: Served, name: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    url = served.leader.status()["http"]["url"]
    commands = [block for block in DOCUMENTS[name].blocks if block.lstrip().startswith("curl ")]
    assert commands
    for command in commands:
        shell = ["sh", "-c", command.replace(DOCUMENTED, url)]
        run = subprocess.run(shell, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert run.returncode == 0, run.stderr
        assert '"finish_reason":"' in run.stdout, run.stdout


def test_the_documented_program_answers(served: Served) -> None:
    url = served.leader.status()["http"]["url"]
    (program,) = (block for block in DOCUMENTS["README.md"].blocks if "from openai" in block)
    program = textwrap.dedent(program).replace(DOCUMENTED, url)
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout


# -- another language -------------------------------------------------------------------------------------------------

NPM_PACKAGE = "openai@7"


@pytest.fixture(scope="module")
def npm_folder() -> Path:
    """Where OpenAI's npm package is installed, kept for the next run."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm (Debian: nodejs, npm)")
    folder = shared_cache_folder() / "tests-npm"
    if not (folder / "node_modules" / "openai").is_dir():
        folder.mkdir(exist_ok=True)
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", NPM_PACKAGE]
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if run.returncode:
            pytest.skip(f"npm cannot install {NPM_PACKAGE}: {run.stderr[-200:]}")
    return folder


def test_openais_npm_package(served: Served, npm_folder: Path) -> None:
    script = npm_folder / "openai_client.mjs"  # beside node_modules, where node looks for packages
    shutil.copy(Path(__file__).parent / script.name, script)
    url = served.workers[0].status()["http"]["url"]
    run = subprocess.run(
        ["node", str(script), url, MODEL], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["models"] == [MODEL]
    assert told["whole"] == told["streamed"] == told["helped"]
    assert told["usage"] == told["streamed_usage"]
    assert told["finish_reason"] in ("stop", "length")
    assert told["alternatives"] == [3, 3]
    assert told["completion"] == "text_completion"
    assert told["errors"] == [
        ["NotFoundError", 404, "model_not_found", "model"],
        ["BadRequestError", 400, "invalid_value", "temperature"],
        ["BadRequestError", 400, "context_length_exceeded", "messages"],
    ]


# -- the end (of the swarm above: keep it last) ------------------------------------------------------------------------


def test_a_daemon_that_stops_tells_its_clients_and_ends_in_time(served: Served) -> None:
    worker = served.workers[0]
    with client_of(worker) as client:
        stream = client.completions.create(model=MODEL, prompt="One", max_tokens=900, stream=True, **FREE)
        next(iter(stream))
        assert worker.process is not None
        worker.process.terminate()
        with pytest.raises(openai.APIError) as failure:
            list(stream)
    assert failure.value.code in ("cancelled", "no_leader")
    assert worker.process.wait(STOP_SECONDS_MAX) == 0
