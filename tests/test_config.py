"""The configuration file: defaults that document themselves, and one clear line for every mistake."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from capabilities.errors import UsageError
from swarmnode.config import Config, default_text, load_config, parse_config

LEADER = "/ip4/192.0.2.7/tcp/11436/p2p/12D3KooWBhSrGJeT5RQc6KsaYCsKu1R8R3Yk3zPpJ1CBhCsVYM2W"


def test_default_text_is_the_default_configuration() -> None:
    assert parse_config(default_text()) == Config()
    assert parse_config("") == Config()
    assert tomllib.loads(default_text())["leader"]["context_tokens"] == 4096


def test_every_key_is_printed_under_its_meaning() -> None:
    lines = default_text().splitlines()
    assert max(map(len, lines)) <= 110
    for section, table in Config():
        for key, field in type(table).model_fields.items():
            assert field.description, f"[{section}] {key} says nothing of itself"
            assert field.description.endswith((".", ".)", "...")), f"[{section}] {key}"
            at = next(i for i, line in enumerate(lines) if line.startswith(f"{key} = "))
            assert lines[at - 1].startswith("# ")


def test_values_are_read() -> None:
    config = parse_config(f"""
        [node]
        name = "attic"
        listen = ["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0"]
        [swarm]
        role = "worker"
        leader = "{LEADER}"
        [leader]
        request_deadline_s = 30
    """)
    assert config.node.name == "attic"
    assert config.node.listen == ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/0")
    assert config.swarm.leader == LEADER
    assert config.leader.request_deadline_s == 30.0
    assert config.compute == Config().compute


def test_a_backends_factory_has_two_names() -> None:
    assert parse_config('[backend]\nfactory = "late:Late"') == parse_config('[compute]\nfactory = "late:Late"')
    both = parse_config('[backend]\nfactory = "late:Late"\n[compute]\nfactory = "late:Late"\nthreads = 2')
    assert (both.compute.factory, both.compute.threads) == ("late:Late", 2)
    with pytest.raises(UsageError, match=r"keep one"):
        parse_config('[backend]\nfactory = "late:Late"\n[compute]\nfactory = "early:Early"')
    with pytest.raises(UsageError, match=r"\[backend\] is no known section"):
        parse_config('[backend]\nfactories = "late:Late"')


def test_budgets_follow_the_machine_unless_given() -> None:
    node = Config().node
    assert node.memory_bytes(8 << 30) == 6 << 30
    assert node.disk_bytes(100) == 50
    assert node.disk_bytes(60, 40) == 50, "the next start finds the same"
    assert node.disk_bytes(0, 40) == 40, "a disk that others have filled takes no expert away"
    assert parse_config("[node]\nmemory_mib = 3").node.memory_bytes(1) == 3 << 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[leader]\ncontex_tokens = 3", "[leader] contex_tokens is no known key; did you mean context_tokens?"),
        ("[leder]\nmodel = 'x'", "[leder] is no known section; did you mean leader?"),
        ("a = 1", "[a] is no known section; known are node, swarm, leader, compute, limits, requests, api, log"),
        ("[leader]\nparallel = '8'", "[leader] parallel must be a whole number, not '8'"),
        ("[leader]\nparallel = true", "[leader] parallel must be a whole number, not True"),
        ("[leader]\nparallel = 0", "[leader] parallel must be at least 1, not 0"),
        ("[leader]\nparallel = 1_000", "[leader] parallel must be at most 256, not 1000"),
        ("[leader]\nfast = 1\nqueue_limit = -1", "[leader] queue_limit must be at least 0, not -1 (and 1 more)"),
        ("[leader]\nrequest_deadline_s = nan", "[leader] request_deadline_s must be at most 86400, not nan"),
        ("leader = 3", "[leader] must be a table of keys"),
        ("[swarm]\nrole = 'boss'", "[swarm] role must be 'member', 'leader' or 'worker', not 'boss'"),
        ("[node]\nlisten = '/ip4/0.0.0.0/tcp/0'", "[node] listen must be a list, not '/ip4/0.0.0.0/tcp/0'"),
        (
            "[node]\nlisten = ['/ip4/1.2.3.4/udp/3']",
            "[node] listen must be a TCP address such as /ip4/0.0.0.0/tcp/11436, not '/ip4/1.2.3.4/udp/3'",
        ),
        (
            "[node]\nlisten = ['0.0.0.0:3']",
            "[node] listen must be an address such as /ip4/0.0.0.0/tcp/11436, not '0.0.0.0:3'",
        ),
        ("[node]\nname = 'a b'", "[node] name must be 1 to 63 letters, digits, dots, dashes or underscores, not 'a b'"),
        (
            "[compute]\nkernel = 'nope'",
            "[compute] kernel must be one of x64, sse42, sandybridge, piledriver, haswell, skylakex, icelake, zen4,"
            " armv8.0_1, armv8.2_1, armv8.2_2, vulkan, not 'nope'",
        ),
        ("[compute]\nfactory = 'os.system'", "[compute] factory must be module:Class, not 'os.system'"),
        (f"[swarm]\nleader = '{LEADER}'", '[swarm] leader is for workers: set role = "worker", or leave it empty'),
        (
            "[api]\nlisten = '0.0.0.0:11435'",
            '[api] listen is an address that other machines reach, so it needs a key: set keys = ["KEY"] with what'
            " `openssl rand -hex 24` prints, or listen on 127.0.0.1",
        ),
        (
            "[api]\nlisten = '::1'",
            "[api] listen must be an address and a port such as 127.0.0.1:11435, or \"off\", not '::1'",
        ),
        (
            "[api]\nkeys = ['secret']",
            "[api] keys must have 16 to 256 characters, no spaces (`openssl rand -hex 24` makes one)",
        ),
        (
            "[api]\norigins = ['*']",
            "[api] origins must be an origin such as https://chat.example.org, without a path, not '*'",
        ),
        ("[leader", "not valid TOML: Expected ']' at the end of a table declaration (at end of document)"),
    ],
)
def test_every_mistake_is_one_line_that_names_its_place(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(text)
    assert caught.value.message == message
    assert "swarmnode config --default" in caught.value.hint


def test_worker_must_know_its_leader_and_the_leaders_key() -> None:
    with pytest.raises(UsageError, match="must know its leader"):
        parse_config("[swarm]\nrole = 'worker'")
    with pytest.raises(UsageError, match=r"must be a TCP address such as .*/p2p/"):
        parse_config("[swarm]\nrole = 'worker'\nleader = '/ip4/192.0.2.7/tcp/11436'")


def test_file_is_named_in_its_errors(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    with pytest.raises(UsageError, match=r"mine\.toml: No such file"):
        load_config(file)
    file.write_text("[leader]\nmodle = 'x'")
    with pytest.raises(UsageError, match=r"mine\.toml: \[leader\] modle is no known key; did you mean model\?"):
        load_config(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"mine\.toml: "):
        load_config(file)
    file.write_bytes(b"#" * (2 << 20))
    with pytest.raises(UsageError, match="no configuration"):
        load_config(file)
    assert load_config(None) == Config()


def test_nested_junk_is_refused() -> None:
    with pytest.raises(UsageError):
        parse_config("a = " + "[" * 100_000)
