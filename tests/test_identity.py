"""The node's identity: kept, guarded, and never replaced by accident."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capabilities.errors import SwarmError
from swarmnode.identity import (
    KEY_FILE,
    BadIdentity,
    DataFolderInUse,
    Identity,
    load_or_create_identity,
    lock_data_folder,
    verify,
)


def test_it_stays_the_same(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path / "new" / "folder")
    again = load_or_create_identity(tmp_path / "new" / "folder")
    assert first.peer_id == again.peer_id
    assert first.peer_id.startswith("12D3KooW")
    assert load_or_create_identity(tmp_path / "other").peer_id != first.peer_id


def test_the_file_is_for_its_owner_and_nothing_else_is_left(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        load_or_create_identity(tmp_path)
    finally:
        os.umask(old)
    assert [path.name for path in tmp_path.iterdir()] == [KEY_FILE]
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


def test_a_file_open_to_others_is_closed(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path)
    (tmp_path / KEY_FILE).chmod(0o644)
    assert load_or_create_identity(tmp_path).peer_id == identity.peer_id
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "junk", "huge", "other kind of key"])
def test_a_damaged_file_is_named_and_kept(tmp_path: Path, damage: str) -> None:
    load_or_create_identity(tmp_path)
    path = tmp_path / KEY_FILE
    data = path.read_bytes()
    damaged = {
        "empty": b"",
        "cut": data[:20],
        "longer": data + b"\0",
        "junk": os.urandom(36),
        "huge": bytes(10_000_000),
        "other kind of key": b"\x08\x02\x12\x20" + bytes(32),
    }[damage]
    path.write_bytes(damaged)
    with pytest.raises(BadIdentity) as caught:
        load_or_create_identity(tmp_path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert isinstance(caught.value, SwarmError)
    assert path.read_bytes() == damaged


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / KEY_FILE).mkdir()
    with pytest.raises(BadIdentity, match="directory"):
        load_or_create_identity(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadIdentity):
        load_or_create_identity(tmp_path / "file")


def test_signatures() -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign(b"data")
    assert len(signature) == 64
    assert verify(identity.peer_id, b"data", signature)
    assert not verify(identity.peer_id, b"date", signature)
    assert not verify(other.peer_id, b"data", signature)
    assert not verify(identity.peer_id, b"data", signature[:-1])
    assert not verify(identity.peer_id, b"data", bytes(64))


@given(st.one_of(st.text(), st.text("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz")), st.binary())
def test_verifying_anything_never_raises(peer_id: str, signature: bytes) -> None:
    assert verify(peer_id, b"data", signature) is False
    assert verify(peer_id, b"data", signature.ljust(64, b"\0")[:64]) is False


def test_the_private_key_does_not_show() -> None:
    identity = Identity.generate()
    assert repr(identity) == f"Identity({identity.peer_id})"


HOLD_LOCK = """
import sys, time, pathlib
from swarmnode.identity import lock_data_folder
with lock_data_folder(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_daemon_a_folder_until_it_dies(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD_LOCK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DataFolderInUse, match=f"process {holder.pid}") as caught, lock_data_folder(tmp_path):
            pass
        assert caught.value.hint
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with lock_data_folder(tmp_path), pytest.raises(DataFolderInUse), lock_data_folder(tmp_path):
            pass
        with lock_data_folder(tmp_path):
            pass
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()
