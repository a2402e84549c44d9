"""Swarms of real daemons that elect their leader: what breaks in the middle of an answer changes no token of it.

The nodes called leader, worker-1 and worker-2 are the backbone; worker-3 and worker-4 only compute.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from scheduler.sampling import SamplingParams
from swarmnode import limits, log_file
from swarmnode.config import Config
from swarmnode.control_client import Call
from swarmnode.doctor.node import look_at_node
from swarmnode.identity import Identity
from swarmnode.local_swarm import LocalNode, LocalSwarm
from swarmnode.net.interface import NetworkError
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.paths import find_paths
from swarmnode.prompt_frames import encode_ask
from swarmnode.prompt_messages import PROTOCOL as PROMPT
from swarmnode.prompt_messages import Ask, new_request_id
from swarmnode.shards.messages import PROTOCOL as SHARDS
from swarmnode.shards.messages import ShardRequest, encode_request
from swarmnode.status_service import PROTOCOL as STATUS
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from swarmnode.top import measure
from swarmnode.wire import encode_frame, read_frame
from tests.control_threads import SWARMCTL
from tests.patience import LOADED, PATIENCE_S
from tests.schema_checks import conforms
from tests.swarm_tools import CONTEXT_TOKENS, Served, ask, failure, logged, wait_until
from tests.tiny_architectures import write_tiny_model

BACKBONE, WORKERS = 3, 4
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 11}


class Elected(Served):
    """A swarm with an elected leader."""

    def leading(self) -> LocalNode:
        """Who leads now, as soon as somebody does."""
        found: LocalNode = wait_until(self.swarm.current_leader)
        return found

    def bystander(self, *victims: LocalNode) -> LocalNode:
        """A node that neither leads nor is a victim."""
        leader = self.leading()
        return next(node for node in reversed(self.swarm.nodes) if node is not leader and node not in victims)

    def goes_on(self, asker: LocalNode, fault: Callable[[], Any], **sampling: Any) -> dict[str, Any]:
        """An answer in whose middle something breaks: complete, each index once, and llama.cpp's own tokens."""
        params = ask("A long story:", 300, ignore_eos=True, **sampling)
        tokens: list[int] = []
        with Call(asker.socket, "ask", params) as call:
            for event in call:
                if event["event"] != "token" or event["index"] is None:
                    continue
                assert event["index"] == len(tokens)
                tokens.append(event["token"])
                if len(tokens) == 60:
                    fault()
            answer = call.result
        assert answer["tokens"] == tokens == list(self.expected(params).tokens)
        return dict(answer)

    def all_ready(self) -> None:
        """Everybody runs, agrees on the leader and says that the swarm is ready."""
        for node in self.swarm.nodes:
            if node.process is None or node.process.poll() is not None:
                node.start()
                node.wait_up()

        def agreed() -> bool:
            views = [node.status() for node in self.swarm.nodes]
            return all(view["ready"] for view in views) and len({view["leader"] for view in views}) == 1

        wait_until(agreed)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elected]:
    root = tmp_path_factory.mktemp("elected")
    model = write_tiny_model(root / "olmoe.gguf", "olmoe")
    settings = {"leader": {"context_tokens": CONTEXT_TOKENS, "batch_tokens": 64}, "swarm": {"settle_s": 0.5}}
    with LocalSwarm(root / "swarm", WORKERS, backbone=BACKBONE, leader=settings) as swarm:
        swarm.add_model(model)
        swarm.wait_ready(timeout_s=PATIENCE_S)
        elected = Elected(swarm, model)
        elected.all_ready()
        try:
            yield elected
        finally:
            elected.undivided.close()


def test_the_swarm_elects_places_and_answers(served: Elected) -> None:
    (first, *_) = [line for line in logged(served.leader, "leader.known") if line["leader"]]
    assert first["leader"] == served.leader.peer_id  # only it held the model when the first leader was elected
    wait_until(lambda: served.leader.status()["model"]["coverage"]["min_copies"] == 2)
    leader = served.leading()
    status = leader.status()
    assert status["swarm"]["name"] == "local"
    assert len(status["swarm"]["id"]) == 64
    assert status["term"] >= 1
    roles = {row["name"]: row["roles"] for row in status["peers"]}
    assert roles[leader.name][:2] == ["leader", "backbone"]
    for node in served.workers:
        backbone = ["backbone"] if node in served.swarm.nodes[:BACKBONE] else []
        assert node is leader or roles[node.name] == [*backbone, "worker"]
    for node in served.swarm.nodes:
        answered = served.check(node, ask("Once upon a time", 30))["leader"]
        assert answered in [each.peer_id for each in served.swarm.nodes[:BACKBONE]]

    def busy() -> bool:
        served.check(served.workers[-1], ask("And on", 30))
        return any(node.status()["local"]["load"] > 0 for node in served.swarm.nodes)

    wait_until(busy)
    working = {node.name: node.status() for node in served.swarm.nodes}
    assert working[leader.name]["model"]["layers"]["decode_computed"] > 0
    assert log_file.last_lines(served.leader.folder / "logs", 1)[0]
    conforms("status", working["worker-4"])
    conforms("top", measure(working["worker-4"], served.workers[-1].status(), 1.0))
    seen = look_at_node(Config(), None, find_paths(served.leader.folder))
    assert (seen.daemon, seen.daemon_pid, seen.loose, seen.votes) == ("answers", served.leader.pid, (), None)
    assert seen.membership is not None
    assert len(seen.membership.backbone) == BACKBONE


def test_what_is_predicted_by_an_invite_is_what_a_worker_then_has(served: Elected, tmp_path: Path) -> None:
    served.all_ready()
    others = len(served.swarm.nodes) - 1
    wait_until(lambda: len(served.leader.call("outline")["workers"]) == others)
    served.check(served.leader, ask("So it is measured", 8))
    token = served.leader.call("swarm_invite", uses=1, lifetime_s=600, addresses=[])["token"]

    def predict(*words: str) -> dict[str, Any]:
        command = [*SWARMCTL, "predict", "--json", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        conforms("predict", found)
        return found

    told = predict(token, "--data-dir", str(tmp_path / "newcomer"))
    assert told["measured"] is None
    assert told["workers"] == others + 1
    assert 0 < told["predicted"]["experts"] < told["experts"]
    assert told["predicted"]["layers_ms"] > 0
    assert told["offer"]["rows_per_s"] > 0
    member = served.swarm.workers[-1]
    (member.folder / "prediction.json").write_bytes((tmp_path / "newcomer" / "prediction.json").read_bytes())
    now = predict("--data-dir", str(member.folder))
    assert now["foretold"] == told["predicted"]
    assert now["workers"] == others
    assert now["measured"]["experts"] == member.status()["local"]["experts_held"]
    assert now["measured"]["layers_ms"] > 0
    (invite,) = served.leader.call("swarm_invite_list")["invites"]
    assert invite["used"] == 0


def test_the_backbone_gets_ready_to_lead(served: Elected) -> None:
    for node in served.workers[:2]:
        models = wait_until(lambda node=node: node.call("model_list")["models"])
        assert [model["name"] for model in models] == ["olmoe"]
    assert served.workers[3].call("model_list")["models"] == []


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_killed_worker_changes_no_token(served: Elected, sampling: dict[str, Any]) -> None:
    victim = served.workers[3]
    answer = served.goes_on(served.bystander(victim), victim.kill, **sampling)
    assert answer["finish_reason"] == "length"
    served.all_ready()


def test_a_suspended_worker_changes_no_token_and_comes_back_as_itself(served: Elected) -> None:
    victim = served.workers[3]
    served.goes_on(served.bystander(victim), lambda: victim.send_signal(signal.SIGSTOP))
    victim.send_signal(signal.SIGCONT)
    started = time.monotonic()
    served.all_ready()
    assert time.monotonic() - started < LOADED * 15
    assert victim.status()["self"] == victim.peer_id


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_killed_leader_loses_no_token(served: Elected, sampling: dict[str, Any]) -> None:
    victim = served.leading()
    before = victim.status()["term"]
    answer = served.goes_on(served.bystander(victim), victim.kill, **sampling)
    assert answer["leader"] != victim.peer_id
    assert wait_until(served.swarm.current_leader).status()["term"] > before
    served.all_ready()


def test_a_suspended_leader_loses_no_token_and_follows_when_it_wakes(served: Elected) -> None:
    victim = served.leading()
    answer = served.goes_on(served.bystander(victim), lambda: victim.send_signal(signal.SIGSTOP))
    assert answer["leader"] != victim.peer_id
    victim.send_signal(signal.SIGCONT)
    started = time.monotonic()
    served.all_ready()
    assert time.monotonic() - started < LOADED * 15
    assert victim.status()["leader"] != victim.peer_id


def test_a_leader_that_drains_hands_over(served: Elected) -> None:
    victim = served.leading()
    assert victim.call("drain", on=True) == {"draining": True}
    wait_until(lambda: served.leading() is not victim)
    wait_until(lambda: victim.status()["ready"])
    served.check(victim, ask("Who leads now?", 20))
    assert victim.call("drain", on=False) == {"draining": False}
    served.all_ready()


def states(node: LocalNode, others: list[LocalNode]) -> set[str]:
    """What a node says of the others' states; it may have forgotten some."""
    names = {other.name for other in others}
    return {row["state"] for row in node.status()["peers"] if row["name"] in names}


def test_without_a_majority_nobody_leads_and_prompts_fail_fast(served: Elected) -> None:
    survivors = [served.workers[1], served.workers[3]]
    victims = [served.leader, served.workers[0]]
    for victim in victims:
        victim.kill()
    for node in survivors:
        wait_until(lambda node=node: "1 of 3 backbone peers" in (node.status()["reason"] or ""))
        status = node.status()
        assert (status["leader"], status["ready"]) == (None, False)
        wait_until(lambda node=node: states(node, victims) <= {"suspect", "gone"})
        started = time.monotonic()
        error = failure(lambda node=node: node.call("ask", **ask("Anybody?")))
        assert time.monotonic() - started < LOADED * 5
        assert error.type == "no_leader"
    served.all_ready()
    served.check(survivors[1], ask("And now?", 20))


def test_the_networks_key_alone_opens_nothing(served: Elected) -> None:
    """As who was banned still has it, and may come back under a new identity."""
    leader = served.leading()
    record = SwarmStore.open(SwarmFiles(leader.folder)).need()
    model = leader.status()["model"]["id"]

    async def come() -> None:
        async with open_libp2p_network(Identity.generate(), (), psk=record.psk) as network:
            peer = await network.connect(leader.status()["addresses"][0])
            opened = [await network.open_stream(peer, protocol) for protocol in (PROMPT, STATUS, SHARDS)]
            prompt = Ask(new_request_id(), SamplingParams(), prompt="Let me in", max_tokens=3)
            for stream, frame in zip(
                opened,
                (encode_ask(prompt), encode_frame({"kind": "status"}), encode_request(ShardRequest(model, None))),
                strict=True,
            ):
                await stream.send(frame)
            for stream in opened:
                with trio.fail_after(PATIENCE_S), pytest.raises(NetworkError):
                    await read_frame(stream, limits.STATUS_REPLY)

    trio.run(come)


def test_a_second_model_changes_nothing_and_all_come_back_with_the_first(served: Elected, tmp_path: Path) -> None:
    leader = served.leading()
    active = leader.status()["model"]["id"]
    path = write_tiny_model(tmp_path / "other.gguf", "olmoe", seed=1)
    for node in served.swarm.nodes[:BACKBONE]:  # each of them has a choice then
        node.call("model_add", path=str(path), name="another")
    time.sleep(1.5)  # candidates look twice a second
    wait_until(lambda: leader.status()["ready"])
    assert leader.status()["model"]["id"] == active

    for node in served.swarm.nodes:
        node.kill()
    others = [node for node in served.swarm.nodes if node is not leader]
    for node in others:
        node.start()
    for node in others:
        node.wait_up()
    wait_until(lambda: others[-1].status()["ready"])
    assert others[-1].status()["model"]["id"] == active
    served.check(others[-1], ask("And who serves now?", 20))
    served.all_ready()


def test_a_leader_whose_model_file_is_gone_lets_another_one_lead(served: Elected) -> None:
    """And it leads no more until the file is back: the others serve from their workers' caches."""
    first, path = served.leader, served.model
    if served.leading() is first:
        first.call("drain", on=True)
        wait_until(lambda: served.leading() is not first)
    first.call("drain", on=False)
    away = path.rename(path.with_suffix(".away"))
    try:
        other = served.leading()
        time.sleep(1.5)
        other.call("drain", on=True)
        wait_until(lambda: served.leading() is not other and served.leading().status()["ready"])
        assert served.leading() is not first
        other.call("drain", on=False)
    finally:
        away.rename(path)
    served.all_ready()
