"""/swarmnode/compare/1: what a member can have another one compute, and what nobody can."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from capabilities.errors import DeadlineExceeded, NotReady, Overloaded, PeerMistake, SwarmError, UsageError
from swarmnode import limits
from swarmnode.cli.render_equivalence import print_matrix
from swarmnode.comparing import messages
from swarmnode.comparing.asking import Asking
from swarmnode.comparing.messages import PROTOCOL, Request, decode_request
from swarmnode.comparing.service import CompareService
from swarmnode.comparing.work import Spent, Work
from swarmnode.config_sections import ComputeConfig
from swarmnode.equivalence.matrix import _in_class, run_matrix
from swarmnode.equivalence.ops import op_level
from swarmnode.equivalence.page import page_of, pair_words, write_page
from swarmnode.equivalence.peers import PeerRow, RemotePeer, Swarm
from swarmnode.equivalence.recipes import Sizes
from swarmnode.equivalence.run import Effort, run_equivalence
from swarmnode.equivalence.targets import find_target, peer_target
from swarmnode.net.interface import PeerId
from swarmnode.net.memory import MemoryHub, MemoryNetwork, open_memory_hub
from swarmnode.swarm.members_only import MembersOnly
from swarmnode.wire import Frame, decode_header, encode_frame
from tests.documents import first_codes, section
from tests.expert_models import quiet, tiny_file
from tests.leading_swarm import KIND, leading_swarm
from tests.report_tools import Tags, keys_of

SMALL = Sizes(("q8_0",), (256, 2048), (1, 40))
WRONG = "tests.equivalence_backends:"
HELD = b"held"


class Told(Work):
    """Answers with the kind of what is asked, after `seconds`, and says that it took those."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.asked: list[Request] = []

    async def answer(self, asked: Request, spent: Spent) -> bytes:
        self.asked.append(asked)
        await trio.sleep(self.seconds)
        spent.seconds = self.seconds
        return encode_frame({"kind": "told"}, HELD)


def row_of(peer: str, name: str) -> PeerRow:
    return PeerRow(peer, name, "ready", None)


def serve(network: MemoryNetwork, work: Work, *, passes_on: bool = False) -> CompareService:
    service = CompareService(network, work, lambda: passes_on)
    service.register(network)
    return service


def asking(network: MemoryNetwork, *backbone: PeerId, **addresses: tuple[str, ...]) -> Asking:
    return Asking(network, lambda peer: addresses.get("of", ()), lambda: backbone)


@asynccontextmanager
async def hub_of(count: int) -> AsyncIterator[tuple[MemoryHub, list[MemoryNetwork]]]:
    async with open_memory_hub() as hub:
        yield hub, [hub.join() for _ in range(count)]


def held_of(peer: PeerId) -> dict[str, Any]:
    return messages.held(str(peer))


# -- real kernels -----------------------------------------------------------------------------------------------------


def from_thread(asker: Asking) -> Callable[..., Frame]:
    """For a comparison that runs in a thread, as swarmctl does in a process."""
    return lambda peer, header, payload: trio.from_thread.run(asker.ask, PeerId(peer), dict(header), payload)


@pytest.mark.parametrize(("factory", "passed"), [("", True), (f"{WRONG}OffByAThousandth", False)])
async def test_operators_of_a_peer_are_compared_by_recipe(tmp_path: Path, factory: str, passed: bool) -> None:
    async with hub_of(2) as (_, (far, near)):
        work = Work("far", ComputeConfig(factory=factory), cast(Any, None), tmp_path)
        serve(far, work)
        await near.connect(far.addresses[0])
        swarm = Swarm(str(near.peer_id), (row_of(str(far.peer_id), "far"),), from_thread(asking(near)))

        def compare() -> dict[str, Any]:
            peer = find_target("peer:far", lambda: swarm, SMALL)
            return op_level(peer, find_target("ggml-cpu"), SMALL, quiet)

        level = await trio.to_thread.run_sync(compare)
    assert level["pass"] is passed
    found = {row["op"] for row in level["ops"]}
    if passed:
        assert found == {"matmul", "swiglu", "softmax", "rms_norm"}
        assert all(row["bit_identical"] for row in level["ops"])
        assert level["ops"][0]["measured"]["a"] == level["ops"][0]["measured"]["b"]
    else:
        assert found == {"matmul", "swiglu"}
        assert any("softmax" in note for note in level["skipped"])


async def test_all_pairs_of_a_swarm_are_compared_by_one_answer_of_each_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hub_of(4) as (_, (near, *others)):
        kinds = {"kitchen": "", "cellar": "", "attic": f"{WRONG}OffByAThousandth"}
        works = [Counted(name, ComputeConfig(factory=kind), tmp_path) for name, kind in kinds.items()]
        for network, work in zip(others, works, strict=True):
            serve(network, work)
            await near.connect(network.addresses[0])
        rows = [
            PeerRow(str(n.peer_id), w.name, "ready", "c", types=SMALL.types) for n, w in zip(others, works, strict=True)
        ]
        rows[0] = replace(rows[0], fitness="quarantined")
        rows.append(PeerRow("nobody", "<b>away</b>", "suspect", None))
        rows.append(PeerRow("left", "gone", "gone", None))
        token = trio.lowlevel.current_trio_token()

        def ask(peer: str, header: Any, payload: bytes) -> Frame:
            return trio.from_thread.run(asker.ask, PeerId(peer), dict(header), payload, trio_token=token)

        asker, swarm = asking(near), Swarm("me", tuple(rows), ask)

        def compare() -> dict[str, Any]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("swarmnode.equivalence.matrix.sizes_of", lambda _file: SMALL)
                return run_matrix(
                    swarm, levels=("op",), model=lambda: tiny_file(KIND), own_model=True,
                    effort=Effort(64, 1, 1), progress=quiet,
                )  # fmt: skip

        result = await trio.to_thread.run_sync(compare)
    assert [work.asked for work in works] == [2, 2, 2]  # products of one type, and what has no weights
    names = {peer["peer_id"]: peer["name"] for peer in result["peers"]}
    passes = {frozenset((names[p["a"]], names[p["b"]])): p["pass"] for p in result["pairs"]}
    assert len(passes) == 6
    assert passes[frozenset(("kitchen", "cellar"))] is True
    assert passes[frozenset(("kitchen", "attic"))] is passes[frozenset(("cellar", "attic"))] is False
    assert passes[frozenset(("kitchen", "<b>away</b>"))] is None
    assert result["pass"] is False
    assert result["absent"] == ["gone"]
    assert [len(group["peers"]) for group in result["groups"]] == [3, 1]
    in_class = {frozenset((names[p["a"]], names[p["b"]])): p["in_class"] for p in result["pairs"]}
    same = {"types": ["q8_0"], "bit_identical": True, "relative_l2": 0.0, "contradicted": False}
    assert in_class[frozenset(("kitchen", "cellar"))] == same
    assert in_class[frozenset(("kitchen", "attic"))]["contradicted"] is True
    assert in_class[frozenset(("kitchen", "<b>away</b>"))] is None
    check_page(result, tmp_path / "all.html")
    capsys.readouterr()
    print_matrix(result)
    printed = capsys.readouterr().out
    assert printed.count("pass, same bits") == 2
    assert "kitchen, op: FAIL" in printed
    assert printed.count("are of one numeric class, and differ in q8_0") == 2
    assert "not there: gone" in printed
    assert "kitchen is quarantined by what was measured of its work" in " ".join(printed.split())
    monkeypatch.setattr("swarmnode.cli.render_equivalence.COLUMNS", 60)
    print_matrix(result)
    narrow = capsys.readouterr().out
    assert "…" not in narrow
    assert [line.split("  ")[0] for line in narrow.splitlines()].count("cellar, kitchen") == 1
    assert narrow.count("pass, same bits") == 1
    codes = first_codes(section("status.md", "`swarmctl equivalence --all --json`"))
    assert set(codes) == {key for key in keys_of(result) if not key.startswith("pairs[].levels[].")} | {
        "pairs[].levels[]"
    }


def check_page(result: dict[str, Any], path: Path) -> None:
    write_page(path, result)
    text, tags = path.read_text(), Tags(path.read_text())
    assert tags.open == []
    assert tags.fetched == []
    assert "b" not in tags.tags
    assert "&lt;b&gt;away" in text
    assert "kitchen is quarantined by what was measured of its work" in text
    assert "Not compared: layer, logits, decisions, generation, task" in text
    assert tags.tags.count("details") == len(result["pairs"])
    assert text.count("pass, same bits") == 2  # both halves of the matrix
    assert text.count('class="none">not judged</td>') == 6


def test_a_cell_tells_of_what_the_classes_are_of() -> None:
    """Two kernels of one class for the model's weights may differ in others, which nobody computes there."""

    def row(op: str, kind: str | None, relative: float) -> dict[str, Any]:
        return {"op": op, "type": kind, "bit_identical": relative == 0, "relative_l2": relative}

    ops = [row("matmul", "q4_1", 0.0), row("matmul", "f16", 3e-7), row("swiglu", None, 0.0)]
    ops.append(row("rms_norm", None, 2e-8))  # the trunk's, and of no class
    one, other = (PeerRow(name, name, "ready", "c", types=("q4_1",)) for name in "ab")
    levels = [{"level": "op", "ops": ops}]
    pair = {"pass": True, "levels": levels, "in_class": _in_class(one, other, levels)}
    assert pair_words(pair) == "pass, same bits in q4_1"
    assert not pair["in_class"]["contradicted"]  # type: ignore[index]
    ops[2] = row("swiglu", None, 5e-8)
    assert _in_class(one, other, levels)["contradicted"]  # type: ignore[index]
    apart = _in_class(one, replace(other, numeric_class="d"), levels)
    assert pair_words({**pair, "in_class": apart}) == "pass, 5e-08"
    assert not apart["contradicted"]  # type: ignore[index]
    for unknown in (replace(other, numeric_class=None), replace(other, types=("f16",)), replace(other, types=())):
        assert _in_class(one, unknown, levels) is None
    wide = (replace(one, types=("q4_1", "q5_K")), replace(other, types=("q4_1", "q5_K")))
    assert _in_class(*wide, levels) is None, "one of the types was not compared"
    assert pair_words({**pair, "in_class": None}) == "pass, 3e-07"


class Counted(Work):
    def __init__(self, name: str, config: ComputeConfig, folder: Path) -> None:
        super().__init__(name, config, cast(Any, None), folder)
        self.name = name
        self.asked = 0

    async def answer(self, asked: Request, spent: Spent) -> bytes:
        self.asked += 1
        return await super().answer(asked, spent)


class SlightlyOff(GgmlExperts):
    """One expert of one layer computes something a little different."""

    LAYER, EXPERT = 1, 5

    def __init__(self) -> None:
        super().__init__(Device("CPU"))
        self.off = False

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        y = super().compute(layer, x, tokens, experts, ask_f32=ask_f32)
        if self.off and layer == self.LAYER:
            y[experts == self.EXPERT] *= np.float32(1.01)
        return y


async def test_a_models_experts_are_computed_where_they_are_held(tmp_path: Path) -> None:
    async with leading_swarm(tmp_path, workers=1) as swarm, swarm.led(1):
        await swarm.until_ready()
        far = swarm.hands[0]
        serve(far.network, Work("far", ComputeConfig(), far.worker, tmp_path))
        rows = (row_of(far.name, "far"),)
        known = Swarm("me", rows, from_thread(asking(swarm.network)))
        before = far.worker.experts.statistics.dispatches

        def compare(quantisation: str = "f32") -> dict[str, Any]:
            model = tiny_file(KIND, quantisation)
            return run_equivalence(
                "peer:far", "ggml-cpu", levels=("layer", "logits"), model=lambda: model, own_model=True,
                tokens=64, prompts=1, answer_tokens=1, progress=quiet, swarm=lambda: known,
            )  # fmt: skip

        result = await trio.to_thread.run_sync(compare)
        assert far.worker.experts.statistics.dispatches == before  # comparisons are no dispatches
        other = await trio.to_thread.run_sync(compare, "q8_0")
    assert result["pass"], result
    share = result["experts"]["a"]
    assert share["held"] == share["of"] > 0
    assert share["rows"] == share["rows_of"] > 0
    assert result["experts"]["b"] is None
    assert result["levels"][0]["free"]["first_layer"] is None  # one numeric class: the same bits
    assert result["levels"][0]["divergence"] == {"first": None, "worst": None}
    assert other["pass"] is None
    assert "experts of another model" in other["levels"][0]["reason"]


async def test_the_first_layer_expert_and_peer_that_part_are_named(tmp_path: Path) -> None:
    made: list[SlightlyOff] = []

    def make() -> SlightlyOff:
        made.append(SlightlyOff())
        return made[-1]

    async with leading_swarm(tmp_path, workers=0) as swarm, swarm.led(1):
        far = swarm.add_worker(make)
        await swarm.until_ready()
        made[-1].off = True  # once it has been proven
        serve(far.network, Work("far", ComputeConfig(), far.worker, tmp_path))
        known = Swarm("me", (row_of(far.name, "far"),), from_thread(asking(swarm.network)))

        def compare() -> dict[str, Any]:
            return run_equivalence(
                "ggml-cpu", "peer:far", levels=("layer",), model=lambda: tiny_file(KIND), own_model=False,
                tokens=64, prompts=1, answer_tokens=1, progress=quiet, swarm=lambda: known,
            )  # fmt: skip

        result = await trio.to_thread.run_sync(compare)
    (level,) = result["levels"]
    expected = {"layer": SlightlyOff.LAYER, "expert": SlightlyOff.EXPERT, "peer_a": None, "peer_b": "far"}
    for which in ("first", "worst"):
        off = level["divergence"][which].pop("relative_l2")
        assert level["divergence"][which] == expected
        assert 0.009 < off < 0.011
        level["divergence"][which]["relative_l2"] = off
    assert "<td>far</td>" in page_of(result)


class Slices(GgmlExperts):
    """Counts the rows of each call, and takes its time."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(Device("CPU"))
        self.rows = rows

    def compute(self, layer: int, x: F32, tokens: I32, experts: I32, *, ask_f32: bool = False) -> F32:
        self.rows.append(len(experts))
        time.sleep(0.02)
        return super().compute(layer, x, tokens, experts, ask_f32=ask_f32)


async def test_a_dispatch_waits_for_a_few_rows_at_most_and_then_gets_most_of_the_time(tmp_path: Path) -> None:
    rows: list[int] = []
    async with leading_swarm(tmp_path, workers=0) as swarm, swarm.led(1):
        far = swarm.add_worker(lambda: Slices(rows))
        await swarm.until_ready()
        serve(far.network, Work("far", ComputeConfig(), far.worker, tmp_path))
        asker, epochs = asking(swarm.network), far.worker.epochs
        said = messages.decode_held(await asker.ask(PeerId(far.name), messages.held(far.name)))
        layer, n = 0, 64
        n_in = swarm.leading.active.manifest.by_layer[layer].n_in if swarm.leading.active else 0
        experts = np.repeat(np.array(said.experts.experts_of(layer)[:4], np.int32), n)
        payload = messages.rows_payload(
            np.ones((n, n_in), np.float32), np.tile(np.arange(n, dtype=np.int32), 4), experts
        )
        rows.clear()
        seen: list[int] = []
        ended = trio.Event()

        async def dispatches() -> None:
            """What the worker's other service does while a request runs."""
            while not ended.is_set():
                before = len(rows)
                async with epochs.computing:
                    seen.append(len(rows) - before)
                    far.worker.experts.statistics.dispatches += 1
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dispatches)
            started = trio.current_time()
            header = messages.rows(far.name, said.experts.model, layer, n, len(experts))
            answer = await asker.ask(PeerId(far.name), header, payload)
            took = trio.current_time() - started
            ended.set()
        assert len(messages.decode_rows_answer(answer, len(experts), n_in)) == len(experts)
    assert max(rows) <= limits.COMPARE_SLICE_ROWS
    assert sum(rows) == len(experts)
    assert max(seen) <= 1
    assert took > len(rows) * 0.02 * limits.COMPARE_YIELD_FACTOR  # each slice was followed by its pause


async def test_a_peer_without_experts_is_not_judged(tmp_path: Path) -> None:
    async with leading_swarm(tmp_path, workers=1) as swarm:
        far = swarm.hands[0]
        serve(far.network, Work("far", ComputeConfig(), far.worker, tmp_path))
        await far.network.connect(swarm.network.addresses[0])
        known = Swarm("me", (row_of(far.name, "far"),), from_thread(asking(swarm.network)))

        def compare(model: Callable[[], Path]) -> dict[str, Any]:
            return run_equivalence(
                "peer:far", "ggml-cpu", levels=("logits",), model=model, own_model=False,
                tokens=64, prompts=1, answer_tokens=1, progress=quiet, swarm=lambda: known,
            )  # fmt: skip

        result = await trio.to_thread.run_sync(compare, lambda: tiny_file(KIND))
    (level,) = result["levels"]
    assert level["pass"] is None is result["pass"]
    assert "far holds no experts now" in level["reason"]


# -- who may ask, and how much ----------------------------------------------------------------------------------------


async def test_a_peer_that_is_no_member_is_not_answered(autojump_clock: trio.testing.MockClock) -> None:
    async with hub_of(2) as (_, (far, near)):
        work = Told()
        CompareService(far, work, lambda: False).register(MembersOnly(far, lambda peer: False))
        await near.connect(far.addresses[0])
        with pytest.raises(NotReady, match="cannot be reached"):
            await asking(near).ask(far.peer_id, held_of(far.peer_id))
        assert work.asked == []
    async with hub_of(2) as (_, (far, near)):
        CompareService(far, work, lambda: False).register(MembersOnly(far, lambda peer: True))
        await near.connect(far.addresses[0])
        assert (await asking(near).ask(far.peer_id, held_of(far.peer_id))).payload == HELD


async def test_an_asker_gets_no_more_than_its_allowance(autojump_clock: trio.testing.MockClock) -> None:
    async with hub_of(3) as (_, (far, near, other)):
        work = Told(30.0)
        serve(far, work)
        for network in (near, other):
            await network.connect(far.addresses[0])
        asker = asking(near)
        started = trio.current_time()
        while trio.current_time() < started + 3_600:
            answer = await asker.ask(far.peer_id, held_of(far.peer_id))
            if "error" in answer.header:
                with pytest.raises(Overloaded) as caught:
                    messages.check_error(answer)
                await trio.sleep(caught.value.details["retry_after_s"])
        assert len(work.asked) * 30 < limits.COMPARE_ASKER_BURST_SECONDS + 3_600 * limits.COMPARE_ASKER_RATE + 60
        assert (await asking(other).ask(far.peer_id, held_of(far.peer_id))).payload == HELD


async def test_what_takes_too_long_ends_and_is_charged(autojump_clock: trio.testing.MockClock) -> None:
    async with hub_of(2) as (_, (far, near)):
        serve(far, Told(10_000.0))
        await near.connect(far.addresses[0])
        started = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            messages.check_error(await asking(near).ask(far.peer_id, held_of(far.peer_id)))
        assert trio.current_time() - started < limits.COMPARE_SECONDS_MAX + 1


async def test_one_piece_of_work_at_a_time_and_few_that_wait(autojump_clock: trio.testing.MockClock) -> None:
    crowd = 12
    async with hub_of(crowd + 1) as (_, (far, *others)):
        work, answers = Told(1.0), list[Frame]()
        serve(far, work)

        async def ask(network: MemoryNetwork) -> None:
            answers.append(await asking(network).ask(far.peer_id, held_of(far.peer_id)))

        started = trio.current_time()
        async with trio.open_nursery() as nursery:
            for network in others:
                await network.connect(far.addresses[0])
                nursery.start_soon(ask, network)
        refused = [answer for answer in answers if "error" in answer.header]
        assert len(refused) == crowd - 1 - limits.COMPARE_WAITING_MAX
        assert len(work.asked) == crowd - len(refused)
        assert trio.current_time() - started >= len(work.asked)  # one after the other


# -- ways to a peer ---------------------------------------------------------------------------------------------------


async def test_a_backbone_peer_passes_a_request_on_where_no_way_leads_to_the_peer() -> None:
    async with hub_of(4) as (hub, (leader, near, far, idle)):
        work = Told()
        serve(leader, Told(), passes_on=True)
        serve(idle, Told(), passes_on=True)
        serve(far, work)
        for network in (near, far):
            await network.connect(leader.addresses[0])
        await near.connect(idle.addresses[0])
        hub.cut(near.peer_id, far.peer_id)
        asker = Asking(near, lambda peer: far.addresses, lambda: (idle.peer_id, leader.peer_id))
        answer = await asker.ask(far.peer_id, held_of(far.peer_id))  # the idle one cannot, the leader can
        assert answer.payload == HELD
        assert len(work.asked) == 1
        with pytest.raises(NotReady, match="nobody"):
            await asker.ask(PeerId("nobody"), held_of(PeerId("nobody")))


async def test_a_peer_that_is_not_connected_is_dialed() -> None:
    async with hub_of(2) as (_, (far, near)):
        serve(far, Told())
        answer = await Asking(near, lambda peer: far.addresses, lambda: ()).ask(far.peer_id, held_of(far.peer_id))
        assert answer.payload == HELD


async def test_a_worker_passes_nothing_on() -> None:
    async with hub_of(3) as (_, (worker, near, far)):
        work = Told()
        serve(worker, Told())
        serve(far, work)
        for network in (near, far):
            await network.connect(worker.addresses[0])
        with pytest.raises(PeerMistake, match="only backbone peers"):
            messages.check_error(await asking(near, worker.peer_id).ask(far.peer_id, held_of(far.peer_id)))
        assert work.asked == []


async def test_a_node_asks_itself() -> None:
    async with hub_of(1) as (_, (me,)):
        serve(me, Told())
        assert (await asking(me).ask(me.peer_id, held_of(me.peer_id))).payload == HELD


# -- bytes ------------------------------------------------------------------------------------------------------------


def decoded(header: dict[str, Any], payload: bytes = b"") -> Request:
    data = encode_frame(header)[8:]
    return decode_request(Frame(decode_header(data, limits.COMPARE_REQUEST), payload))


@pytest.mark.parametrize(
    "change",
    [
        {"type": "q9_9"},
        {"lengths": []},
        {"lengths": [limits.COMPARE_LENGTH_MAX + 1]},
        {"lengths": [256] * (limits.COMPARE_LENGTHS_MAX + 1)},
        {"widths": []},
        {"widths": [limits.COMPARE_WIDTH_MAX + 1]},
        {"widths": [512] * 8, "lengths": [256] * 8},
        {"kind": "weights"},
    ],
)
def test_more_than_the_limits_is_refused(change: dict[str, Any]) -> None:
    fine = messages.products("peer", "q8_0", (256, 2048, 8192), (1, 2, 5, 9, 33, 128, 512))
    decoded(fine)
    with pytest.raises(PeerMistake):
        decoded({**fine, **change})


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=20) | st.floats(),
    lambda inner: st.lists(inner, max_size=9),
    max_leaves=10,
)


@settings(max_examples=60)
@given(
    st.sampled_from(["products", "elements", "held", "rows"]),
    st.dictionaries(
        st.sampled_from(["type", "lengths", "widths", "row_widths", "model", "layer", "tokens", "rows"]), ODD
    ),
    st.binary(max_size=40),
)
def test_a_request_is_fine_or_a_peers_mistake(kind: str, fields: dict[str, Any], payload: bytes) -> None:
    with suppress(PeerMistake):
        decode_request(Frame({"kind": kind, "for": "p", **fields}, payload))


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(["done", "inputs_0", "accumulation", "seconds", "layers", "rows"]), ODD),
       st.binary(max_size=80))  # fmt: skip
def test_an_answer_is_fine_or_a_peers_mistake(fields: dict[str, Any], payload: bytes) -> None:
    frame = Frame({"kind": "x", **fields}, payload)
    asked = decode_request(Frame(messages.products("p", "q8_0", (32,), (1,)), b""))
    for decode in (
        functools.partial(messages.decode_operators, asked=cast(Any, asked)),
        messages.decode_held,
        lambda frame: messages.decode_rows_answer(frame, 2, 4),
    ):
        with suppress(PeerMistake):
            decode(frame)


def test_rows_that_are_not_finite_are_a_peers_mistake() -> None:
    rows = np.array([[1.0, np.nan]], np.float32)
    with pytest.raises(PeerMistake, match="finite"):
        messages.decode_rows_answer(Frame({"kind": "rows", "rows": 1}, rows.tobytes()), 1, 2)


def test_a_peers_own_configuration_is_no_wrong_usage_here() -> None:
    error = messages.encode_error(UsageError("there is no such device"))
    with pytest.raises(SwarmError) as caught:
        messages.check_error(Frame(decode_header(error[8:], limits.COMPARE_REPLY), b""))
    assert type(caught.value) is NotReady


# -- names ------------------------------------------------------------------------------------------------------------


def test_peers_are_named_by_name_by_id_and_by_its_end() -> None:
    rows = (row_of("12D3KooWabcd", "kitchen"), row_of("12D3KooWefgh", "cellar"), row_of("12D3KooWijkl", "cellar"))
    swarm = Swarm("me", rows, cast(Any, None))
    assert [swarm.find(words) for words in ("kitchen", "12D3KooWabcd", "Wabcd")] == [rows[0]] * 3
    assert swarm.find("efgh") == rows[1]
    with pytest.raises(UsageError, match="2 peers"):
        swarm.find("cellar")
    with pytest.raises(UsageError, match="no peer attic") as caught:
        swarm.find("attic")
    assert "kitchen" in str(caught.value.hint)
    with pytest.raises(UsageError, match="no peer d"):
        swarm.find("d")
    assert peer_target(swarm, rows[0], SMALL).name == "peer:kitchen"
    assert isinstance(peer_target(swarm, rows[0], SMALL).afar, RemotePeer)
    assert PROTOCOL.startswith("/swarmnode/compare/")
