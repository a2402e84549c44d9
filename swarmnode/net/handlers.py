"""What both networks do with the user's functions: run handlers and callbacks, and survive whatever these raise."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import structlog
import trio

from capabilities.errors import PeerMistake
from swarmnode.net.counters import Counters
from swarmnode.net.interface import ConnectionCallback, NetworkError, PeerId, StreamHandler
from swarmnode.net.muxer_stream import MuxerStream

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Served:
    handler: StreamHandler
    max_streams_per_peer: int
    open: Counter[PeerId] = field(default_factory=Counter)


class Handlers:
    """The protocols that this node serves, and how many streams each peer has open for each."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._served: dict[str, _Served] = {}

    def __contains__(self, protocol: str) -> bool:
        return protocol in self._served

    def add(self, protocol: str, handler: StreamHandler, max_streams_per_peer: int) -> None:
        if protocol in self._served:
            raise ValueError(f"{protocol} is served already")
        self._served[protocol] = _Served(handler, max_streams_per_peer)

    async def run(self, stream: MuxerStream) -> None:
        """Serve one stream of a known protocol. Raises nothing but Cancelled."""
        served = self._served[stream.protocol]
        if served.open[stream.peer] >= served.max_streams_per_peer:
            self._counters.streams_refused += 1
            await stream.reset()
            return
        served.open[stream.peer] += 1
        try:
            await served.handler(stream)
            await stream.aclose()
        except Exception as error:
            await stream.reset()
            if _is_all(error, NetworkError):
                log.debug("stream ended", protocol=stream.protocol, peer=stream.peer, reason=str(error))
            elif _is_all(error, NetworkError, PeerMistake, trio.TooSlowError):
                log.warning("peer mistake", protocol=stream.protocol, peer=stream.peer, reason=_first_text(error))
                self._counters.peer_mistakes += 1
            else:
                log.exception("handler failed", protocol=stream.protocol, peer=stream.peer)
                self._counters.handler_errors += 1
        except BaseExceptionGroup as group:  # cancelled, with what the end did to its tasks
            await stream.reset()
            _, rest = group.split((NetworkError, PeerMistake, trio.TooSlowError))
            assert rest is not None  # the cancellation
            raise rest from None
        except BaseException:
            await stream.reset()
            raise
        finally:
            served.open[stream.peer] -= 1
            if not served.open[stream.peer]:
                del served.open[stream.peer]


class ConnectionNews:
    """Who wants to know of peers that come and go."""

    def __init__(self) -> None:
        self._callbacks: list[ConnectionCallback] = []

    def add(self, callback: ConnectionCallback) -> None:
        self._callbacks.append(callback)

    def tell(self, peer: PeerId, *, up: bool) -> None:
        log.debug("peer connected" if up else "peer gone", peer=peer)
        for callback in self._callbacks:
            try:
                callback(peer, up)
            except Exception:
                log.exception("connection callback failed", peer=peer)


def _is_all(error: Exception, *kinds: type[Exception]) -> bool:
    """Whether a handler ended for nothing but these: then nothing is wrong with the handler."""
    if isinstance(error, ExceptionGroup):
        return error.split(kinds)[1] is None
    return isinstance(error, kinds)


def _first_text(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "it is too slow" if isinstance(error, trio.TooSlowError) else str(error)
