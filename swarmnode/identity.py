"""Who this node is: an Ed25519 key in its data folder, and the lock that keeps the folder to one daemon.

The key's hash is the peer id, by which others know this node for good: losing the file makes it a stranger, and copying
it makes two nodes one. The file is therefore written whole or not at all, readable by its owner only, and a broken one
is reported instead of being replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog
from libp2p.crypto.ed25519 import Ed25519PrivateKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.serialization import deserialize_private_key
from libp2p.peer.id import ID

from capabilities.errors import SwarmError
from swarmnode.durable import write_whole
from swarmnode.net.interface import PeerId

log = structlog.get_logger(__name__)

KEY_FILE = "identity.key"
LOCK_FILE = "daemon.lock"
_KEY_FILE_BYTES_MAX = 1_024
_SIGNATURE_BYTES = 64
_PEER_ID_CHARS_MAX = 128


class BadIdentity(SwarmError):
    """The key file is unusable."""

    type = "bad_identity"
    default_hint = "Restore the file from a backup, or move it away to start as a new peer with a new id."


class DataFolderInUse(SwarmError):
    """Another daemon runs on the data folder."""

    type = "data_folder_in_use"
    default_hint = "Stop the other daemon, or start this one with another --data-dir."


@dataclass(frozen=True, slots=True)
class Identity:
    """A key pair of libp2p's and the peer id that follows from it. Never logged: its repr shows the id alone."""

    key_pair: KeyPair
    peer_id: PeerId

    @classmethod
    def from_key_pair(cls, key_pair: KeyPair) -> Identity:
        return cls(key_pair, PeerId(ID.from_pubkey(key_pair.public_key).to_base58()))

    @classmethod
    def generate(cls) -> Identity:
        """A new identity that is stored nowhere."""
        return cls.from_key_pair(create_new_key_pair())

    def sign(self, data: bytes) -> bytes:
        """A 64-byte Ed25519 signature."""
        return bytes(self.key_pair.private_key.sign(data))

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def verify(peer_id: str, data: bytes, signature: bytes) -> bool:
    """Whether the peer signed `data`. False for anything malformed; never raises."""
    try:
        if len(signature) != _SIGNATURE_BYTES or len(peer_id) > _PEER_ID_CHARS_MAX:
            return False
        public_key = ID.from_base58(peer_id).extract_public_key()
        return public_key is not None and bool(public_key.verify(data, signature))
    except Exception:  # peer ids and signatures come from peers, and the parsers raise whatever those provoke
        return False


def load_or_create_identity(data_folder: Path) -> Identity:
    """The identity of the folder, made on first use. Raises BadIdentity, also if the file cannot be read or written.

    Hold the folder's lock meanwhile, or two daemons may each make one.
    """
    path = data_folder / KEY_FILE
    try:
        try:
            return _read(path)
        except FileNotFoundError:
            identity = Identity.generate()
            data_folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, identity.key_pair.private_key.serialize())
            return identity
    except OSError as error:
        hint = "Check the folder's owner and the disk's free space."
        raise BadIdentity(f"cannot use {path}: {error.strerror}", hint=hint, path=str(path)) from error


def _read(path: Path) -> Identity:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & 0o077:
            log.warning("the identity was readable by others on this machine; now it is not", path=str(path))
            os.fchmod(file.fileno(), 0o600)
        data = file.read(_KEY_FILE_BYTES_MAX + 1)
    try:
        key = deserialize_private_key(data)
        if not isinstance(key, Ed25519PrivateKey) or key.serialize() != data:
            raise ValueError("not an Ed25519 key of libp2p")
    except Exception as error:  # a parser of any bytes raises anything
        message = f"{path} ({len(data)} bytes) holds no identity: it is damaged or cut off"
        raise BadIdentity(message, path=str(path)) from error
    return Identity.from_key_pair(KeyPair(key, key.get_public_key()))


@contextlib.contextmanager
def lock_data_folder(data_folder: Path) -> Iterator[None]:
    """Hold the folder for this process while the context lasts. Raises DataFolderInUse at once if another one has it.

    The system drops the lock when the process ends, however it ends; the file stays and means nothing by itself.
    """
    data_folder.mkdir(parents=True, exist_ok=True)
    path = data_folder / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(32).decode(errors="replace").strip()
            message = f"another daemon (process {holder or 'unknown'}) uses {data_folder}"
            raise DataFolderInUse(message, path=str(data_folder)) from None
        with contextlib.suppress(OSError):  # the number is for people; on a full disk the lock holds without
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield
