"""Requests that are kept, and `swarmctl verify`: an answer is proven, a wrong one found, and privacy kept."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.gguf_file import GGUFFile
from capabilities.errors import NoLeader, UsageError
from capabilities.numeric_class import named
from scheduler.requests import Timings, Usage
from scheduler.sampling import SamplingParams
from swarmnode.cli import common, model_at_hand
from swarmnode.cli.ctl import swarmctl
from swarmnode.cli.render_requests import print_requests
from swarmnode.kept_requests import KeepingAsker, KeptRequest, KeptRequests, token_hash
from swarmnode.local_swarm import LocalNode
from swarmnode.prompt_messages import Ask, Done, Failed, Reply, Token
from swarmnode.verify import compared, first_difference, kernels_differ, verdict, why_not_here
from tests.documents import first_codes, section
from tests.swarm_tools import Served, serving

MODEL = "ab" * 32


def kept(number: int, *tokens: int) -> KeptRequest:
    ask = Ask(f"req-{number:016x}", SamplingParams(seed=number), prompt="a secret", stop=("\n",))
    return KeptRequest(ask, float(number), tokens, "stop", "leader", MODEL, prompt_tokens=3)


def test_only_the_newest_are_kept_and_nobody_else_may_read_them(tmp_path: Path) -> None:
    store = KeptRequests(tmp_path / "requests", 3)
    for number in range(5):
        store.add(kept(number, 1, 2, number))
        os.utime(tmp_path / "requests" / f"req-{number:016x}.json", (number, number))
    assert store.all() == [kept(n, 1, 2, n) for n in (4, 3, 2)]
    assert store.get(None) == kept(4, 1, 2, 4)
    assert store.get("3") == kept(3, 1, 2, 3)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "requests").iterdir()}
    assert modes == {0o600}
    assert stat.S_IMODE((tmp_path / "requests").stat().st_mode) == 0o700


def test_the_list_shows_names_whole(capsys: pytest.CaptureFixture[str]) -> None:
    requests = [kept(1).summary(), kept(2).summary()]
    print_requests({"keep": 100, "requests": requests})
    shown = capsys.readouterr().out
    assert all(request["request_id"] in shown.split() for request in requests)
    assert all(line == line.rstrip() for line in shown.splitlines()), "what fills a table's lines up is not for a pipe"


def test_forgetting(tmp_path: Path) -> None:
    store = KeptRequests(tmp_path, 9)
    for number in range(3):
        store.add(kept(number))
    assert store.forget(f"req-{1:016x}") == 1
    with pytest.raises(UsageError, match="no request"):
        store.get(f"req-{1:016x}")
    with pytest.raises(UsageError, match="no request"):
        store.forget("req-")
    assert store.forget(None) == 2
    assert not list(tmp_path.iterdir())


def test_none_are_kept_where_none_are_to_be(tmp_path: Path) -> None:
    KeptRequests(tmp_path, 5).add(kept(1))
    KeptRequests(tmp_path, 0).add(kept(2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"ask": 1}', b"\xff" * 50])
def test_a_damaged_file_is_named_and_left_out(tmp_path: Path, damage: bytes) -> None:
    store = KeptRequests(tmp_path, 9)
    store.add(kept(1))
    store.add(kept(2))
    path = tmp_path / f"req-{2:016x}.json"
    path.write_bytes(damage)
    assert store.all() == [kept(1)]
    with pytest.raises(UsageError, match="is damaged") as error:
        store.get("2")
    assert "swarmctl forget" in error.value.hint
    assert store.forget(path.stem) == 1


def test_no_path_comes_from_a_name(tmp_path: Path) -> None:
    store = KeptRequests(tmp_path / "requests", 9)
    ask = Ask("../escaped", SamplingParams(), prompt="x")
    store.add(KeptRequest(ask, 0.0, (), "stop", "", None))
    assert not list(tmp_path.rglob("*.json"))


class Says:
    """An asker with these replies."""

    leader = "12D3leader"

    def __init__(self, *replies: Reply) -> None:
        self._replies = replies

    @asynccontextmanager
    async def replies(self, ask: Ask) -> AsyncIterator[AsyncIterator[Reply]]:
        async def all_of_them() -> AsyncIterator[Reply]:
            for reply in self._replies:
                yield reply

        yield all_of_them()


DONE = Done("stop", "", Usage(4, 2), Timings(0.0, 0.0, 0.0), mixed=True)


async def asked(store: KeptRequests, *replies: Reply) -> list[Reply]:
    asker = KeepingAsker(Says(*replies), store, lambda: MODEL)
    async with asker.replies(Ask("req-1", SamplingParams(), prompt="x")) as answer:
        return [reply async for reply in answer]


async def test_what_came_is_kept_before_the_end_is_seen(tmp_path: Path) -> None:
    store = KeptRequests(tmp_path, 9)
    replies = [Token(0, 7, "a"), Token(1, 8, "b"), DONE]
    assert await asked(store, *replies) == replies
    (found,) = store.all()
    assert (found.tokens, found.mixed, found.model, found.prompt_tokens) == ((7, 8), True, MODEL, 4)


async def test_an_answer_that_broke_off_is_kept_and_a_refusal_is_not(tmp_path: Path) -> None:
    store = KeptRequests(tmp_path, 9)
    await asked(store, Failed(NoLeader("nobody")))
    assert store.all() == []
    await asked(store, Token(0, 7, "a"), Failed(NoLeader("lost")))
    (found,) = store.all()
    assert (found.tokens, found.finish_reason) == ((7,), "error")


async def test_a_disk_that_takes_nothing_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert await asked(KeptRequests(tmp_path / "file", 9), Token(0, 7, "a"), DONE) == [Token(0, 7, "a"), DONE]


def test_a_verdict_needs_llama_cpp() -> None:
    one, nothing = kept(1, 5, 6), compared(kept(1), None, "no file")
    same = compared(one, (5, 6), None)
    assert verdict(one, same, same)["verified"] is True
    assert verdict(one, nothing, same)["verified"] is True
    assert verdict(one, same, nothing)["verified"] is None
    for other in ((5, 7), (5,), (5, 6, 7)):
        differs = compared(one, other, None)
        assert verdict(one, differs, same)["verified"] is True, "llama.cpp decides"
        assert "asked again" in verdict(one, differs, same)["reason"]
        assert verdict(one, same, differs)["verified"] is False
        assert verdict(one, differs, nothing)["verified"] is False
    assert first_difference((5, 6), (5,)) == {"index": 1, "kept": 6, "other": None}
    assert token_hash((1, 256)) == hashlib.sha256(b"\1\0\0\0\0\1\0\0").hexdigest()


def test_why_an_honest_answer_need_not_be_llama_cpps_here() -> None:
    mixed, plain = replace(kept(1, 5, 6), mixed=True), kept(1, 5, 6)
    same, other = compared(plain, (5, 6), None), compared(plain, (5, 7), None)
    assert "peers of another numeric class than the leader's" in verdict(mixed, same, other)["reason"]
    assert "numeric class" not in verdict(plain, same, other)["reason"]
    assert "this machine's kernels are of another" in verdict(plain, same, other, other_kernels=True)["reason"]
    assert "numeric class" not in verdict(plain, other, same, other_kernels=True)["reason"], "llama.cpp agrees"


def test_kernels_differ_where_both_run_ggmls_and_two_classes_were_measured() -> None:
    avx512, avx2 = (named("q4_1", digest * 32) for digest in ("ab", "cd"))

    def status(own: str | None, its: str | None, name: str = "ggml-cpu") -> dict[str, Any]:
        backends = [{"name": "ggml-cpu", "numeric_class": own}], [{"name": name, "numeric_class": its}]
        rows = [{"peer_id": peer, "backends": each} for peer, each in zip(("me", "L"), backends, strict=True)]
        return {"self": "me", "peers": rows}

    assert kernels_differ(status(avx512, avx2), "L")
    for told in (status(avx2, avx2), status(avx2, None), status(None, avx2), status(avx512, avx2, "ggml-vulkan")):
        assert not kernels_differ(told, "L")
    assert not kernels_differ(status(avx512, avx2), "gone")
    assert not kernels_differ({"self": "me", "peers": [{"peer_id": "me", "backends": []}]}, "me")


def test_a_model_that_is_not_there_or_too_large_is_not_loaded(tmp_path: Path) -> None:
    assert "No such file" in str(why_not_here(tmp_path / "none.gguf"))
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    first.write_bytes(b"x")
    with second.open("wb") as file:
        file.truncate(1 << 43)
    assert "GiB" in str(why_not_here(first))
    assert why_not_here(first.rename(tmp_path / "m.gguf")) is None


# --- With real daemons ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("verified"), workers=1, own_copy=True) as swarm:
        yield swarm


def run(node: LocalNode, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    status = common.main(swarmctl, "swarmctl", [*words, "--json", "--data-dir", str(node.folder)])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, answer


def test_a_true_answer_is_proven(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("verify", "--prompt", "Tell me more", "--max-tokens", "20", "--temperature", "1", "--seed", "5")
    status, report = run(served.leader, capsys, *words)
    assert (status, report["verified"]) == (0, True), report["reason"]
    assert report["token_hash"] == report["swarm"]["token_hash"] == report["undivided"]["token_hash"]
    assert run(served.leader, capsys, "verify", report["request_id"])[1]["verified"] is True
    newest, *_ = run(served.leader, capsys, "requests")[1]["requests"]
    assert newest["request_id"] == report["request_id"], "a proof asks again, and leaves no trace"


def test_the_report_says_what_is_documented() -> None:
    summary, report = set(kept(1).summary()), verdict(kept(1, 5), *2 * [compared(kept(1, 5), (6,), None)])
    assert {code.removeprefix("requests[].") for code in documented("requests")} == {"keep", *summary}
    nested = {f"{side}.{key}" for side in ("swarm", "undivided") for key in report[side]}
    assert documented("verify") == (set(report) - summary - {"swarm", "undivided"}) | nested


def documented(command: str) -> set[str]:
    return set(first_codes(section("status.md", f"`swarmctl {command} --json`")))


def test_a_wrong_answer_is_found(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    worker = served.workers[0]
    words = ("verify", "--prompt", "Hello", "--max-tokens", "9", "--temperature", "0", "--model", str(served.model))
    status, report = run(worker, capsys, *words)
    assert (status, report["verified"]) == (0, True)
    path = worker.folder / "requests" / f"{report['request_id']}.json"
    content = json.loads(path.read_text())
    content["tokens"][4] += 1
    path.write_text(json.dumps(content))
    status, report = run(worker, capsys, "verify", "--model", str(served.model))
    assert (status, report["verified"]) == (1, False)
    assert report["undivided"]["first_difference"]["index"] == report["swarm"]["first_difference"]["index"] == 4


def test_without_the_models_file_it_is_fetched_for_the_proof(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = served.workers[0]
    status, report = run(worker, capsys, "verify", "--prompt", "Hi", "--max-tokens", "5")
    assert (status, report["verified"]) == (0, True), report["reason"]
    monkeypatch.setattr(model_at_hand, "FETCH_BYTES", 1000)
    status, report = run(worker, capsys, "verify")
    assert (status, report["verified"], report["swarm"]["first_difference"]) == (0, None, None)
    assert "--fetch" in report["reason"]
    assert run(worker, capsys, "verify", "--fetch")[1]["verified"] is True
    assert not [*worker.folder.rglob("verify-*")], "what was fetched goes again"
    monkeypatch.setattr(model_at_hand, "HEADROOM", 1e9)
    assert "free memory" in run(worker, capsys, "verify", "--fetch")[1]["reason"]


def test_requests_are_forgotten(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    kept = run(served.workers[0], capsys, "requests")[1]["requests"]
    assert run(served.workers[0], capsys, "forget", kept[0]["request_id"]) == (0, {"forgotten": 1})
    assert run(served.workers[0], capsys, "forget") == (0, {"forgotten": len(kept) - 1})
    assert run(served.workers[0], capsys, "forget", "--all") == (0, {"forgotten": 0})
    assert run(served.workers[0], capsys, "requests") == (0, {"keep": 100, "requests": []})
    assert run(served.workers[0], capsys, "verify")[0] == 2


def test_the_model_is_fetched_whole(served: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "whole.gguf"
    status, result = run(served.workers[0], capsys, "model", "fetch", str(target))
    assert (status, result["path"], result["bytes"]) == (0, str(target), target.stat().st_size)
    with GGUFFile.open(target) as whole, GGUFFile.open(served.model) as own:
        assert {name: bytes(whole.data(info)) for name, info in whole.tensors.items()} == {
            name: bytes(own.data(info)) for name, info in own.tensors.items()
        }
    assert [path.name for path in tmp_path.iterdir()] == ["whole.gguf"]
    status, answer = run(served.workers[0], capsys, "model", "fetch", str(target))
    assert (status, "exists" in answer["error"]["message"]) == (2, True)
    status, answer = run(served.leader, capsys, "model", "fetch", str(tmp_path / "other.gguf"))
    assert (status, "has the model's file" in answer["error"]["message"]) == (2, True)
