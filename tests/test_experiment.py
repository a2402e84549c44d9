"""The audit experiment: cheats cheat, real audits find them, and what the trials prove is what is reported."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pytest

from backends.device import Device
from backends.experts import F32, I32, GgmlExperts
from backends.numpy_reference import NumpyExperts
from capabilities.agreement import compare
from capabilities.errors import UsageError
from swarmnode.equivalence.restarts import IN_ALL_MAX
from swarmnode.equivalence.targets import find_target
from swarmnode.experiment import daemons
from swarmnode.experiment import run as run_module
from swarmnode.experiment.cheats import CHEATS, Cheat, CheatKind, Zeros
from swarmnode.experiment.report import Kept, cheat_summary, honest_summary, late_max
from swarmnode.experiment.run import Effort, run_experiment
from tests.documents import ROOT, first_codes, rows, section
from tests.expert_models import quiet, take_apart, tiny_file
from tests.schema_checks import conforms
from tests.test_documented_answers import keys_of
from tests.test_equivalence_restarts import dying

QUANTISATION = "q4_1"


class Saint(Cheat):
    """Never cheats, whatever it is called."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        return right


class Liar(Zeros):
    """Cheats, and is called honest."""

    def __init__(self, *, threads: int) -> None:
        super().__init__(threads=threads, every=1, honest_first=20)


class Seldom(Zeros):
    """Cheats in one dispatch of five, and says so."""

    every = 5


class Overflows(Cheat):
    """Honest, but for values that are not finite now and then."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        rows = right.copy()
        rows[-1, 7] = np.inf
        return rows


class Breaks(Cheat):
    """Cannot compute, or (`Broken`) cannot even be made."""

    def wrong(self, layer: int, x: F32, tokens: I32, experts: I32, right: F32, ask_f32: bool) -> F32:
        raise RuntimeError("boom")


class Broken:
    def __init__(self, *, threads: int) -> None:
        raise ValueError("no device")


class OverflowsSometimes(Overflows):
    every = 5

    def __init__(self, *, threads: int) -> None:
        super().__init__(threads=threads, honest_first=0)


# -- cheats ------------------------------------------------------------------------------------------------------------


def work(seed: int = 1) -> tuple[F32, I32, I32]:
    """Rows of four tokens for two held experts each."""
    layer = take_apart("olmoe", QUANTISATION).layer
    x = np.random.default_rng(seed).standard_normal((4, layer.n_in), np.float32)
    return x, np.repeat(np.arange(4, dtype=np.int32), 2), np.tile(np.array([0, 2], np.int32), 4)


@pytest.mark.parametrize("kind", CHEATS, ids=[kind.name for kind in CHEATS])
def test_a_cheat_is_far_off_when_it_cheats_and_the_very_bits_when_not(kind: CheatKind) -> None:
    model, right = take_apart("olmoe", QUANTISATION), GgmlExperts(Device("CPU", threads=1))
    cheat = kind.make(every=2, honest_first=3)
    layer = model.load(right, [0, 2, 3])
    model.load(cheat, [0, 2, 3])
    off = []
    for number in range(24):
        x, tokens, experts = work(number)
        expected = right.compute(layer.layer, x, tokens, experts)
        off.append(compare(cheat.compute(layer.layer, x, tokens, experts), expected))
    assert all(each.bit_identical for each in off[:3])
    wrong = [each for each in off[3:] if not each.bit_identical]
    assert 4 <= len(wrong) <= 17
    assert min(each.worst_relative_l2 for each in wrong) > 5e-3
    cheat.close()
    right.close()


def test_cheats_with_weights_keep_type_and_layout() -> None:
    model = take_apart("olmoe", QUANTISATION)
    for kind in CHEATS:
        reference = kind.make(lambda: NumpyExperts("float32"), every=1, honest_first=0)
        model.load(reference, [0, 2])
        assert reference.held(model.layer.layer) == {0, 2}
        x, tokens, experts = work()
        rows = reference.compute(model.layer.layer, x, tokens, experts)
        assert rows.dtype == np.float32
        assert rows.shape == (8, model.layer.n_out)
        reference.close()


# -- the experiment ----------------------------------------------------------------------------------------------------

QUICK = Effort(trials=4, dispatches=2000, audits=60, minutes=1)


def run(cheats: list[str] | None, honest: list[str] | None, effort: Effort = QUICK, resume: Path | None = None) -> Any:
    file = tiny_file("olmoe", QUANTISATION)
    return run_experiment(file, cheats, honest, seed=3, effort=effort, resume=resume, progress=quiet)


def test_cheats_are_found_and_honest_peers_are_not(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    found = run(["zeros", "requantised", "wrong-expert-1-in-10"], ["ggml-cpu", "reference:f32"], resume=kept)
    assert found["pass"], found["reason"]
    new, trusted, *_ = found["cheats"]
    assert (new["name"], new["standing"], new["trials"], new["missed"]) == ("zeros", "new", 4, 0)
    assert new["suspected"] == {"p50": 1, "p99": 1, "max": 1}
    assert 6 <= new["out"]["p50"] <= 10
    assert trusted["suspected"]["max"] > 1, "what was trusted is audited seldom"
    for honest in found["honest"]:
        assert (honest["audits"], honest["quarantined"]) == (60, 0)
        assert honest["quarantined_bound"] == pytest.approx(3 / 60)
    assert found["honest"][0]["rows"]["same"] > 0

    lines = kept.read_text().splitlines()
    again = run(["zeros", "requantised", "wrong-expert-1-in-10"], ["ggml-cpu", "reference:f32"], resume=kept)
    assert again == found
    assert kept.read_text().splitlines() == lines, "nothing was done twice"
    with pytest.raises(UsageError, match="another experiment"):
        run(["zeros"], None, Effort(1, 7, 1, 1), kept)


def test_what_is_missed_or_convicted_wrongly_fails() -> None:
    missed = run(["tests.test_experiment:Saint"], None, Effort(1, 30, 1, 1))
    assert not missed["pass"]
    assert "missed" in missed["reason"]
    assert missed["cheats"][0]["out"] == {"p50": None, "p99": None, "max": None}
    convicted = run(None, ["tests.test_experiment:Liar"])
    assert not convicted["pass"]
    assert "honest and convicted: tests.test_experiment:Liar" in convicted["reason"]
    assert convicted["honest"][0]["quarantined"] == 1


def test_a_cheat_of_ones_own_says_how_often_it_cheats() -> None:
    found = run(["tests.test_experiment:Seldom"], None)
    assert found["pass"], found["reason"]
    assert [each["every"] for each in found["cheats"]] == [5, 5]
    assert found["cheats"][0]["late"] is None
    assert found["cheats"][0]["out"]["p50"] > 10, "every fifth is wrong, and six convict"


def test_what_is_not_finite_is_refused_and_nobody_recomputes_it() -> None:
    found = run(None, ["tests.test_experiment:OverflowsSometimes"])
    honest = found["honest"][0]
    assert honest["pass"]
    assert honest["audits"] + honest["refused"] == 60
    assert 3 < honest["refused"] < 30
    assert honest["wrong_audits"] == 0


def test_who_answers_nothing_finite_is_out() -> None:
    found = run(["tests.test_experiment:Overflows"], None)
    assert found["pass"], found["reason"]
    assert [each["out"]["max"] for each in found["cheats"]] == [9, 9]


@pytest.mark.parametrize(("name", "said"), [("Breaks", "RuntimeError: boom"), ("Broken", "ValueError: no device")])
def test_a_class_of_ones_own_that_fails_is_named(name: str, said: str) -> None:
    for cheats, honest in (([f"tests.test_experiment:{name}"], None), (None, [f"tests.test_experiment:{name}"])):
        with pytest.raises(UsageError, match=said):
            run(cheats, honest, Effort(1, 5, 5, 1))


def test_honest_peers_take_turns_until_their_time_together_is_over(tmp_path: Path) -> None:
    kept, effort = tmp_path / "kept.jsonl", Effort(1, 1, audits=1, minutes=0.0, together_minutes=0.02)
    found = run(None, ["ggml-cpu", "reference:f32"], effort, kept)
    assert all(each["audits"] >= 25 for each in found["honest"])
    assert sum(each["minutes"] for each in found["honest"]) >= 0.02
    lines = kept.read_text().splitlines()
    assert run(None, ["ggml-cpu", "reference:f32"], effort, kept) == found
    assert kept.read_text().splitlines() == lines, "nothing was done twice"


def test_kernels_that_end_over_and_over_again_end_no_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they answered until then counts, and the others go on."""
    monkeypatch.setattr(run_module, "find_target", lambda name: dying(40) if name == "dying" else find_target(name))
    effort = Effort(1, 1, audits=600, minutes=1.0)
    dead, fine = run(None, ["dying", "ggml-cpu"], effort)["honest"]
    assert (dead["reason"], dead["audits"], dead["pass"]) == ("the process ended", 250, True)
    assert 0 < dead["restarts"] <= IN_ALL_MAX
    assert (fine["reason"], fine["restarts"], fine["audits"]) == (None, 0, 600)


def test_names_that_nobody_knows_are_refused_before_anything_begins() -> None:
    for cheats, honest in ((["sloth"], None), (None, ["ggml-abacus"]), (["tests.nowhere:Nobody"], None)):
        with pytest.raises(UsageError):
            run(cheats, honest)


def test_what_it_says_is_documented() -> None:
    found = run(["zeros"], ["ggml-cpu"], Effort(1, 50, 5, 1))
    _, _, of_experiment, of_daemons = map(first_codes, section("status.md", "`swarmctl audit`").split("| key"))
    assert keys_of(found) == set(of_experiment)
    conforms("audit experiment", found)
    literals = {node.value for node in ast.walk(ast.parse(Path(daemons.__file__).read_text())) if _is_text(node)}
    assert {code.removesuffix("[]") for code in of_daemons} <= literals
    named = {kind.name: kind.make.__name__ for kind in CHEATS if kind.every == 1}
    table = rows((ROOT / "docs" / "audits.md").read_text().split("## The experiment")[0])
    assert {cells[0].strip("`"): cells[1].strip("`") for cells in list(table)[1:]} == named


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


# -- what it proves ----------------------------------------------------------------------------------------------------


def trial(suspected: int | None, out: int | None) -> dict[str, Any]:
    return {"suspected": suspected, "out": out, "dispatches": 500}


def test_a_summary_counts_misses_and_what_came_late() -> None:
    in_time, late = trial(3, 9), trial(91, 96)
    good = cheat_summary("zeros", "trusted", 1, [in_time] * 297 + [late] * 3)
    assert (good["missed"], good["late"], good["pass"]) == (0, 3, True)
    assert good["missed_bound"] == pytest.approx(0.01)
    assert good["suspected"] == {"p50": 3, "p99": 3, "max": 91}
    assert not cheat_summary("zeros", "new", 1, [in_time] * 292 + [late] * (late_max(300) + 1))["pass"]
    missed = cheat_summary("zeros", "new", 10, [in_time] * 299 + [trial(4, None)])
    assert (missed["missed"], missed["missed_bound"], missed["late"], missed["pass"]) == (1, None, None, False)
    assert missed["out"]["max"] is None


def test_an_honest_peer_that_was_convicted_once_fails() -> None:
    rows = {"same": 3, "within": 2, "coarse": 1, "wrong": 0}
    seen = {"audits": 10, "refused": 1, "wrong_audits": 0}
    watch = {**seen, "rows": rows, "changes": {}, "worst_relative_l2": 0.1, "seconds": 6.0}
    fine = honest_summary("ggml-cpu", [watch, watch])
    assert (fine["audits"], fine["minutes"], fine["pass"]) == (20, pytest.approx(0.2), True)
    assert fine["rows"] == {"same": 6, "within": 4, "coarse": 2, "wrong": 0}
    bad = honest_summary("ggml-cpu", [watch, {**watch, "changes": {"quarantined": 1, "suspected": 2}}])
    assert (bad["quarantined"], bad["quarantined_bound"], bad["suspected"], bad["pass"]) == (1, None, 2, False)


def test_a_file_that_was_cut_in_its_last_line_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    Kept(path, {"seed": 1}).put("a", {"x": 1})
    with path.open("a") as file:
        file.write('{"key": "b", "resu')
    again = Kept(path, {"seed": 1})
    assert again.get("a") == {"x": 1}
    assert again.get("b") is None
    for bad in (tmp_path / "nowhere" / "kept", tmp_path):
        with pytest.raises(UsageError, match="cannot be used"):
            Kept(bad, {"seed": 1})
    again.put("b", {"x": 2})
    assert Kept(path, {"seed": 1}).get("b") == {"x": 2}
