"""What gossip costs each of many peers, on simulated time with py-libp2p's own router: bytes a second on the wire.

    python -m tests.measure_gossip [--peers 100] [--backbone 1] [--wanted 8] [--seconds 30] [--seed 7]

The backbone are hubs: everybody is connected to all of it, and to others until there are `wanted` connections. With
`wanted` no more than the backbone the others are workers behind NATs, that nobody can dial.
"""

from __future__ import annotations

import argparse
import logging
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import fmean

import structlog
import trio
from libp2p.pubsub.pb import rpc_pb2
from trio.testing import MockClock

from swarmnode.limits import NEIGHBOURS_WANTED
from swarmnode.net.gossip_outbox import Outbox
from swarmnode.net.gossip_router import OFFERS, TURN_BEATS
from tests.gossip_tools import RPC_OVERHEAD_BYTES, Listener, chatter, memory_listeners, meshed, spent

_LATE_S = 8.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("peers", 100), ("backbone", 1), ("wanted", NEIGHBOURS_WANTED), ("seconds", 30), ("seed", 7)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    trio.run(measure, options, clock=MockClock(autojump_threshold=0))


async def measure(options: argparse.Namespace) -> None:
    chance, hubs, seconds = random.Random(options.seed), options.backbone, options.seconds
    edges = meshed(chance, options.peers, hubs, options.wanted)
    with sorted_by_kind() as kinds:
        async with memory_listeners(options.peers, edges, chance) as nodes:
            await trio.sleep(2)
            await chatter(nodes, chance, OFFERS * TURN_BEATS)  # nobody is new after that
            before, kinds_before = [node.gossip.statistics() for node in nodes], [total(kinds, node) for node in nodes]
            sent = await chatter(nodes, chance, seconds)
            after, kinds_after = [node.gossip.statistics() for node in nodes], [total(kinds, node) for node in nodes]
            await trio.sleep(_LATE_S)
            rates = [spent(*each, seconds) for each in zip(before, after, strict=True)]
            took = [
                (late.bytes_received - early.bytes_received) / seconds
                for early, late in zip(before, after, strict=True)
            ]
            kinds_sent = [late - early for early, late in zip(kinds_before, kinds_after, strict=True)]
            print(f"sent, bytes a second: mean {fmean(rates):,.0f}, most {max(rates):,.0f}")
            for who, chosen in (("hubs", slice(hubs)), ("others", slice(hubs, None))):
                parts = sum(kinds_sent[chosen], Counter[str]())
                told = ", ".join(f"{kind} {parts[kind] / len(rates[chosen]) / seconds:,.0f}" for kind in sorted(parts))
                print(f"  {who}: mean {fmean(rates[chosen]):,.0f}, most {max(rates[chosen]):,.0f}: {told}")
            print(f"received without packets' overhead: mean {fmean(took):,.0f}, most {max(took):,.0f}")
            delays = [node.times[data] - then for data, then in sent.items() for node in nodes if data in node.times]
            missed = len(sent) * (len(nodes) - 1) - len(delays)
            print(f"heard after {fmean(delays):.2f} s in the mean, {max(delays):.2f} s at most; {missed} missed")


@contextmanager
def sorted_by_kind() -> Iterator[dict[int, Counter[str]]]:
    """Bytes that each outbox gave out, by what they are; by the outbox's id."""
    kinds: dict[int, Counter[str]] = {}
    take = Outbox._take

    def counted(outbox: Outbox) -> rpc_pb2.RPC:
        rpc = take(outbox)
        if size := rpc.ByteSize():
            control = rpc.control.ByteSize()
            parts = {"messages": size - control, "offers and control": control, "packets": RPC_OVERHEAD_BYTES}
            kinds.setdefault(id(outbox), Counter()).update(parts)
        return rpc

    Outbox._take = counted  # type: ignore[method-assign, assignment]
    try:
        yield kinds
    finally:
        Outbox._take = take  # type: ignore[method-assign]


def total(kinds: dict[int, Counter[str]], node: Listener) -> Counter[str]:
    outboxes: Iterable[Outbox] = node.gossip._surroundings.peer_queues.values()
    return sum((kinds.get(id(outbox), Counter[str]()) for outbox in outboxes), Counter[str]())


if __name__ == "__main__":
    main()
