"""The asker's side of /swarmnode/compare/1, in its own daemon: frames to a peer and its answers back.

A peer is asked over a connection that is up, or over one that is made now; where neither can be, as behind a router, a
backbone peer that it is connected to passes the request on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import trio

from capabilities.errors import DeadlineExceeded, NotReady, SwarmError
from swarmnode import limits
from swarmnode.comparing.messages import PROTOCOL, check_error
from swarmnode.net.interface import Network, NetworkError, PeerId, Stream
from swarmnode.wire import Frame, encode_frame, read_frame


class Asking:
    """addresses_of: where a peer may be reached. backbone: whom to ask to pass a request on."""

    def __init__(
        self,
        network: Network,
        addresses_of: Callable[[str], Sequence[str]],
        backbone: Callable[[], Sequence[PeerId]],
    ) -> None:
        self._network = network
        self._addresses_of = addresses_of
        self._backbone = backbone
        self._streams: OrderedDict[PeerId, Stream] = OrderedDict()  # idle ones, by whom they go to
        self._via: dict[PeerId, PeerId] = {}  # who passed on what was meant for this peer, last time

    async def ask(self, peer: PeerId, header: dict[str, Any], payload: bytes = b"") -> Frame:
        """A peer's answer, which may be an error of its own (messages.check_error).

        Raises:
            NotReady: it cannot be reached, not even by way of the backbone.
            DeadlineExceeded: it did not answer.
        """
        request = encode_frame({**header, "for": str(peer)}, payload)
        with trio.move_on_after(limits.COMPARE_SECONDS_MAX + 2 * limits.SEND_SECONDS_MAX):
            reasons = []
            for via in await self._ways(peer):
                try:
                    answer = await self._exchange(via, request)
                    if via != peer:
                        self._check_reached(answer)
                    self._via[peer] = via
                    return answer
                except (NetworkError, NotReady) as error:
                    reasons.append(str(error))
            why = reasons[-1] if reasons else "it answers at none of its addresses, and no backbone peer is connected"
            raise NotReady(f"{peer} cannot be reached: {why}", hint="Is it running?", peer=str(peer))
        raise DeadlineExceeded(f"{peer} did not answer in time", peer=str(peer))

    @staticmethod
    def _check_reached(answer: Frame) -> None:
        """NotReady if this is the word of a backbone peer that cannot reach it, so that the next one is tried."""
        try:
            check_error(answer)
        except NotReady as error:
            if error.details.get("peer"):
                raise
        except SwarmError:
            pass  # the answer itself

    async def _ways(self, peer: PeerId) -> list[PeerId]:
        """Whom to hand the request to, the best first."""
        me, connected = self._network.peer_id, self._network.connected_peers()
        if peer == me or peer in connected:
            return [peer]
        others = [each for each in self._backbone() if each in connected]
        if (known := self._via.get(peer)) in others and known is not None:
            return [known, *(each for each in others if each != known)]
        for address in self._addresses_of(peer)[: limits.COMPARE_DIALS_MAX]:
            with trio.move_on_after(limits.COMPARE_DIAL_SECONDS_MAX):
                try:
                    if await self._network.connect(address) == peer:
                        return [peer]
                except NetworkError:
                    continue
        return others

    async def _exchange(self, via: PeerId, request: bytes) -> Frame:
        """One request and its answer, over a stream that is kept, or else a new one."""
        stream = self._streams.pop(via, None)
        if stream is not None:
            try:
                return await self._over(via, stream, request)
            except NetworkError:
                pass  # the peer closes streams that are idle
        with trio.fail_after(limits.OPEN_STREAM_SECONDS_MAX):
            stream = await self._network.open_stream(via, PROTOCOL)
        return await self._over(via, stream, request)

    async def _over(self, via: PeerId, stream: Stream, request: bytes) -> Frame:
        whole = False
        try:
            with trio.fail_after(limits.SEND_SECONDS_MAX):
                await stream.send(request)
            answer = await read_frame(stream, limits.COMPARE_REPLY)
            whole = True
        finally:
            if not whole:
                await stream.reset()
        if (other := self._streams.pop(via, None)) is not None:
            await other.reset()
        self._streams[via] = stream
        if len(self._streams) > limits.COMPARE_KEPT_STREAMS_MAX:
            await self._streams.popitem(last=False)[1].reset()
        return answer
