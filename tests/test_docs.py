"""The documents are true in what can be checked: links, paths, names, settings, commands, limits, examples."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import numpy as np
import pytest

from scheduler import dispatch, liveness
from swarmnode import expert_messages, limits, pinger, prompt_messages, status_service
from swarmnode.backbone import election_service, leadership_messages
from swarmnode.cli.ctl import swarmctl
from swarmnode.comparing.messages import PROTOCOL as COMPARE_PROTOCOL
from swarmnode.config import Config, parse_config
from swarmnode.member_messages import PROTOCOL as MEMBER_PROTOCOL
from swarmnode.net import limits as net_limits
from swarmnode.shards.messages import PROTOCOL as SHARDS_PROTOCOL
from swarmnode.swarm import advert_exchange, join_messages, news, verdicts
from tests.command_lines import COMMANDS, fault_of
from tests.documents import DOCUMENTS, ROOT, Document, first_codes, read, rows

PACKAGES: Final = ("backends", "capabilities", "scheduler", "swarmnode")
FOREIGN_NAMES: Final = {"MockClock"}  # trio's

every_document = pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)


# -- links and names --------------------------------------------------------------------------------------------------


@every_document
def test_links_lead_somewhere(document: Document) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.prose):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (document.path.parent / name).resolve() if name else document.path
        assert path.exists(), f"{document.path.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", read(path).prose, re.MULTILINE)
            assert anchor in [slug(heading) for heading in headings], f"{document.path.name}: {target}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_readme_leads_to_every_document() -> None:
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)\)", DOCUMENTS["README.md"].text))
    assert linked == {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}


@every_document
def test_paths_exist(document: Document) -> None:
    folders = "|".join((*PACKAGES, "tests", "docs"))
    for path in [s for s in document.spans if re.fullmatch(rf"(?:{folders})/[\w./-]*", s)]:
        assert (ROOT / path).exists(), path
    for module in re.findall(r"-m ((?:backends|swarmnode|tests)[\w.]*)", document.text):
        file = ROOT / module.replace(".", "/")
        assert file.with_suffix(".py").exists() or (file / "__main__.py").exists(), module


@every_document
def test_classes_and_their_members_exist(document: Document) -> None:
    defined = names_in_the_source()
    for span in document.spans:
        if re.fullmatch(r"[A-Z][a-z]+[A-Z]\w*(?:\.\w+)*", span):
            assert set(span.split(".")) <= defined | FOREIGN_NAMES, span


@cache
def names_in_the_source() -> set[str]:
    names = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(node.name)
    return names


@every_document
def test_no_paths_of_one_machine(document: Document) -> None:
    assert not re.findall(r"(?<![\w.~])/(?:home|root|work|tmp|Users|var|opt|mnt)\b[^\s`)]*", document.text)


@every_document
def test_settings_exist(document: Document) -> None:
    keys = {f"{section}.{key}" for section, table in Config() for key in type(table).model_fields}
    keys |= set(first_codes(DOCUMENTS["status.md"].text))  # `swarm` is a section here and an object there
    for span in document.spans:
        for name in re.findall(r"^((?:node|swarm|leader|compute|api|log)\.\w+)\b", span):
            assert name in keys, f"{document.path.name}: {span}"
    for block in document.blocks:
        if block.lstrip().startswith("["):
            parse_config(block.replace("ADDRESS", "192.0.2.7").replace("PEER_ID", "12D3KooW" + "1" * 44))


@every_document
def test_make_targets_exist(document: Document) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    typed = [*document.spans, *(line for block in document.blocks for line in block.splitlines())]
    wanted = [found[1] for line in typed if (found := re.match(r"(?:[A-Z_]+=\S+ )?make ([a-z-]+)", line))]
    assert set(wanted) <= set(targets)


def test_every_module_is_on_its_packages_map() -> None:
    for front in ROOT.glob("*/**/__init__.py"):
        if front.relative_to(ROOT).parts[0] in PACKAGES and front.parent.name != "data":
            text = ast.get_docstring(ast.parse(front.read_text())) or ""
            words = set(re.findall(r"\w+", text))
            inside = {path.stem for path in front.parent.glob("*.py") if not path.stem.startswith("__")}
            assert inside <= words, f"{front.relative_to(ROOT)} does not say what {inside - words} is for"


# -- commands ---------------------------------------------------------------------------------------------------------


def command_lines(document: Document) -> Iterator[tuple[list[str], bool]]:
    """(words, whether the line is whole) of every command line of ours. In prose a command may be named by itself."""
    for block in document.blocks:
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.rstrip(" &").removeprefix(".venv/bin/"), comments=True) if line.isascii() else []
            if words and words[0] in COMMANDS:
                yield words, True
    for span in document.spans:
        words = span.removeprefix(".venv/bin/").split(" ")
        if words[0] in COMMANDS:
            yield words, False


@every_document
def test_commands_can_be_typed(document: Document) -> None:
    for words, whole in command_lines(document):
        assert fault_of(words, whole) is None, " ".join(words)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("swarmctl asks", "No such command"),
        ("swarmctl status --jason", "No such option"),
        ("swarmctl join", "missing"),
        ("swarmctl model show A B", "too many"),
        ("swarmnode config --default --json", "No such option"),
        ("swarmctl model", "no command"),
    ],
)
def test_a_wrong_command_is_found(line: str, reason: str) -> None:
    assert reason in str(fault_of(line.split(), True))


def test_commands_were_looked_at() -> None:
    seen = {tuple(words[:2]) for each in DOCUMENTS.values() for words, _ in command_lines(each)}
    every = {("swarmctl", name) for name in swarmctl.commands} | {("swarmnode", name) for name in ("run", "config")}
    assert every <= seen


# -- what the wire carries --------------------------------------------------------------------------------------------


def test_protocols_are_those_that_are_served() -> None:
    headings = re.findall(r"^## (/swarmnode/\S+)$", DOCUMENTS["protocols.md"].text, re.MULTILINE)
    modules = (
        expert_messages, pinger, prompt_messages, status_service, election_service, leadership_messages,
        advert_exchange, news, verdicts, join_messages,
    )  # fmt: skip
    elsewhere = {MEMBER_PROTOCOL, SHARDS_PROTOCOL, COMPARE_PROTOCOL}
    assert set(headings) == {module.PROTOCOL for module in modules} | elsewhere
    assert len(headings) == 13


def test_limits_are_those_in_force() -> None:
    found = 0
    for name, value, *_ in rows(DOCUMENTS["protocols.md"].text):
        if not re.fullmatch(r"`[A-Z_]+`", name):
            continue
        homes = (limits, dispatch, liveness)
        home = next((module for module in homes if hasattr(module, name.strip("`"))), net_limits)
        assert getattr(home, name.strip("`")) == amount(value), f"{name} is not {value}"
        found += 1
    assert found > 20


def amount(text: str) -> float:
    """`8 KiB`, `4,096`, `0.5 s` as a number."""
    number, _, unit = text.partition(" ")
    return float(number.replace(",", "")) * {"": 1, "s": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit]


def test_the_golden_example_is_golden() -> None:
    blocks = [block for block in DOCUMENTS["protocols.md"].blocks if re.match(r"[0-9a-f]{8} ", block)]
    asked, answered = (bytes.fromhex("".join(line.strip().split("  ")[0] for line in b.splitlines())) for b in blocks)
    x, tokens, experts = np.array([[1.0, 2.0]], np.float32), np.zeros(2, np.int32), np.array([3, 1], np.int32)
    assert asked == expert_messages.encode_dispatch(
        term=7, epoch=2, sequence=9, layer=5, x=x, tokens=tokens, experts=experts
    )
    assert answered == expert_messages.encode_reply(9, 250, np.array([[1.0], [4.0]], np.float32))


# -- examples ---------------------------------------------------------------------------------------------------------


def test_the_backend_of_ones_own_works() -> None:
    (example,) = [block for block in DOCUMENTS["development.md"].blocks if block.startswith("import time")]
    names: dict[str, Any] = {"__name__": "late"}
    exec(compile(example, "docs/development.md", "exec"), names)
    backend = names["LateExperts"](threads=1)
    assert backend.name == "ggml-cpu"
    assert backend.held(0) == frozenset()
    backend.close()
