"""`swarmctl init`, `join`, `invite`, ... as people and scripts use them, without a daemon and with one."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import trio
from click.testing import CliRunner

from capabilities.backbone import BackboneSet
from capabilities.errors import UsageError
from swarmnode.cli import common, peer, swarm
from swarmnode.cli.common import common_options
from swarmnode.cli.schema import commands as schemas
from swarmnode.control import serve_control
from swarmnode.identity import load_or_create_identity, lock_data_folder
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.paths import Paths, find_paths
from swarmnode.swarm.admission import AdmissionService
from swarmnode.swarm.commands import RunningSwarm, SwarmCommands
from swarmnode.swarm.invites import Invite
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from swarmnode.swarm.vote_file import load_vote_file, open_vote_file
from tests.patience import PATIENCE_S
from tests.schema_checks import conforms
from tests.swarm_members import PASSPHRASE, outline_of_three, quick_keys

PEER = "12D3KooWBhSrGJeT5RQc6KsaYCsKu1R8R3Yk3zPpJ1CBhCsVYM2W"
OTHER = PEER[:-1] + "X"


@click.group()
@common_options
def swarmctl() -> None:
    """As ctl.py has it."""


for command in (*swarm.COMMANDS, *peer.COMMANDS):
    swarmctl.add_command(command)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SWARMNODE_OWNER_PASSPHRASE", PASSPHRASE)
    with quick_keys():
        yield


class Node:
    """A data folder, and swarmctl on it in this process."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capfd = capfd

    def run(self, *words: str) -> tuple[int, str, str]:
        """(exit status, standard output, standard error)."""
        self.capfd.readouterr()
        status = common.main(swarmctl, "swarmctl", ["--data-dir", str(self.folder), *words])
        return status, *self.capfd.readouterr()

    def json(self, *words: str) -> dict[str, Any]:
        """The one object of a command that goes well."""
        status, out, _ = self.run("--json", *words)
        assert status == 0, out
        result: dict[str, Any] = json.loads(out)
        conforms(next(name for name in (" ".join(words[:2]), words[0]) if name in schemas()), result)
        return result

    def error(self, *words: str) -> tuple[int, dict[str, Any]]:
        """(exit status, error) of one that does not, which must be one object, and one line for people."""
        status, out, _ = self.run("--json", *words)
        again, shown, err = self.run(*words)
        assert (again, shown) == (status, "")
        error: dict[str, Any] = json.loads(out)["error"]
        assert f"Error: {error['message']}" in err.splitlines()
        return status, error

    @property
    def paths(self) -> Paths:
        return find_paths(self.folder)

    @property
    def store(self) -> SwarmStore:
        return SwarmStore.open(SwarmFiles(self.folder))


@pytest.fixture
def node(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[str], Node]:
    return lambda name: Node(tmp_path / name, capfd)


@pytest.fixture
def founder(node: Callable[[str], Node]) -> Node:
    founder = node("founder")
    founder.json("init", "--name", "attic")
    return founder


class Daemon:
    """As much of a daemon as belonging takes, in a thread: the network with its key, admissions, the control socket."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.proposed: list[BackboneSet] = []
        self.spread: list[bytes] = []
        self.changes = 0
        self._started = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._stop = trio.Event()

    async def main(self) -> None:
        paths = self.node.paths
        paths.make()
        with lock_data_folder(paths.data):
            store, identity = SwarmStore.open(SwarmFiles(paths.data)), load_or_create_identity(paths.data)
            psk = None if store.record is None else store.record.psk
            async with (
                open_libp2p_network(identity, ["/ip4/127.0.0.1/tcp/0"], psk=psk) as network,
                trio.open_nursery() as nursery,
            ):
                running = None
                if (record := store.record) is not None:
                    for address in record.addresses:
                        await network.connect(address)
                    seat = open_vote_file(store.files.votes, record.swarm, record.enactment).vote_file
                    AdmissionService(
                        store,
                        identity.sign,
                        addresses=lambda: network.addresses,
                        seat=lambda: seat,
                        outline=outline_of_three,
                    ).register(network)
                    running = RunningSwarm(network, self.propose, self.spread.extend)
                commands = SwarmCommands(identity, store, running=lambda: running, changed=self.changed)
                await nursery.start(serve_control, paths.socket_to_bind(), commands.table())
                self._token = trio.lowlevel.current_trio_token()
                self._started.set()
                await self._stop.wait()
                nursery.cancel_scope.cancel()

    async def propose(self, backbone: BackboneSet) -> None:
        self.proposed.append(backbone)

    def changed(self) -> None:
        self.changes += 1

    @contextmanager
    def running(self) -> Iterator[Daemon]:
        thread = threading.Thread(target=trio.run, args=(self.main,))
        thread.start()
        assert self._started.wait(PATIENCE_S)
        assert self._token is not None
        try:
            yield self
        finally:
            trio.from_thread.run_sync(self._stop.set, trio_token=self._token)
            thread.join(PATIENCE_S)


# init


def test_init_without_a_daemon(node: Callable[[str], Node]) -> None:
    founder = node("founder")
    result = founder.json("init", "--name", "attic")
    record = founder.store.need()
    assert result["swarm"] == {"id": record.swarm, "name": "attic"}
    assert result["daemon"] is False
    assert result["peer_id"] == record.peer == load_or_create_identity(founder.folder).peer_id
    assert Path(result["owner_key"]).stat().st_mode & 0o777 == 0o600
    votes = load_vote_file(founder.store.files.votes)
    assert votes is not None
    assert record.backbone.seats(record.peer, votes.vote_file)
    status, error = founder.error("init")
    assert (status, error["type"]) == (2, "usage")
    assert "attic" in error["message"]
    assert len(list((founder.folder / "owner").iterdir())) == 1, "no second key was made"


def test_init_says_what_to_do_next(node: Callable[[str], Node]) -> None:
    status, out, err = node("founder").run("init")
    assert status == 0
    assert out.startswith("The swarm swarm is made.")
    assert "swarmnode run" in err
    assert "swarmctl invite" in err


def test_init_with_a_daemon(node: Callable[[str], Node]) -> None:
    founder = node("founder")
    with Daemon(founder).running() as daemon:
        result = founder.json("init")
        assert result["daemon"] is True
        assert daemon.changes == 1
        assert founder.store.need().swarm == result["swarm"]["id"]
        assert founder.error("init")[0] == 2


@pytest.mark.parametrize("name", ["a b", ""])
def test_init_refuses_a_bad_name_before_it_asks(
    node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("SWARMNODE_OWNER_PASSPHRASE")
    status, error = node("founder").error("init", "--name", name)
    assert (status, "name" in error["message"]) == (2, True)


# the passphrase


def test_a_passphrase_comes_from_a_file_or_the_environment(
    node: Callable[[str], Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    founder, file = node("founder"), tmp_path / "words"
    monkeypatch.delenv("SWARMNODE_OWNER_PASSPHRASE")
    status, error = founder.error("init")
    assert (status, error["type"]) == (2, "usage")
    assert "--passphrase-file" in error["hint"]
    file.write_text("from a file it came\nnot this\n")
    founder.json("init", "--passphrase-file", str(file))
    founder.json("ban", PEER, "--passphrase-file", str(file))
    monkeypatch.setenv("SWARMNODE_OWNER_PASSPHRASE", "from a file it came")
    founder.json("ban", PEER, "--lift")
    for content, reason in ((b"\n", "no passphrase"), (b"\xff\xff\n", "UTF-8")):
        file.write_bytes(content)
        status, error = founder.error("ban", PEER, "--passphrase-file", str(file))
        assert status == 2
        assert reason in error["message"]
    assert founder.error("ban", PEER, "--passphrase-file", str(tmp_path / "none"))[0] == 2


def test_a_wrong_passphrase_is_one_line(founder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNODE_OWNER_PASSPHRASE", "nobody knows this")
    status, error = founder.error("ban", PEER)
    assert (status, error["type"]) == (1, "bad_owner_key")
    assert error["message"] == "wrong passphrase for the owner's key"
    assert not founder.store.is_banned(PEER)


def test_a_person_types_a_new_passphrase_twice(node: Callable[[str], Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARMNODE_OWNER_PASSPHRASE")
    folder = node("founder").folder
    monkeypatch.setattr("swarmnode.cli.passphrase.sys.stdin", Terminal())
    typed = iter(["one and only", "something else", "second attempt", "second attempt"])
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: next(typed))
    monkeypatch.setattr("click.termui.hidden_prompt_func", lambda _: next(typed))
    assert common.main(swarmctl, "swarmctl", ["--data-dir", str(folder), "init"]) == 0
    assert next(typed, None) is None


class Terminal:
    """Standard input that is one."""

    def isatty(self) -> bool:
        return True


# bans


def test_ban_and_lift(founder: Node) -> None:
    banned = founder.json("ban", PEER)
    assert banned == {"peer": PEER, "banned": True, "sequence": 1, "daemon": False}
    assert founder.store.is_banned(PEER)
    assert founder.error("ban", PEER)[1]["message"] == f"{PEER} is banned already"
    assert founder.json("ban", PEER, "--lift")["sequence"] == 2
    assert not founder.store.is_banned(PEER)
    assert founder.error("ban", PEER, "--lift")[0] == 2
    for nonsense in ("12D3KooW", "0OIl" * 12, "../../etc", ""):
        assert founder.error("ban", nonsense)[0] == 2
    status, error = founder.error("ban", founder.store.need().peer)
    assert status == 2
    assert "backbone remove" in error["hint"]


def test_ban_through_the_daemon_is_spread(founder: Node) -> None:
    with Daemon(founder).running() as daemon:
        assert founder.json("ban", PEER)["daemon"] is True
        assert len(daemon.spread) == 1
        assert founder.store.is_banned(PEER)


# releases


def test_releases_are_counted_and_spread(founder: Node) -> None:
    assert founder.json("peer", "release", PEER) == {"peer": PEER, "released": 1, "daemon": False}
    with Daemon(founder).running() as daemon:
        assert founder.json("peer", "release", PEER) == {"peer": PEER, "released": 2, "daemon": True}
        assert len(daemon.spread) == 1
    assert founder.store.need().releases.number_of(PEER) == 2
    assert founder.error("peer", "release", "0OIl" * 12)[0] == 2
    assert founder.error("peer", "release", "attic")[0] == 3, "names are for the daemon to know"
    founder.json("ban", PEER)
    assert "ban --lift" in founder.error("peer", "release", PEER)[1]["hint"]


# the owner's key


def test_the_key_moves_to_another_machine(founder: Node, tmp_path: Path) -> None:
    copy = tmp_path / "copy.key"
    founder.json("owner", "export", str(copy))
    assert founder.error("owner", "export", str(copy))[0] == 2
    key = SwarmFiles(founder.folder).owner_key(founder.store.need().swarm)
    key.path.unlink()
    status, error = founder.error("ban", PEER)
    assert (status, error["type"]) == (1, "bad_owner_key")
    assert "owner import" in error["hint"]
    founder.json("owner", "import", str(copy))
    founder.json("ban", PEER)


def test_only_the_key_that_counts_is_imported(
    founder: Node, node: Callable[[str], Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, copy, old = node("other"), tmp_path / "other.key", tmp_path / "old.key"
    other.json("init")
    other.json("owner", "export", str(copy))
    assert "another swarm" in founder.error("owner", "import", str(copy))[1]["message"]
    founder.json("owner", "export", str(old))
    with monkeypatch.context() as patch:
        patch.setenv("SWARMNODE_OWNER_PASSPHRASE", "not this one, no")
        assert "wrong passphrase" in founder.error("owner", "import", str(old))[1]["message"]
    founder.json("owner", "rotate")
    assert "rotated since" in founder.error("owner", "import", str(old))[1]["message"]
    copy.write_text("nothing")
    assert founder.error("owner", "import", str(copy))[1]["type"] == "bad_owner_key"


@pytest.mark.parametrize("with_daemon", [False, True])
def test_rotating_keeps_what_counts(founder: Node, with_daemon: bool) -> None:
    founder.json("ban", PEER)
    founder.json("peer", "release", OTHER)
    before = founder.store.need()
    if with_daemon:
        with Daemon(founder).running() as daemon:
            founder.json("owner", "rotate")
            assert len(daemon.spread) == 3, "the rotation, and what else the owner said, signed anew"
    else:
        assert founder.json("owner", "rotate")["rotation"] == 1
    after = founder.store.need()
    assert after.chain.current != before.chain.current
    assert after.backbone == before.backbone
    after.backbone.verify(after.swarm, after.chain.verify)
    assert len(after.news()) == 4, "rotation, backbone, ban and release can all be checked by a newcomer"
    assert after.bans.is_banned(PEER)
    assert after.releases.number_of(OTHER) == 1
    founder.json("ban", PEER, "--lift")
    assert founder.json("owner", "rotate")["rotation"] == 2
    assert len(list((founder.folder / "owner").iterdir())) == 1


def test_a_rotation_that_nobody_heard_of_changes_nothing(founder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise UsageError("lost on the way")

    with monkeypatch.context() as patch:
        patch.setattr("swarmnode.cli.owner.publish", fail)
        assert founder.error("owner", "rotate")[1]["message"] == "lost on the way"
    founder.json("ban", PEER)
    assert founder.json("owner", "rotate")["rotation"] == 1
    founder.json("ban", PEER, "--lift")


def test_the_passphrase_changes(founder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNODE_OWNER_NEW_PASSPHRASE", "short")
    assert founder.error("owner", "passphrase")[0] == 2
    monkeypatch.setenv("SWARMNODE_OWNER_NEW_PASSPHRASE", "a new one, longer")
    founder.json("owner", "passphrase")
    assert founder.error("ban", PEER)[1]["type"] == "bad_owner_key"
    monkeypatch.setenv("SWARMNODE_OWNER_PASSPHRASE", "a new one, longer")
    founder.json("ban", PEER)


# invites, joining, leaving


def test_a_volunteer_types_one_word(founder: Node, node: Callable[[str], Node]) -> None:
    """The whole way over the real network: without a daemon on the newcomer's side, then with one."""
    with Daemon(founder).running():
        made = founder.json("invite", "--uses", "2", "--expires", "12h")
        assert [warning["reason"] for warning in made["warnings"]] == ["reachable on this machine only"]
        newcomer = node("newcomer")
        status, out, err = newcomer.run("join", made["token"])
        assert status == 0
        assert out == "This peer is a member of the swarm attic.\n"
        assert "reads prompts and answers in plain text" in err
        assert "can be reconstructed" in err
        record = newcomer.store.need()
        assert record.addresses == tuple(made["addresses"])
        assert record.peer == load_or_create_identity(newcomer.folder).peer_id
        second = node("second")
        with Daemon(second).running() as daemon:
            joined = second.json("join", made["token"], "--yes")
            assert (joined["daemon"], joined["admitted_by"], daemon.changes) == (True, founder.store.need().peer, 1)
        third = node("third")
        status, error = third.error("join", made["token"])
        assert (status, error["type"], error["cause"]) == (1, "not_admitted", "used_up")
        (listed,) = founder.json("invite", "--list")["invites"]
        assert (listed["id"], listed["state"], listed["used"]) == (made["id"], "used_up", 2)
        assert f"{made['id']}  used_up " in founder.run("invite", "--list")[1]
        other = founder.json("invite")
        founder.json("invite", "--revoke", other["id"])
        assert third.error("join", other["token"])[1]["cause"] == "revoked"
        assert newcomer.error("join", other["token"])[0] == 2, "it belongs to a swarm"
        assert newcomer.error("invite")[0] == 3
        assert newcomer.json("leave")["left"]["name"] == "attic"
        assert newcomer.store.record is None


def test_invite_prints_the_word_alone(founder: Node) -> None:
    with Daemon(founder).running():
        status, out, err = founder.run("invite")
    assert status == 0
    assert Invite.parse(out).name == "attic"
    assert len(out.splitlines()) == 1
    assert "swarmctl join TOKEN" in err
    assert "Warning: /ip4/127.0.0.1" in err


@pytest.mark.parametrize("expires", ["7", "d", "-1d", "1y", "x" * 99, "1s"])
def test_invite_wants_a_time(founder: Node, expires: str) -> None:
    assert founder.run("invite", "--expires", expires)[0] == 2


def test_without_a_daemon_there_is_nobody_to_admit(founder: Node) -> None:
    assert founder.error("invite")[0] == 3
    assert founder.json("invite", "--list")["invites"] == []
    assert founder.run("invite", "--list")[1] == "No invites.\n"
    assert founder.error("invite", "--revoke", "00" * 8)[0] == 2
    assert founder.error("invite", "--list", "--revoke", "00")[0] == 2


def test_join_names_what_is_wrong(node: Callable[[str], Node]) -> None:
    newcomer = node("newcomer")
    status, error = newcomer.error("join", "hello")
    assert (status, error["message"]) == (2, "no invite: an invite begins with swn1")
    assert newcomer.store.record is None


def test_join_reads_standard_input_and_asks_on_a_terminal(
    node: Callable[[str], Node], founder: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    result = {"daemon": True, "swarm": {}, "peer_id": PEER, "admitted_by": PEER}
    monkeypatch.setattr(swarm, "call", lambda settings, method, params: calls.append(params["token"]) or result)
    with Daemon(founder).running():
        token = founder.json("invite")["token"]
    words = ["--data-dir", str(node("newcomer").folder), "join"]
    assert CliRunner().invoke(swarmctl, [*words, "-"], input=f"{token[:50]}\n{token[50:]}\n").exit_code == 0
    assert calls == [token]
    for answer, exit_code in (("y", 0), ("n", 1)):
        with monkeypatch.context() as patch:
            patch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
            asked = CliRunner().invoke(swarmctl, [*words, token], input=f"{answer}\n")
        assert asked.exit_code == exit_code
        assert "Join the swarm attic" in asked.output
        assert asked.output.index("can be reconstructed") < asked.output.index("Join the swarm")
    assert calls == [token] * 2


def test_commands_of_members_need_a_swarm(node: Callable[[str], Node]) -> None:
    stranger = node("stranger")
    for words in (
        ("leave",),
        ("ban", PEER),
        ("backbone", "list"),
        ("backbone", "remove", PEER),
        ("backbone", "add", PEER),
        ("owner", "export", "file"),
        ("owner", "rotate"),
        ("invite", "--list"),
    ):
        status, error = stranger.error(*words)
        assert (status, error["type"]) == (1, "not_in_swarm"), words
        assert "swarmctl join" in error["hint"]


def test_a_damaged_record_says_what_to_do(founder: Node) -> None:
    SwarmFiles(founder.folder).record.write_bytes(b"junk")
    for words in (("ban", PEER), ("backbone", "list"), ("leave",), ("init",)):
        status, error = founder.error(*words)
        assert (status, error["type"]) == (1, "damaged_state")
        assert str(SwarmFiles(founder.folder).record) in error["message"]
        assert "swarmctl join" in error["hint"]


def test_a_daemon_that_hangs_is_not_written_over(founder: Node) -> None:
    """Its socket is gone, its lock is held: it starts, stops or hangs."""
    with lock_data_folder(founder.folder):
        status, error = founder.error("ban", PEER)
    assert (status, error["type"]) == (1, "data_folder_in_use")
    assert not founder.store.is_banned(PEER)


# the backbone


def test_backbone_list_without_a_daemon(founder: Node) -> None:
    record = founder.store.need()
    (member,) = record.backbone.members
    assert founder.json("backbone", "list") == {
        "version": 1,
        "quorum": 1,
        "members": [{"peer": record.peer, "vote_file": member.vote_file.hex()}],
    }
    assert record.peer in founder.run("backbone", "list")[1]


def test_backbone_add_asks_the_peer_for_its_seat(founder: Node, node: Callable[[str], Node]) -> None:
    newcomer = node("newcomer")
    with Daemon(founder).running() as daemon:
        newcomer.json("join", founder.json("invite")["token"])
        peer = newcomer.store.need().peer
        status, error = founder.error("backbone", "add", peer)
        assert status == 2
        assert "no connection" in error["message"]
        with Daemon(newcomer).running():
            result = founder.json("backbone", "add", peer)
        votes = load_vote_file(newcomer.store.files.votes)
        assert votes is not None
        (proposed,) = daemon.proposed
        assert proposed.seats(peer, votes.vote_file)
        assert (proposed.version, result["version"], sorted(result["members"])) == (2, 2, list(proposed.peers))
        proposed.check_follows(founder.store.need().backbone)
    assert founder.error("backbone", "add", peer)[0] == 3


def test_backbone_remove_judges_first(founder: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARMNODE_OWNER_PASSPHRASE")
    assert "not in the backbone" in founder.error("backbone", "remove", PEER)[1]["message"]
    assert "one member at least" in founder.error("backbone", "remove", founder.store.need().peer)[1]["message"]


def test_every_command_has_help_with_what_it_means() -> None:
    for words in (["init"], ["join"], ["invite"], ["leave"], ["ban"], ["backbone", "add"], ["owner", "rotate"]):
        shown = CliRunner().invoke(swarmctl, [*words, "--help"])
        assert shown.exit_code == 0
        assert "--json" in shown.output
    assert "reconstructed" in CliRunner().invoke(swarmctl, ["join", "--help"]).output
    assert "removed and added anew" in " ".join(
        CliRunner().invoke(swarmctl, ["backbone", "add", "--help"]).output.split()
    )


def test_json_is_all_there_is_on_standard_output(node: Callable[[str], Node]) -> None:
    import subprocess

    words = ["-c", "from tests.test_cli_swarm import swarmctl, common; raise SystemExit(common.main(swarmctl, 'x'))"]
    done = subprocess.run(
        [sys.executable, *words, "--data-dir", str(node("founder").folder), "init", "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert json.loads(done.stdout)["daemon"] is False
    assert done.stderr == ""
