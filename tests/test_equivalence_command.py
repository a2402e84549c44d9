"""`swarmctl equivalence` as people see it: the command, its JSON, its text and its page."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

import pytest

from capabilities.equivalence import LEVELS
from capabilities.errors import UsageError
from swarmnode.cli import common, ctl
from swarmnode.cli import equivalence as command
from swarmnode.cli.render_equivalence import WORDS, print_equivalence
from swarmnode.equivalence.causes import CAUSES
from swarmnode.equivalence.figures import figures_of, first_choice_words, ranges_of, short
from swarmnode.equivalence.page import page_of, write_page
from swarmnode.equivalence.targets import find_target
from swarmnode.equivalence.text import bundled_questions
from tests.documents import first_codes, section
from tests.equivalence_runs import SMALL, WRONG, models, ops
from tests.expert_models import tiny_file
from tests.report_tools import Tags, keys_of
from tests.schema_checks import conforms


@pytest.fixture(autouse=True)
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.equivalence.task.bundled_questions", lambda: bundled_questions()[:5])


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ggml-cpu:z80", "ggml-nothing", "reference:f8", "nonsense"])
def test_a_target_that_is_not_there_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        find_target(name)
    assert "ggml-cpu, reference" in str(caught.value.hint)


def test_a_class_that_cannot_be_loaded_is_refused() -> None:
    with pytest.raises(UsageError, match="NoSuchClass"):
        find_target(f"{WRONG}NoSuchClass")


def test_levels_of_the_command_are_those_that_there_are() -> None:
    assert command.LEVELS == LEVELS


def run(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = common.main(ctl.swarmctl, "swarmctl", ["equivalence", *words])
    return status, capfd.readouterr().out


def test_the_command_prints_all_levels_and_their_documented_keys(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.equivalence.run.sizes_of", lambda _file: SMALL)
    tiny = ("--tokens", "256", "--prompts", "12", "--answer-tokens", "6", "--model", str(tiny_file("olmoe", "q8_0")))
    status, out = run(capfd, "ggml-cpu", "reference", "--json", *tiny)
    result = json.loads(out)
    assert [level["level"] for level in result["levels"]] == list(LEVELS)
    assert (status == 0) == result["pass"] == all(level["pass"] for level in result["levels"])
    for level in result["levels"][1:]:
        own = {key for key in level if key not in ("level", "pass", "reason", "tolerance")}
        assert set(level["noise_floor"]) <= own | set(level.get("free", ()))
        level["noise_floor"] = None
    codes = first_codes(section("status.md", "`swarmctl equivalence --json`"))
    assert len(codes) == len(set(codes))
    assert set(codes) == keys_of(result)
    conforms("equivalence", result)


def test_the_exit_status_tells(capfd: pytest.CaptureFixture[str]) -> None:
    of_tiny = ("--level", "logits", "--tokens", "64", "--model", str(tiny_file("olmoe", "q8_0")))
    status, out = run(capfd, "ggml-cpu", "ggml-cpu", *of_tiny)
    assert status == 0
    assert "logits: pass" in out
    status, out = run(capfd, "ggml-cpu", f"{WRONG}WrongExpert", *of_tiny)
    assert status == 1
    assert "logits: FAIL" in out
    assert run(capfd, "ggml-cpu", "peer:kitchen", *of_tiny)[0] == 3
    assert run(capfd, "ggml-cpu")[0] == 2
    assert run(capfd, "--all")[0] == 3
    assert run(capfd, "--all", "ggml-cpu")[0] == 2


def test_levels_may_be_named_together(capfd: pytest.CaptureFixture[str]) -> None:
    tiny = ("--tokens", "64", "--model", str(tiny_file("olmoe", "q8_0")), "--json")
    _, out = run(capfd, "ggml-cpu", "ggml-cpu", "--level", "logits,layer", "--level", "layer", *tiny)
    assert [level["level"] for level in json.loads(out)["levels"]] == ["layer", "logits"]
    assert run(capfd, "ggml-cpu", "ggml-cpu", "--level", "logits,nonsense", *tiny)[0] == 2


def test_a_text_that_is_too_short_says_how_long_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--level", "logits", "--tokens", "9000000", "--model", str(tiny_file("olmoe", "q8_0")))
    assert common.main(ctl.swarmctl, "swarmctl", ["equivalence", "ggml-cpu", "ggml-cpu", *words]) == 2
    assert "has 0 tokens" not in capfd.readouterr().err


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
def test_the_terminal_cuts_no_figure_off(
    columns: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many columns there are, and however many causes."""
    monkeypatch.setattr("swarmnode.cli.render_equivalence.COLUMNS", columns)
    levels = [ops("reference", "reference:f16"), *models("ggml-cpu", "reference").values()]
    for row in levels[0]["ops"]:
        row["cause"] = ", ".join(CAUSES.values())
    print_equivalence(report("reference", levels))
    out = capfd.readouterr().out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= columns
    for level in levels:
        assert f"\n{level['level']}: {WORDS[level['pass']]}: " in out
    for row in levels[0]["ops"]:
        figures = [short(row["max_abs_diff"]), short(row["relative_l2"]), f"{row['min_cosine']:.7f}"]
        line = " ".join(filter(None, (WORDS[row["pass"]], row["op"], row["type"] or "-", str(row["length"]), *figures)))
        assert any(" ".join(each.split()).startswith(line) for each in out.splitlines()), line
    assert first_choice_words(levels[3]) in " ".join(out.split())


def test_answers_are_counted_by_ranges_of_tokens() -> None:
    assert ranges_of([1, 0, 2]) == [("token 0", 1), ("token 1", 0), ("token 2", 2)]
    assert ranges_of([1] * 18) == [(f"tokens {at} to {at + 2}", 3) for at in range(0, 18, 3)]
    assert ranges_of([1] * 17)[-1] == ("tokens 15 to 16", 2)


# -- the page ---------------------------------------------------------------------------------------------------------


def report(b: str, levels: list[dict[str, Any]]) -> dict[str, Any]:
    of_sides: dict[str, Any] = {"experts": {}, "restarts": {}, "fitness": {"a": None, "b": None}}
    return {"a": "ggml-cpu", "b": b, "model": "a&b.gguf", "pass": True, **of_sides, "levels": levels}


def test_the_page_shows_curve_and_histogram_and_fetches_nothing(tmp_path: Path) -> None:
    levels = [ops("ggml-cpu", "reference"), *models("ggml-cpu", "reference").values()]
    result = report("<script>", levels)
    write_page(tmp_path / "page.html", result)
    text = (tmp_path / "page.html").read_text()
    found = Tags(text)
    assert found.open == []
    assert found.fetched == []
    assert "script" not in found.tags
    assert "&lt;script&gt;" in text
    assert "a&amp;b.gguf" in text
    assert found.tags.count("polyline") == 4
    answers = next(level for level in levels if level["level"] == "generation")
    assert found.tags.count("rect") == 48 + 2 * answers["tokens"]
    lines = sum(len(figures_of(level)) for level in levels[1:])
    tables = {"verdicts": len(levels), "references": 4, "operators": len(levels[0]["ops"]), "parting": 2}
    assert found.tags.count("tr") == lines + sum(tables.values()) + len(tables) + len(levels[1:])
    for level in levels:
        assert escape(level["reason"]) in text


def test_a_page_of_one_level_is_a_page() -> None:
    for level in models("ggml-cpu", "ggml-cpu").values():
        page = page_of(report("y", [level]))
        assert Tags(page).open == []
        assert level["level"] in page


def test_the_command_writes_a_page_where_it_is_told_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    of_tiny = ("--level", "logits", "--tokens", "64", "--model", str(tiny_file("olmoe", "q8_0")))
    assert run(capfd, "ggml-cpu", "ggml-cpu", *of_tiny, "--html", str(page))[0] == 0
    assert page.read_text().startswith("<!doctype html>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swarmnode.equivalence.run.run_equivalence", None)  # it is refused before anything is computed
        assert run(capfd, "ggml-cpu", "ggml-cpu", *of_tiny, "--html", str(page / "below.html"))[0] == 2
