"""docs/status.md names every key that the commands print, every state and every error, and no other.

What a daemon answers is taken from a real leader and a real worker with a tiny model, joined by a network in memory.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import click
import jsonschema
import pytest
import trio

from backends.add_model import add_model
from capabilities.errors import SwarmError
from capabilities.measurement import BackendMeasurement, TypeMeasurement
from capabilities.verdict import Evidence, Verdict
from scheduler.advert_findings import Finding, FindingKind
from swarmnode.api.service import Http
from swarmnode.cli import common, ctl
from swarmnode.cli.schema import commands, schema_of_command
from swarmnode.config import parse_config
from swarmnode.control import ControlReply
from swarmnode.explaining import Known, explain
from swarmnode.handlers import Handlers
from swarmnode.leadership import NamedLeader
from swarmnode.machine_parts import MachineParts
from swarmnode.measured import Measured
from swarmnode.member_messages import Progress
from swarmnode.model_check import CheckReport
from swarmnode.models import Models
from swarmnode.named_swarm import NamedLeaderNode, NamedWorkerNode
from swarmnode.net.memory import open_memory_hub
from swarmnode.paths import find_paths
from swarmnode.pinger import serve_pings
from tests.advert_tools import usual_content
from tests.documents import ROOT, first_codes, rows, section
from tests.expert_models import quiet, tiny_file
from tests.make_schemas import FOLDER, schemas, text_of
from tests.patience import PATIENCE_S
from tests.schema_checks import conforms

Keys = set[str]


def keys_of(value: Any, name: str = "") -> Keys:
    """The paths of everything in a JSON value; `[]` after a list's name."""
    if isinstance(value, Mapping) and value:
        return set().union(*(keys_of(item, f"{name}.{key}" if name else key) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return set().union(*(keys_of(item, f"{name}[]") for item in value))
    return {name}


class Answers(NamedTuple):
    raw: list[tuple[str, Any]]
    status: Keys
    ask: Keys
    model: Keys
    placement: Keys
    peer: Keys


class Unheard:
    """A ControlReply whose events nobody reads."""

    async def event(self, name: str, **fields: Any) -> None:
        await trio.lowlevel.checkpoint()


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return trio.run(_collect_answers, tmp_path_factory.mktemp("swarm"))


async def _collect_answers(folder: Path) -> Answers:
    """Every key of `status`, `ask`, `placement` and `model show`, over the life of a swarm of two."""
    add_model(tiny_file("olmoe"), folder / "models" / "tiny", "tiny", quiet)
    config = parse_config('[api]\nlisten = "off"\n[swarm]\nsettle_s = 0.1\n[leader]\nparallel = 1\ncontext_tokens = 64')
    views = []
    with trio.fail_after(PATIENCE_S):
        async with open_memory_hub() as hub, trio.open_nursery() as nursery:
            at_leader, at_worker = hub.join(), hub.join()
            node = NamedLeaderNode(at_leader, config, find_paths(folder), 1)
            leader = node.leader
            views.append(await node.status())
            paths = find_paths(folder / "worker")
            paths.make()
            parts = await MachineParts.open(config, paths, 1)
            named = NamedLeader(at_leader.peer_id, at_leader.addresses[0])
            serve_pings(at_worker)
            worker = NamedWorkerNode(at_worker, config, named, Models(paths.models, parts.cache), parts)
            views.append(await worker.status())
            nursery.start_soon(node.run)
            await _until(lambda: leader.active is not None)
            views.append(await node.status())
            nursery.start_soon(worker.run)
            await _until(lambda: leader.refusal() is None)
            views += [await node.status(), await worker.status()]
            (member,) = leader.members.by_peer.values()
            member.progress = Progress(1, 1, "loading", 1, 2, 1)
            member.hello = replace(member.hello, accumulates_f32=False)
            views.append(await node.status())
            handlers = Handlers(node, Http(config.api, node, find_paths(folder)))
            reply = cast(ControlReply, Unheard())
            views.append(dict(await handlers.status({}, reply)))
            answer = await handlers.ask({"prompt": "hi", "raw": True, "max_tokens": 3, "logprobs": 2}, reply)
            member.hello = replace(member.hello, name="cellar")
            leader.board.publish(str(member.peer), "fit", [Evidence("audit", "agreed")], 10, 0)
            views.append(await node.status())
            known = await _known(handlers, str(member.peer))
            explained = [explain(str(member.peer), await node.status(), each) for each in (known, Known())]
            model = await handlers.model_show({"name": "tiny"}, reply)
            placement = dict(await worker.placement(member.name))
            nursery.cancel_scope.cancel()
    placement["coverage"]["missing"] = [{"layer": 0, "expert": 0}]
    placement["without"]["one_copy"] = placement["without"]["no_copy"]
    views.append({"findings": [Finding(FindingKind.UNREACHABLE, "peer", "message", "hint").to_json()]})
    measured = Measured(
        "ggml-cpu", "a processor", BackendMeasurement("ggml-cpu", "", 1, 1, 1, {"q4_0": TypeMeasurement()})
    )
    views.append({"peers": [{"backends": measured.backends_json()}]})
    of_views = set().union(*map(keys_of, views))
    raw = [("ask", answer), ("model show", model), ("placement", placement), *(("status", view) for view in views[:-2])]
    raw += [("peer show", each) for each in explained]
    return Answers(
        raw, of_views, keys_of(answer), keys_of(model), keys_of(placement), set().union(*map(keys_of, explained))
    )


async def _known(handlers: Handlers, peer: str) -> Known:
    """What a member knows that has heard the peer's advert."""
    assert (await handlers.peer({"name": "cellar"}, cast(ControlReply, Unheard())))["peer_id"] == peer
    content = replace(usual_content(), addresses=("/ip4/1.2.3.4/tcp/1",), not_reached=(peer,))
    verdict = Verdict(peer, "unfit", (Evidence("audit", "wrong", 1, 2),), 3, 1, 2, 1)
    return Known(content, 1.5, verdict, (1, 2))


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (nothing tells)
        await trio.sleep(0.005)


def documented(heading: str) -> Keys:
    codes = first_codes(section("status.md", heading))
    assert len(codes) == len(set(codes)), "a key stands twice"
    return set(codes)


def test_status_says_what_is_documented(answers: Answers) -> None:
    assert documented("`swarmctl status --json`") == answers.status


def test_real_answers_conform_to_their_schemas(answers: Answers) -> None:
    for command, answer in answers.raw:
        conforms(command, answer)


def test_states_are_documented() -> None:
    source = (ROOT / "swarmnode" / "leader" / "coverage.py").read_text()
    state_of = next(n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "state_of")
    returned = [node.value for node in ast.walk(state_of) if isinstance(node, ast.Return)]
    named = {n.value for each in returned if each for n in ast.walk(each) if isinstance(n, ast.Constant)}
    assert documented("States of a worker") == named


def test_placement_says_what_is_documented(answers: Answers) -> None:
    assert documented("`swarmctl placement --json`") == answers.placement


def test_peer_says_what_is_documented(answers: Answers) -> None:
    backends = {key for key in answers.peer if key.startswith("backends[].") and "weights" not in key}
    assert {f"peers[].{key}" for key in backends} < answers.status
    assert documented("`swarmctl peer --json`") == {key for key in answers.peer if key not in backends}


def test_ask_says_what_is_documented(answers: Answers) -> None:
    assert documented("`swarmctl ask --json`") == answers.ask


def test_models_say_what_is_documented(answers: Answers) -> None:
    check, show = section("status.md", "`swarmctl model`").split("`swarmctl model add")
    assert set(first_codes(show)) == answers.model
    report = CheckReport("m.gguf", layers=[{"layer": 0, "max_abs_diff": 0.0}])
    assert set(first_codes(check)) == keys_of(asdict(report))


@pytest.mark.parametrize("command", ["bench", "demo"])
def test_documented_keys_of_long_commands_are_in_their_source(command: str) -> None:
    source = ast.parse((ROOT / "swarmnode" / f"{command}.py").read_text())
    literals = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant)}
    keys = documented(f"`swarmctl {command} --json`")
    assert keys
    assert {part.removesuffix("[]") for key in keys for part in key.split(".")} <= literals


def test_errors_and_their_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("daemon", "swarm.commands", "backbone.leader_watch", "backbone.election_service"):  # all with some
        import_module(f"swarmnode.{module}")
    table = {cells[0].strip("`"): cells[-1] for cells in rows(section("status.md", "Errors"))}
    del table["type"]
    kinds = {kind.type: kind for kind in reversed(_all_subclasses(SwarmError))}
    assert set(table) == set(kinds)
    for name, kind in kinds.items():

        def fail(kind: type[SwarmError] = kind) -> None:
            raise kind("no")

        assert str(common.main(click.Command("x", callback=fail), "x", [])) == table[name].split(";")[0]
    capsys.readouterr()


def _all_subclasses(kind: type[SwarmError]) -> list[type[SwarmError]]:
    return [each for child in kind.__subclasses__() for each in (child, *_all_subclasses(child))]


WITHOUT = {"completion", "schema", "equivalence all"}
"""They print no object of their own: a script, a schema."""


def leaves(group: click.Group, name: str = "") -> set[str]:
    found: set[str] = set()
    for word, command in group.commands.items():
        whole = f"{name} {word}".strip()
        found |= leaves(command, whole) if isinstance(command, click.Group) else {whole}
    return found


def test_every_command_has_a_schema() -> None:
    assert set(commands()) == leaves(ctl.swarmctl) - WITHOUT, "name its table in tests/make_schemas.py, and run that"


def test_schemas_are_those_of_the_documents() -> None:
    made = schemas()
    assert set(made) == set(commands())
    for name, schema in made.items():
        text = (FOLDER / f"{name.replace(' ', '-')}.json").read_text()
        assert text == text_of(schema), f"{name}: run `python -m tests.make_schemas`"
        jsonschema.Draft202012Validator.check_schema(schema_of_command(name))
