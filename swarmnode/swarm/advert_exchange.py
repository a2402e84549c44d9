"""/swarmnode/adverts/1: who connects asks the other for the adverts that it lacks, and so knows the swarm at once.

Gossip brings an advert each five minutes; a newcomer would wait that long to understand the heartbeats that it hears.

    asker       [all?] and, in the payload, peers with the number of the advert that it has of each (0: none)
    responder   [[length, age in seconds], ...] and the adverts in the payload; again, until an empty list

With `all` the responder sends everything that is newer than what is named; else only of the peers that are named. Ages
let a lifetime go on where it was, instead of beginning anew with each peer that passes an advert on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import trio

from capabilities.advert import ADVERT_BYTES_MAX, LIFETIME_S_MAX, SEQUENCE_MAX
from capabilities.errors import PeerMistake
from capabilities.packing import PEER_ID_CHARS_MAX
from scheduler.rates import TokenBucket
from swarmnode import limits
from swarmnode.net.interface import Network, PeerId, Stream
from swarmnode.wire import Fields, encode_frame, read_frame

PROTOCOL: Final = "/swarmnode/adverts/1"
_NUMBER: Final = struct.Struct("<QB")
_KNOWN_MAX: Final = 1_025
"""Peers in a request: a full book and its owner."""


class AgedAdvert(NamedTuple):
    """An advert's bytes, and how long ago it was last confirmed."""

    data: bytes
    age_s: float


Select = Callable[[Mapping[str, int], bool], Iterable[AgedAdvert]]
"""Sequences by peer, and whether everything that is newer is wanted, or of those peers only -> adverts to send."""


def encode_known(known: Mapping[str, int]) -> bytes:
    """Peers and numbers, as the payload of a request."""
    return b"".join(_NUMBER.pack(number, len(peer)) + peer.encode() for peer, number in known.items())


def decode_known(payload: bytes | memoryview) -> dict[str, int]:
    """PeerMistake unless `encode_known` may have written it."""
    known: dict[str, int] = {}
    at, data = 0, bytes(payload)
    while at < len(data):
        if len(data) - at < _NUMBER.size:
            raise PeerMistake("adverts: the request is cut off")
        number, length = _NUMBER.unpack_from(data, at)
        at += _NUMBER.size + length
        peer = data[at - length : at].decode("ascii", errors="replace")
        if at > len(data) or number > SEQUENCE_MAX or not 0 < length <= PEER_ID_CHARS_MAX or len(known) == _KNOWN_MAX:
            raise PeerMistake("adverts: the request names no peer, or too many")
        known[peer] = number
    return known


class AdvertExchange:
    """Both sides. `select` says what this node has to give."""

    def __init__(self, network: Network, select: Select) -> None:
        self._network = network
        self._select = select
        self._shares: dict[PeerId, TokenBucket] = {}
        network.serve(PROTOCOL, self._serve, max_streams_per_peer=limits.ADVERTS_STREAMS_PER_PEER_MAX)

    async def ask(self, peer: PeerId, known: Mapping[str, int], *, everything: bool) -> list[AgedAdvert]:
        """The adverts that the peer has beyond `known`; without `everything` of the peers in it only.

        Raises NetworkError, PeerMistake or trio.TooSlowError.
        """
        with trio.fail_after(limits.ADVERTS_SECONDS_MAX):
            stream = await self._network.open_stream(peer, PROTOCOL)
            try:
                await stream.send(encode_frame([everything], encode_known(known)))
                adverts: list[AgedAdvert] = []
                while len(adverts) < _KNOWN_MAX:
                    frame = await read_frame(stream, limits.ADVERTS_REPLY)
                    batch = list(_split(frame.header, bytes(frame.payload)))
                    if not batch:
                        break
                    adverts += batch
                return adverts
            finally:
                await stream.reset()

    async def _serve(self, stream: Stream) -> None:
        with trio.fail_after(limits.ADVERTS_SECONDS_MAX):
            frame = await read_frame(stream, limits.ADVERTS_REQUEST)
        everything = Fields(frame.header, "adverts", list).flag(0)
        adverts = list(self._select(decode_known(frame.payload), everything))
        step = limits.ADVERTS_IN_REPLY_MAX - 1
        for batch in (*(adverts[at : at + step] for at in range(0, len(adverts), step)), []):
            header = [[len(each.data), min(LIFETIME_S_MAX, int(each.age_s))] for each in batch]
            reply = encode_frame(header, *(each.data for each in batch))
            await self._wait_for_share(stream.peer, len(reply))
            with trio.fail_after(limits.SEND_SECONDS_MAX):
                await stream.send(reply)

    async def _wait_for_share(self, peer: PeerId, size: int) -> None:
        now = trio.current_time()
        share = self._shares.pop(peer, None) or TokenBucket(
            limits.ADVERTS_SERVED_BURST_BYTES, limits.ADVERTS_SERVED_BYTES_PER_SECOND, now
        )
        self._shares[peer] = share
        if len(self._shares) > limits.ADVERTS_SERVED_PEERS_MAX:
            del self._shares[next(iter(self._shares))]
        await trio.sleep(share.owe(now, size))


def _split(header: object, payload: bytes) -> Iterable[AgedAdvert]:
    """The adverts of one frame of a reply."""
    at = 0
    if not isinstance(header, list):
        raise PeerMistake("adverts: the reply has no list of lengths")
    for item in header:
        fields = Fields(item, "adverts", list)
        length, age_s = fields.integer(0, 1, ADVERT_BYTES_MAX), fields.integer(1, 0, LIFETIME_S_MAX)
        if at + length > len(payload):
            raise PeerMistake("adverts: the reply is cut off")
        yield AgedAdvert(payload[at : at + length], float(age_s))
        at += length
