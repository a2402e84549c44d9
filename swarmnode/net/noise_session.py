"""The libp2p Noise handshake, and a session after it that keeps out of the way.

The handshake (`/noise`, XX pattern) is py-libp2p's own. The session then takes over both keys and the socket: sealing
and opening are plain functions on bytes, which the muxer calls without awaiting anything. On the wire nothing differs
from py-libp2p's session: messages of a two-byte length and a ChaCha20-Poly1305 ciphertext, nonces counting up.

A nonce must never be skipped: what `seal` returned has to reach the socket whole and in order, or the peer can open
nothing any more. Hence `send` seals and sends under one lock, shielded from cancellation.
"""

from __future__ import annotations

from typing import Any

import trio
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from libp2p.abc import ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.peer.id import ID
from libp2p.security.noise.patterns import PatternXX
from multiaddr import Multiaddr

from swarmnode.net import limits
from swarmnode.net.interface import ConnectionLost
from swarmnode.net.tcp import TcpLink

NOISE_PROTOCOL = "/noise"
_TAG_BYTES = 16
_PLAINTEXT_BYTES_MAX = 65_535 - _TAG_BYTES


class BrokenSession(Exception):
    """The peer sent bytes that are no message of this session."""


class NoiseHandshake:
    """Makes sessions for one identity. The X25519 key lives as long as the process."""

    def __init__(self, key_pair: KeyPair) -> None:
        self._key_pair = key_pair
        self._peer = ID.from_pubkey(key_pair.public_key)
        self._static_key = create_x25519_key_pair().private_key

    async def initiate(self, link: TcpLink, peer: ID) -> NoiseSession:
        """Raises if the other side is not `peer`; whatever a hostile peer provokes may be raised."""
        return NoiseSession(link, await self._pattern().handshake_outbound(link, peer))

    async def respond(self, link: TcpLink) -> NoiseSession:
        return NoiseSession(link, await self._pattern().handshake_inbound(link))

    def _pattern(self) -> PatternXX:
        return PatternXX(self._peer, self._key_pair.private_key, self._static_key)


class _Sealing:
    """One direction: the key that the handshake agreed on and the number of the next message."""

    def __init__(self, cipher_state: Any) -> None:
        self._cipher = ChaCha20Poly1305(cipher_state.k)
        self._number: int = cipher_state.n

    def seal(self, plaintext: bytes | memoryview) -> bytes:
        number, self._number = self._number, self._number + 1
        return self._cipher.encrypt(b"\0\0\0\0" + number.to_bytes(8, "little"), plaintext, None)

    def open(self, ciphertext: memoryview) -> bytes:
        number, self._number = self._number, self._number + 1
        return self._cipher.decrypt(b"\0\0\0\0" + number.to_bytes(8, "little"), ciphertext, None)


class NoiseSession(ISecureConn):  # type: ignore[misc]
    """An authenticated, encrypted connection. `handshaken` is the session that py-libp2p's handshake made."""

    def __init__(self, link: TcpLink, handshaken: Any) -> None:
        self.link = link
        self.is_initiator = link.is_initiator
        self._handshaken = handshaken
        noise = handshaken.conn.noise_state.noise_protocol
        self._outward = _Sealing(noise.cipher_state_encrypt)
        self._inward = _Sealing(noise.cipher_state_decrypt)
        self._incomplete = bytearray()
        self._plain = bytearray()
        self._send_lock = trio.Lock()
        self._early = link.take_ahead()

    # --- Without waiting ---

    def seal(self, plaintext: bytes) -> bytes:
        """`plaintext` as messages on the wire, ready for `link.send_now`. Every result must be sent, in order."""
        if len(plaintext) <= _PLAINTEXT_BYTES_MAX:
            sealed = self._outward.seal(plaintext)
            return self.link.protect(len(sealed).to_bytes(2, "big") + sealed)
        view = memoryview(plaintext)
        messages = []
        for start in range(0, len(view), _PLAINTEXT_BYTES_MAX):
            sealed = self._outward.seal(view[start : start + _PLAINTEXT_BYTES_MAX])
            messages += [len(sealed).to_bytes(2, "big"), sealed]
        return self.link.protect(b"".join(messages))

    def open(self, received: bytes) -> list[bytes]:
        """The plaintexts of all messages that `received` completes. Raises BrokenSession."""
        data: bytes | bytearray = received
        if self._incomplete:
            self._incomplete += received
            if len(self._incomplete) < 2 + int.from_bytes(self._incomplete[:2], "big"):
                return []
            data, self._incomplete = self._incomplete, bytearray()
        plaintexts = []
        view, at, end = memoryview(data), 0, len(data)
        while end - at >= 2:
            n = view[at] << 8 | view[at + 1]
            if end - at - 2 < n:
                break
            try:
                plaintexts.append(self._inward.open(view[at + 2 : at + 2 + n]))
            except (InvalidTag, ValueError) as error:
                raise BrokenSession("a message that does not authenticate") from error
            at += 2 + n
        if at < end:
            self._incomplete += view[at:]
        return plaintexts

    def receive_now(self) -> list[bytes] | None:
        """Plaintexts that have arrived; None if the socket has nothing. Raises ConnectionLost, BrokenSession."""
        if self._early:
            early, self._early = self._early, b""
            return self.open(early)
        data = self.link.receive_now()
        if data is None:
            return None
        if not data:
            raise ConnectionLost("the peer closed the connection")
        return self.open(data)

    def take_ahead(self) -> bytes:
        """Plaintext that `receive_exactly` got but nobody took: whoever goes over to `receive_now` starts with it."""
        ahead, self._plain = bytes(self._plain), bytearray()
        return ahead

    # --- Waiting: for the negotiation of the muxer ---

    async def send(self, data: bytes) -> None:
        """Seal and send; a cancelled caller waits until it is out, or until the connection is given up."""
        async with self._send_lock:
            with trio.CancelScope(shield=True) as scope:
                scope.deadline = trio.current_time() + limits.WRITE_STALL_SECONDS_MAX
                await self.link.send_protected(self.seal(data))
            if scope.cancelled_caught:
                self.link.close_now()
                raise ConnectionLost("the peer stopped reading")

    async def receive_exactly(self, n: int) -> bytes:
        while len(self._plain) < n:
            plaintexts = self.receive_now()
            if plaintexts is None:
                await self.link.wait_readable()
            else:
                self._plain += b"".join(plaintexts)
        taken = bytes(self._plain[:n])
        del self._plain[:n]
        return taken

    # --- What libp2p asks for ---

    async def read(self, n: int | None = None) -> bytes:
        first = await self.receive_exactly(1)
        more = len(self._plain) if n is None else min(len(self._plain), n - 1)
        return first + await self.receive_exactly(more)

    async def write(self, data: bytes) -> None:
        await self.send(bytes(data))

    async def close(self) -> None:
        self.link.close_now()

    def get_local_peer(self) -> ID:
        return self._handshaken.get_local_peer()

    def get_local_private_key(self) -> PrivateKey:
        return self._handshaken.get_local_private_key()

    def get_remote_peer(self) -> ID:
        return self._handshaken.get_remote_peer()

    def get_remote_public_key(self) -> PublicKey:
        return self._handshaken.get_remote_public_key()

    def get_remote_address(self) -> tuple[str, int]:
        return self.link.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.link.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.link.get_connection_type()
