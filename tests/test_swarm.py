"""Swarms of real processes: a leader and two workers give llama.cpp's own tokens, whoever asks and whatever else runs.

Each module-scoped fixture starts one swarm. What goes wrong on purpose is in test_swarm_faults.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.control_client import Call
from swarmnode.handlers import parse_ask
from swarmnode.local_swarm import LocalNode, LocalSwarm
from tests.swarm_tools import Served, ask, at_once, failure, logged, long_ask, serving, wait_until
from tests.tiny_architectures import write_tiny_model

AT_ONCE_S = 5.0  # within a second where the machine has time; an answer that goes on takes far longer
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 7}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served"), parallel=8, queue_limit=2) as swarm:
        yield swarm


# --- Tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_every_peer_gives_llama_cpps_tokens(served: Served, sampling: dict[str, Any]) -> None:
    leader = served.leader.status()["self"]
    answers = [served.check(node, ask("Once upon a time", 60, **sampling)) for node in served.swarm.nodes]
    for answer in answers:
        assert answer["leader"] == leader
        assert answer["text"] == answers[0]["text"]
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + len(answer["tokens"])
        assert 0 < answer["timings"]["first_token_s"] <= answer["timings"]["total_s"]
    assert len({answer["request_id"] for answer in answers}) == len(answers)


def test_long_answers_stay_equal(served: Served) -> None:
    for node, sampling in zip(served.workers, ({}, SAMPLED), strict=True):
        assert len(served.check(node, ask("Tell me everything.", 250, ignore_eos=True, **sampling))["tokens"]) == 250


def test_eight_prompts_at_once_are_each_equal_to_themselves_alone(served: Served) -> None:
    asks = [ask(f"{'Prompt ' * 3 ** (i % 5)}number {i}", 30 + 10 * i, **(SAMPLED if i % 2 else {})) for i in range(8)]
    nodes = served.swarm.nodes
    calls = [lambda i=i: nodes[i % 3].call("ask", **asks[i]) for i in range(8)]
    most = 0
    for params, answer in zip(asks, at_once(calls), strict=True):
        assert answer["tokens"] == list(served.expected(params).tokens)
        most = max(most, answer["usage"]["prompt_tokens"])
    assert most > 500  # several steps of prefill beside the others' decoding


def test_the_chat_template_is_the_models_own(served: Served) -> None:
    params = {"prompt": "Hello", "system": "Be brief.", "max_tokens": 20, "temperature": 0}
    assert served.check(served.workers[0], params)["usage"]["prompt_tokens"] > len("Be brief.Hello")


def test_a_drawn_seed_repeats_the_answer(served: Served) -> None:
    params = {**ask("Surprise me", 30), "temperature": 1.5}
    first = served.leader.call("ask", **params)
    again = served.workers[1].call("ask", **params, seed=first["seed"])
    assert again["tokens"] == first["tokens"]
    assert served.leader.call("ask", **params)["seed"] != first["seed"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_shortest_answers(served: Served, max_tokens: int) -> None:
    answer = served.check(served.workers[0], ask("Hello", max_tokens, ignore_eos=True))
    assert (len(answer["tokens"]), answer["finish_reason"]) == (max_tokens, "length")


def test_without_max_tokens_the_context_is_filled(served: Served) -> None:
    answer = served.check(served.workers[0], ask("x" * 900, None, ignore_eos=True))
    assert answer["usage"]["total_tokens"] == 1024
    assert answer["finish_reason"] == "length"


# --- Text -------------------------------------------------------------------------------------------------------------


def events_of(node: LocalNode, params: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with Call(node.socket, "ask", params) as call:
        return list(call), call.result


def test_text_is_the_tokens_bytes_and_never_cut(served: Served) -> None:
    params = ask("Many bytes: 🎈 é 漢字", 300, ignore_eos=True, **{**SAMPLED, "temperature": 3.0})
    events, answer = events_of(served.workers[0], params)
    tokens = [event for event in events if event["event"] == "token"]
    assert "".join(event["text"] for event in tokens) == answer["text"]
    assert [event["token"] for event in tokens if event["index"] is not None] == answer["tokens"]
    assert [event["index"] for event in tokens if event["index"] is not None] == list(range(300))
    data = b"".join(served.undivided.piece(token) for token in answer["tokens"])
    assert answer["text"] == data.decode(errors="replace")
    assert any(ord(c) > 127 and c != "\N{REPLACEMENT CHARACTER}" for c in answer["text"])  # over two tokens each
    assert answer["usage"]["prompt_tokens"] == len(served.undivided.tokenize(parse_ask(params)))


def test_stop_strings_over_several_tokens_end_the_answer_and_leave_no_trace(served: Served) -> None:
    params = ask("Where to stop?", 120, ignore_eos=True, **SAMPLED)
    whole = served.leader.call("ask", **params)["text"]
    stop = whole[40:44]
    events, answer = events_of(served.workers[1], {**params, "stop": ["never there", stop, "\n\n\n"]})
    assert answer["text"] == whole[: whole.index(stop)]
    assert answer["finish_reason"] == "stop"
    assert "".join(event["text"] for event in events if event["event"] == "token") == answer["text"]
    assert served.expected({**params, "stop": [stop]}).finish_reason == "stop"


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_a_prompt_beyond_the_context_is_refused_by_name(served: Served) -> None:
    for node in (served.leader, served.workers[0]):
        error = failure(lambda node=node: node.call("ask", **ask("word " * 400)))
        assert error.type == "context_length_exceeded"
        assert error.details["request_id"].startswith("req-")
        assert "1024" in error.message


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": "hot"}, {"temperature": -1}, {"top_p": 2}, {"seed": -1}, {"max_tokens": -1}, {"max_tokens": True},
     {"stop": [""]}, {"stop": "x"}, {"stop": ["x"] * 17}, {"prompt": ""}, {"prompt": 5}, {"system": "with raw"}],
    ids=str,
)  # fmt: skip
def test_wrong_parameters_are_wrong_usage(served: Served, wrong: dict[str, Any]) -> None:
    assert failure(lambda: served.workers[0].call("ask", **{**ask("Hello"), **wrong})).type == "usage"


def test_a_full_queue_refuses_at_once_and_cancelling_frees_the_leader_within_a_second(served: Served) -> None:
    calls: list[Call] = []
    try:
        for node in itertools.islice(itertools.cycle(served.swarm.nodes), 10):  # in turns: who came later waits longer
            calls.append(Call(node.socket, "ask", long_ask(f"Story {len(calls)}")))
            wait_until(lambda: served.requests()["running"] + served.requests()["waiting"] == len(calls))
        assert (served.requests()["running"], served.requests()["waiting"]) == (8, 2)
        assert failure(lambda: served.workers[0].call("ask", **ask("One too many"))).type == "overloaded"
        assert (served.requests()["running"], served.requests()["waiting"]) == (8, 2)  # it was not waited for a place
        queued = [next(event for event in call if event["event"] == "queued") for call in calls]
        assert sorted(event["position"] for event in queued) == [0] * 8 + [1, 2]
    finally:
        for call in calls:
            call.__exit__()
    wait_until(lambda: (served.requests()["running"], served.requests()["waiting"]) == (0, 0), AT_ONCE_S)
    served.check(served.workers[0], ask("After that"))


def test_an_asker_that_leaves_frees_the_leader(served: Served) -> None:
    for node in served.swarm.nodes:
        before = served.requests()["cancelled"]
        with Call(node.socket, "ask", long_ask()) as call:
            next(event for event in call if event["event"] == "token")
            assert served.requests()["running"] == 1
        wait_until(lambda: served.requests()["running"] == 0, AT_ONCE_S)
        assert served.requests()["cancelled"] == before + 1


# --- What people see --------------------------------------------------------------------------------------------------


def test_status_says_the_same_everywhere(served: Served) -> None:
    def all_ready() -> Any:
        views = [node.status() for node in served.swarm.nodes]
        return all(view["ready"] for view in views) and views

    views = wait_until(all_ready)
    leader = views[0]["self"]
    for node, view in zip(served.swarm.nodes, views, strict=True):
        assert (view["leader"], view["ready"], view["reason"], view["term"], view["epoch"]) == (
            leader,
            True,
            None,
            1,
            1,
        )
        assert view["swarm"].keys() == {"id", "name"}
        assert view["model"]["coverage"] == {"min_copies": 1, "missing": []}
        assert (view["model"]["architecture"], view["model"]["moe_layers"]) == ("olmoe", 3)
        names = {peer["peer_id"]: peer["name"] for peer in view["peers"]}
        assert names[view["self"]] == node.name
        assert set(names.values()) == {"leader", "worker-1", "worker-2"}
        assert view["requests"].keys() >= {"running", "waiting", "accepted", "finished", "failed", "cancelled"}
    assert sum(peer["experts_held"] for peer in views[1]["peers"]) == views[1]["model"]["experts"] == 24
    assert views[1]["local"]["experts_held"] == 12


def test_status_has_every_key_of_a_peer(served: Served) -> None:
    def all_at_work() -> Any:
        peers = served.workers[0].status()["peers"]
        return all(peer["state"] == "ready" for peer in peers) and peers

    for peer in wait_until(all_at_work):
        assert peer.keys() >= {
            "peer_id", "name", "roles", "state", "backends", "numeric_class", "fitness", "experts_held", "memory",
            "rtt_ms", "version",
        }  # fmt: skip
        assert peer["state"] == "ready"
        assert set(peer["roles"]) <= {"leader", "backbone", "worker"}
        assert peer["memory"].keys() == {"used_bytes", "budget_bytes"}
        for backend in peer["backends"]:
            for precision in (backend["accumulation"], backend["source"]):
                assert precision.keys() == {"declared", "measured", "measured_when_asked"}
        if "worker" in peer["roles"]:
            assert 0 < peer["rtt_ms"] < 1000
            assert peer["memory"]["used_bytes"] > 0
            assert peer["bit_identical_to_leader"] is True


def test_one_request_id_in_every_peers_log_and_no_text_in_any(served: Served) -> None:
    secret = "nobody may read this"
    asker = served.workers[1]
    answer = served.check(asker, ask(secret, 50, ignore_eos=True, **SAMPLED))
    for node in served.swarm.nodes:
        wait_until(lambda node=node: len(mine(node, answer["request_id"])) >= (4 if node is asker else 2))
        lines = mine(node, answer["request_id"])
        roles = [(line["role"], line["event"]) for line in lines]
        for role in {"leader": ["leader"], asker.name: ["asker", "worker"]}.get(node.name, ["worker"]):
            assert roles.count((role, "request.begin")) == roles.count((role, "request.end")) == 1
        assert all(line["dispatches"] > 50 for line in lines if line["role"] == "worker" and "dispatches" in line)
        log = node.log.read_text()
        assert secret not in log
        assert answer["text"][:20] not in log


def mine(node: LocalNode, request_id: str) -> list[dict[str, Any]]:
    return [line for line in logged(node) if line.get("request_id") == request_id]


# --- Models -----------------------------------------------------------------------------------------------------------


def test_models_are_added_shown_and_removed(served: Served, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other model.gguf", "qwen3moe")
    added = served.swarm.add_model(other)
    assert (added["name"], added["architecture"]) == ("other-model", "qwen3moe")
    listed = {model["name"]: model for model in served.leader.call("model_list")["models"]}
    assert {name: model["active"] for name, model in listed.items()} == {"olmoe": True, "other-model": False}
    shown = served.leader.call("model_show", name="other-model")
    assert (shown["files"], shown["fault"]) == ([str(other)], None)
    assert "there is a model" in failure(lambda: served.swarm.add_model(other)).message
    assert failure(lambda: served.leader.call("model_remove", name="olmoe")).type == "usage"
    assert served.leader.call("model_remove", name="other-model") == {"removed": "other-model"}
    assert failure(lambda: served.leader.call("model_show", name="other-model")).type == "model_not_found"
    assert failure(lambda: served.workers[0].call("model_add", path=str(other))).type == "usage"
    assert other.exists()
    served.check(served.workers[0], ask("Still the first model"))


def test_a_source_that_changed_is_named(served: Served, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "changing.gguf", "qwen3moe")
    served.swarm.add_model(other)
    other.touch()
    assert "changed since it was added" in served.leader.call("model_show", name="changing")["fault"]
    served.leader.call("model_remove", name="changing")


@pytest.mark.parametrize("kind", ["cut", "empty", "no model", "missing", "a folder", "llama4"])
def test_a_broken_file_is_one_line_and_the_daemon_lives(served: Served, tmp_path: Path, kind: str) -> None:
    path = write_tiny_model(tmp_path / "broken.gguf", "llama4" if kind == "llama4" else "olmoe")
    data = path.read_bytes()
    match kind:
        case "cut":
            path.write_bytes(data[:-1000])
        case "empty":
            path.write_bytes(b"")
        case "no model":
            path.write_bytes(b"#!/bin/sh\n" + data)
        case "missing":
            path.unlink()
        case "a folder":
            path = tmp_path
    error = failure(lambda: served.swarm.add_model(path))
    assert error.type == ("unsupported_model" if kind == "llama4" else "bad_model_file")
    assert "\n" not in error.message
    assert served.leader.status()["ready"]
    assert [model["name"] for model in served.leader.call("model_list")["models"]] == ["olmoe"]


# --- Other models -----------------------------------------------------------------------------------------------------


def test_activations_travel_as_q8_0_where_that_changes_no_bit(tmp_path: Path) -> None:
    with serving(tmp_path, quantisation="q8_0") as served:
        for sampling in ({}, SAMPLED):
            served.check(served.workers[0], ask("Few bytes", 80, ignore_eos=True, **sampling))
        for link in served.leader.call("statistics")["links"]:
            per_token = link["bytes_out"] / link["tokens"]
            assert per_token < 64 // 32 * 34 + 12 * 3 + 96  # width 64 in Q8_0, three experts; F32 alone takes 256
            assert per_token < 4 * 64


# --- From nothing, and again ------------------------------------------------------------------------------------------


def test_a_swarm_comes_up_step_by_step_and_survives_restarts(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "m.gguf", "olmoe")
    settings = {"leader": {"context_tokens": 256, "own_copy": False, "park_s": 0.0}}
    with LocalSwarm(tmp_path / "swarm", 2, leader=settings) as swarm:
        leader, (first, second) = swarm.leader, swarm.workers
        nothing_is_served_without_a_model(swarm)
        swarm.add_model(model)
        ready_only_when_all_is_proven(swarm)
        expected = leader.call("ask", **ask("Hello", 30))["tokens"]

        term = leader.status()["term"]
        stop(leader)
        for node in (first, second):
            started = time.monotonic()
            assert failure(lambda node=node: node.call("ask", **ask("Is anyone there?"))).type == "no_leader"
            assert time.monotonic() - started < AT_ONCE_S
            assert (node.status()["leader"], node.status()["ready"]) == (None, False)
        leader.start()
        leader.wait_up()
        swarm.wait_ready(timeout_s=60)
        assert leader.status()["term"] == term + 1
        assert first.call("ask", **ask("Hello", 30))["tokens"] == expected
        for node in (first, second):
            assert [line["adopted"] for line in logged(node, "member.loaded")] == [False, True]

        shards = sorted((second.folder / "cache" / "shards").rglob("*"))
        before = [(path, path.stat().st_ino) for path in shards if path.is_file()]
        stop(second)
        wait_until(lambda: not leader.status()["ready"])
        assert failure(lambda: first.call("ask", **ask("Half of it"))).type == "not_ready"
        second.start()
        second.wait_up()
        wait_until(lambda: second.status()["ready"], 60)  # by then `first` may hold all, if its start took long
        assert second.call("ask", **ask("Hello", 30))["tokens"] == expected
        assert len(before) >= 12
        assert [(path, path.stat().st_ino) for path, _ in before] == before  # nothing was fetched again


def nothing_is_served_without_a_model(swarm: LocalSwarm) -> None:
    wait_until(lambda: len(swarm.leader.status()["peers"]) == 3)
    for node in swarm.nodes:
        error = failure(lambda node=node: node.call("ask", **ask("Hello")))
        assert (error.type, "model add" in error.message) == ("not_ready", True)
        status = node.status()
        assert (status["ready"], status["model"], status["epoch"]) == (False, None, 0)
    assert swarm.leader.call("model_list") == {"models": []}
    assert failure(lambda: swarm.leader.call("statistics")).type == "usage"


def ready_only_when_all_is_proven(swarm: LocalSwarm) -> None:
    seen = []
    while not seen or not seen[-1]["ready"]:
        seen.append(swarm.leader.status())
        if not seen[-1]["ready"]:
            assert seen[-1]["epoch"] == 0
            assert seen[-1]["model"] is None or len(seen[-1]["model"]["coverage"]["missing"]) == 24
    states = [peer["state"] for status in seen for peer in status["peers"] if "worker" in peer["roles"]]
    assert set(states) <= {"joining", "loading", "ready"}
    assert not seen[0]["ready"]
    last = seen[-1]
    assert [peer["experts_held"] for peer in last["peers"] if "worker" in peer["roles"]] == [12, 12]


def stop(node: LocalNode) -> None:
    assert node.process is not None
    node.process.terminate()
    assert node.process.wait(10) == 0


def test_a_worker_without_a_leader_says_so(tmp_path: Path) -> None:
    address = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWF4QfaMGcdmHwz1y5d7Lzop3U8HQVc4KG7Me5N1SR6Npg"
    settings = {"node": {"listen": []}, "api": {"listen": "off"}, "swarm": {"role": "worker", "leader": address}}
    lonely = LocalNode("lonely", tmp_path / "lonely", settings)
    lonely.start()
    try:
        lonely.wait_up()
        wait_until(lambda: "refused" in lonely.status()["reason"])
        error = failure(lambda: lonely.call("ask", **ask("Hello")))
        assert (error.type, address.rsplit("/", 1)[1]) == ("no_leader", error.details["peer"])
        status = lonely.status()
        assert (status["leader"], status["ready"], len(status["peers"])) == (None, False, 1)
        assert status["self"] == status["peers"][0]["peer_id"]
    finally:
        stop(lonely)
