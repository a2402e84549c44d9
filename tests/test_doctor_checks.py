"""Every cause that the doctor names, from made-up facts: the right check and no other says so, and what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler.advert_findings import FindingKind
from swarmnode.cli.doctor import _print
from swarmnode.doctor.facts import (
    Disk,
    Facts,
    Fault,
    Interface,
    Invitation,
    Loose,
    Machine,
    Membership,
    Memory,
    ModelFault,
    Node,
)
from swarmnode.doctor.report import CHECKS, diagnose
from tests.documents import first_codes, section

GIB = 1 << 30
ME, OTHER, THIRD = "peer-me", "peer-other", "peer-third"
STATUS: dict[str, Any] = {
    "self": ME,
    "ready": True,
    "addresses": ["/ip4/192.168.1.7/tcp/11436/p2p/x"],
    "findings": [],
    "peers": [
        {"peer_id": ME, "name": "attic", "state": "ready", "version": "1.0", "fitness": "fit", "error": None},
        {"peer_id": OTHER, "name": "cellar", "state": "ready"},
        {"peer_id": THIRD, "name": "den", "state": "ready"},
    ],
}
MACHINE = Machine(
    python=(3, 12, 1),
    swarmnode="1.0",
    llama_cpp="0.3.36",
    llama_cpp_known="0.3.36",
    kernels=None,
    compilers=None,
    files_hard=100_000,
    files_soft=1024,
    memory=Memory(16 * GIB, 8 * GIB, 6 * GIB, 0),
    disk=Disk(100 * GIB, 0, 0, None),
    interfaces=(Interface("127.0.0.1", False, True), Interface("192.168.1.7", False, False)),
    multicast=None,
    ports=(),
)
NODE = Node(
    exists=True,
    configuration=None,
    listens=True,
    mdns=True,
    loose=(),
    identity=None,
    record=None,
    owner_key=None,
    votes=None,
    membership=Membership("home", ME, (ME, OTHER, THIRD), 2, False, False, None),
    models=(),
    daemon="answers",
    daemon_pid=7,
    daemon_words="",
    status=STATUS,
)
WELL = Facts(MACHINE, NODE, Invitation("home", None, ("/ip4/192.0.2.1/tcp/1",), {}))


def machine(**changes: Any) -> Facts:
    return replace(WELL, machine=replace(MACHINE, **changes))


def node(**changes: Any) -> Facts:
    return replace(WELL, node=replace(NODE, **changes))


def status(**changes: Any) -> Facts:
    return node(status={**STATUS, **changes})


def finding(kind: FindingKind, peer: str | None) -> Facts:
    return status(findings=[{"kind": str(kind), "peer": peer, "message": "it is so", "hint": "Mend it."}])


def gone(*peers: str) -> Facts:
    return status(peers=[{**row, "state": "gone"} if row["peer_id"] in peers else row for row in STATUS["peers"]])


def own_row(**changes: Any) -> Facts:
    return status(peers=[{**STATUS["peers"][0], **changes}, *STATUS["peers"][1:]])


def member(**changes: Any) -> Facts:
    assert NODE.membership is not None
    return node(membership=replace(NODE.membership, **changes))


FAULT = Fault("it is broken", "Mend it.")
CAUSES: list[tuple[str, str, str, Facts]] = [
    ("python", "fail", "Python 3.9.2", machine(python=(3, 9, 2))),
    ("kernels", "fail", "no compiler", machine(llama_cpp=None, compilers=Fault("no compiler", "x"))),
    ("kernels", "fail", "is not installed", machine(llama_cpp=None)),
    ("kernels", "fail", "0.4.0 is installed", machine(llama_cpp="0.4.0")),
    ("kernels", "fail", "it is broken", machine(kernels=FAULT)),
    ("file_descriptors", "fail", "at most 128 files", machine(files_hard=128)),
    ("file_descriptors", "warn", "at most 1024 files", machine(files_hard=1024)),
    ("memory", "fail", "in all", machine(memory=Memory(2 * GIB, GIB, 2 * GIB, 0))),
    ("memory", "warn", "are available now", machine(memory=Memory(16 * GIB, GIB, 6 * GIB, GIB))),
    ("memory", "warn", "only 100 MiB", machine(memory=Memory(16 * GIB, GIB, 100 << 20, 0))),
    ("disk", "fail", "No space left", machine(disk=Disk(GIB, 0, 0, "No space left on device"))),
    ("disk", "fail", "the disk is full", machine(disk=Disk(1 << 20, 0, 0, None))),
    ("disk", "fail", "offered for fetched", machine(disk=Disk(2 * GIB, 4 * GIB, GIB, None))),
    ("disk", "warn", "few experts", machine(disk=Disk(GIB // 2, 0, 0, None))),
    ("data_folder", "fail", "mode 644", node(loose=(Loose("/d/identity.key", 0o644, 0o600, True),))),
    ("data_folder", "fail", "another user", node(loose=(Loose("/d", 0o755, 0o755, False),))),
    ("port", "fail", "port 1 is taken", machine(ports=(Fault("port 1 is taken", "Choose."),))),
    (
        "port",
        "fail",
        "cannot listen for HTTP on 127.0.0.1:1",
        replace(
            status(http={"listen": "127.0.0.1:1", "url": None, "error": "another program uses it"}),
            machine=replace(MACHINE, ports=None),
        ),
    ),
    ("interfaces", "warn", "a bridge that containers", machine(interfaces=(Interface("172.17.0.1", True, False),))),
    ("interfaces", "warn", "no address but", machine(interfaces=(Interface("127.0.0.1", False, True),))),
    ("multicast", "warn", "is blocked: not permitted", machine(multicast="not permitted")),
    ("configuration", "fail", "it is broken", node(configuration=FAULT)),
    ("identity", "fail", "it is broken", node(identity=FAULT)),
    ("daemon", "fail", "process 7", node(daemon="silent", status=None)),
    ("daemon", "warn", "left its control socket", node(daemon="stale", status=None)),
    ("daemon", "warn", "no daemon runs", node(daemon="absent", status=None)),
    ("record", "fail", "it is broken", node(record=FAULT)),
    ("membership", "fail", "banned", member(banned=True)),
    ("membership", "fail", "expired 2 hours ago", member(expired_s=7200.0)),
    ("membership", "warn", "has left the backbone", member(loose_issuer=True)),
    ("owner_key", "fail", "it is broken", node(owner_key=FAULT)),
    ("votes", "fail", "it is broken", node(votes=FAULT)),
    ("votes", "fail", "this node: it is so", finding(FindingKind.NO_VOTE, ME)),
    ("models", "fail", "changed", node(models=(ModelFault("m", "the file of model m changed", True),))),
    ("models", "warn", "changed", node(models=(ModelFault("m", "the file of model m changed", False),))),
    ("addresses", "fail", "it is so", finding(FindingKind.UNREACHABLE, ME)),
    ("addresses", "fail", "/ip4/1.2.3.4/tcp/1 does not", node(unanswered=("/ip4/1.2.3.4/tcp/1",))),
    ("addresses", "warn", "this machine alone", status(addresses=["/ip4/127.0.0.1/tcp/1/p2p/x"])),
    ("invite", "fail", "expired 3 days ago", replace(WELL, invitation=Invitation("home", 3 * 86_400.0, ("/a",), {}))),
    ("invite", "fail", "no address", replace(WELL, invitation=Invitation("home", None, (), {"/a": "refused"}))),
    ("clock", "fail", "this node: it is so", finding(FindingKind.SKEWED_CLOCK, ME)),
    ("clock", "warn", "cellar: it is so", finding(FindingKind.SKEWED_CLOCK, OTHER)),
    ("duplicate_identity", "fail", "it is so", finding(FindingKind.CLONED_IDENTITY, ME)),
    ("versions", "warn", "some peer", finding(FindingKind.WIRE_VERSION, None)),
    ("versions", "warn", "the daemon is swarmnode 0.9", own_row(version="0.9")),
    ("precision", "fail", "it is so", finding(FindingKind.PRECISION, ME)),
    ("fitness", "fail", "quarantined", own_row(fitness="quarantined")),
    ("fitness", "warn", "unfit: too coarse", own_row(fitness="unfit", error={"message": "too coarse", "hint": "x"})),
    ("backbone", "fail", "1 of 3 backbone peers are in reach and 2", gone(OTHER, THIRD)),
    ("backbone", "warn", "den", gone(THIRD)),
    ("ready", "warn", "attic loads", status(ready=False, reason="attic loads")),
]  # fmt: skip


def test_a_sound_node_is_healthy_and_nothing_is_left_out() -> None:
    report = diagnose(WELL)
    states = {check["id"]: check["state"] for check in report["checks"]}
    assert list(states) == [name for name, _ in CHECKS]
    assert set(states.values()) == {"ok"}
    assert report["healthy"] is True


@pytest.mark.parametrize(("name", "state", "words", "facts"), CAUSES, ids=lambda value: str(value)[:24])
def test_a_cause_is_named_by_its_check_alone_with_the_mend(name: str, state: str, words: str, facts: Facts) -> None:
    report = diagnose(facts)
    (found,) = [check for check in report["checks"] if check["state"] in ("warn", "fail")]
    assert (found["id"], found["state"]) == (name, state)
    assert words in found["cause"]
    assert found["mend"]
    assert report["healthy"] is (state == "warn")


def test_every_check_has_a_cause_that_it_can_name() -> None:
    assert {name for name, *_ in CAUSES} == {name for name, _ in CHECKS}


def test_what_cannot_be_looked_at_is_skipped_with_the_reason() -> None:
    alone = replace(NODE, exists=False, membership=None, daemon="absent", status=None, mdns=False)
    report = diagnose(Facts(MACHINE, alone))
    skipped = {check["id"]: check["cause"] for check in report["checks"] if check["state"] == "skip"}
    assert {"clock", "backbone", "invite", "data_folder", "multicast", "membership"} <= set(skipped)
    assert all(skipped.values())
    assert report["healthy"] is True


def test_a_status_of_another_version_upsets_no_check() -> None:
    for odd in ({}, {"peers": [3], "findings": [None, "x"], "addresses": [1]}, {"peers": {"a": 1}, "findings": None}):
        assert len(diagnose(node(status=odd))["checks"]) == len(CHECKS)


def test_the_checks_are_documented() -> None:
    assert [name for name, _ in CHECKS] == [
        code for code in first_codes(section("status.md", "`swarmctl doctor --json`")) if code in dict(CHECKS)
    ]


def test_the_reason_stands_once_and_long_lines_keep_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    waits = "the swarm is not ready: it waits for " + "attic, " * 20
    report = diagnose(status(ready=False, reason=waits))
    _print({**report, "mended": []})
    shown = capsys.readouterr().out
    assert shown.count("the swarm is not ready") == 1
    at = shown.index("the swarm is not ready")
    lines = shown[at:].split("Nothing")[0].splitlines()[1:]
    assert all(line.startswith("      ") and len(line) <= 80 for line in lines)


def test_a_path_that_is_longer_than_a_line_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"/home/me/{'long' * 30}.gguf"
    _print({**diagnose(status(ready=False, reason=f"the file {path} is gone")), "mended": []})
    assert path in capsys.readouterr().out.split()
