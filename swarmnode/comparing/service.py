"""The peer's side of /swarmnode/compare/1: one piece of work at a time for members, within an allowance.

What is meant for another peer is passed on by a backbone peer, which every member is connected to; it costs nothing but
bytes, and of those each asker has a share. To whom it is passed on the backbone peer stands for the asker.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import structlog
import trio

from capabilities.errors import DeadlineExceeded, NotReady, Overloaded, PeerMistake, SwarmError
from scheduler.allowance import Allowance, Rate
from scheduler.rates import TokenBucket
from swarmnode import limits
from swarmnode.comparing.messages import PROTOCOL, decode_request, encode_error, meant_for
from swarmnode.comparing.work import Spent, Work
from swarmnode.net.interface import Network, NetworkError, PeerId, ServesProtocols, Stream, StreamClosed
from swarmnode.wire import Frame, encode_frame, read_frame

_log = structlog.get_logger(__name__)

ALL_ASKERS: Final = Rate(limits.COMPARE_BURST_SECONDS, limits.COMPARE_RATE)
ONE_ASKER: Final = Rate(limits.COMPARE_ASKER_BURST_SECONDS, limits.COMPARE_ASKER_RATE)


class CompareService:
    """`passes_on`: whether this node is of the backbone."""

    def __init__(self, network: Network, work: Work, passes_on: Callable[[], bool]) -> None:
        now = trio.current_time()
        self._network = network
        self._work = work
        self._passes_on = passes_on
        self._allowance = Allowance(ALL_ASKERS, ONE_ASKER, limits.COMPARE_ASKERS_MAX, now)
        self._turn = trio.Lock()
        self._relays = 0
        self._relayed: OrderedDict[PeerId, TokenBucket] = OrderedDict()

    def register(self, members: ServesProtocols) -> None:
        """Serve members from now on."""
        members.serve(PROTOCOL, self.handle, max_streams_per_peer=limits.COMPARE_STREAMS_PER_PEER_MAX)

    async def handle(self, stream: Stream) -> None:
        """Answer one request after the other until the peer closes, is idle or breaks the protocol."""
        try:
            while True:
                with trio.move_on_after(limits.IDLE_STREAM_SECONDS_MAX) as idle:
                    frame = await read_frame(stream, limits.COMPARE_REQUEST)
                if idle.cancelled_caught:
                    return
                answer = await self._answer(stream.peer, frame)
                with trio.fail_after(limits.SEND_SECONDS_MAX):
                    await stream.send(answer)
        except trio.TooSlowError:
            await stream.reset()
        except StreamClosed as closed:
            if not closed.clean:
                raise

    async def _answer(self, asker: PeerId, frame: Frame) -> bytes:
        try:
            peer = PeerId(meant_for(frame.header))
            if peer != self._network.peer_id:
                return await self._pass_on(asker, peer, frame)
            return await self._compute(asker, frame)
        except SwarmError as error:
            _log.info("compare.refused", asker=asker, error=error.message)
            return encode_error(error)

    async def _compute(self, asker: PeerId, frame: Frame) -> bytes:
        asked = decode_request(frame)
        if self._turn.statistics().tasks_waiting >= limits.COMPARE_WAITING_MAX:
            raise Overloaded("this peer compares with others already")
        spent = Spent()
        with trio.move_on_after(limits.COMPARE_SECONDS_MAX):
            async with self._turn:
                self._check_allowance(asker)  # in its turn: what is under way is not charged yet
                try:
                    return await self._work.answer(asked, spent)
                finally:
                    self._allowance.charge(asker, spent.seconds, trio.current_time())
        raise DeadlineExceeded(f"the peer did not compute it within {limits.COMPARE_SECONDS_MAX:.0f} s")

    def _check_allowance(self, asker: PeerId) -> None:
        wait_s = math.ceil(self._allowance.wait_s(asker, trio.current_time()))
        if wait_s > 0:
            raise Overloaded(
                f"this peer has computed as much for comparisons as it does; again in {wait_s} s",
                hint="A volunteer's time is for requests. Compare less often, or fewer levels.",
                retry_after_s=wait_s,
            )

    # -- for others -----------------------------------------------------------------------------------------------

    async def _pass_on(self, asker: PeerId, peer: PeerId, frame: Frame) -> bytes:
        if not self._passes_on():
            raise PeerMistake("a request for another peer, and only backbone peers pass those on", peer=str(peer))
        if peer not in self._network.connected_peers():
            raise NotReady(f"{peer} is connected to no peer that could pass the request on", peer=str(peer))
        if self._relays >= limits.COMPARE_RELAYS_MAX:
            raise Overloaded("this peer passes as many comparisons on as it can")
        share = self._share(asker)
        if share.missing(trio.current_time(), 1.0):
            raise Overloaded("this peer has passed as much on for comparisons as it does; try again in some minutes")
        self._relays += 1
        try:
            with trio.move_on_after(limits.COMPARE_SECONDS_MAX + limits.SEND_SECONDS_MAX):
                stream = await self._network.open_stream(peer, PROTOCOL)
                try:
                    await stream.send(encode_frame(frame.header, frame.payload))
                    answer = await read_frame(stream, limits.COMPARE_REPLY)
                finally:
                    await stream.reset()
                share.owe(trio.current_time(), len(frame.payload) + len(answer.payload))
                return encode_frame(answer.header, answer.payload)
        except NetworkError as error:
            raise NotReady(f"{peer} cannot be asked: {error}", peer=str(peer)) from None
        finally:
            self._relays -= 1
        raise DeadlineExceeded(f"{peer} did not answer in time", peer=str(peer))

    def _share(self, asker: PeerId) -> TokenBucket:
        share = self._relayed.pop(asker, None) or TokenBucket(
            limits.COMPARE_RELAY_BURST_BYTES, limits.COMPARE_RELAY_BYTES_PER_SECOND, trio.current_time()
        )
        self._relayed[asker] = share
        if len(self._relayed) > limits.COMPARE_ASKERS_MAX:
            self._relayed.popitem(last=False)
        return share
