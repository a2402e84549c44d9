"""What it costs a node to say what it is and to hear the others, when nothing happens: processor, memory, traffic.

    python -m tests.measure_adverts [--peers 10] [--seconds 60] [--settle 20]

Each peer is a process of its own with libp2p, gossip, the DHT, adverts, news and mDNS, and nothing else. All dial the
first one; further connections they find by themselves. Figures are of the time after `settle`.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import structlog
import trio

from swarmnode.durable import write_whole
from swarmnode.identity import KEY_FILE, load_or_create_identity
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.swarm.store import SwarmFiles, SwarmStore
from tests.advert_tools import usual_content
from tests.swarm_members import Founder
from tests.swarm_nodes import SwarmNode, member_store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=20.0)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        trio.run(peer, Path(options.child[0]), options.child[1], options.settle, options.seconds)
        return
    report(run_peers(options.peers, options.settle, options.seconds))


def run_peers(peers: int, settle: float, seconds: float) -> list[dict[str, float]]:
    """Start the processes and collect what each found out about itself."""
    command = [sys.executable, "-m", "tests.measure_adverts", "--settle", str(settle), "--seconds", str(seconds)]
    children: list[subprocess.Popen[str]] = []
    address = ""
    with tempfile.TemporaryDirectory() as temporary:
        folders = members(Path(temporary), peers)
        try:
            for folder in folders:
                arguments = [*command, "--child", str(folder), address]
                child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
                children.append(child)
                assert child.stdout is not None
                address = address or child.stdout.readline().strip()
            return [json.loads(said_last(child)) for child in children]
        finally:
            for child in children:
                child.kill()


def said_last(child: subprocess.Popen[str]) -> str:
    """The result among warnings, which go to standard output as well."""
    return [line for line in child.communicate()[0].splitlines() if line.startswith("{")][-1]


def members(folder: Path, count: int) -> list[Path]:
    """Data folders of the members of a new swarm, the founder's first."""
    founder = Founder.make(folder / "0")
    write_whole(folder / "0" / KEY_FILE, founder.identity.key_pair.private_key.serialize())
    for number in range(1, count):
        own = folder / str(number)
        member_store(founder, own, load_or_create_identity(own))
    return [folder / str(number) for number in range(count)]


async def peer(folder: Path, address: str, settle: float, seconds: float) -> None:
    """One process: print the own address, join, and at the end what it took."""
    identity, store = load_or_create_identity(folder), SwarmStore.open(SwarmFiles(folder))
    async with open_libp2p_network(identity, ["/ip4/127.0.0.1/tcp/0"], psk=store.need().psk) as network:
        content = usual_content(name=identity.peer_id[-6:], addresses=network.addresses, held=())
        node = SwarmNode(identity, network, store, content)
        async with trio.open_nursery() as nursery:
            await nursery.start(partial(node.run, dht=True, lan=True))
            print(network.addresses[0], flush=True)
            if address:
                await network.connect(address)
            await trio.sleep(settle)
            before, began, busy = traffic(node), time.monotonic(), time.process_time()
            await trio.sleep(seconds)
            took = time.monotonic() - began
            spent = {
                "cpu_percent": 100 * (time.process_time() - busy) / took,
                "rss_mib": psutil.Process().memory_info().rss / 2**20,
                "peers_ready": sum(state == "ready" for state in node.states().values()),
                "connections": len(network.connected_peers()),
            }
            spent |= {name: (after - before[name]) / took for name, after in traffic(node).items()}
            print(json.dumps(spent), flush=True)
            nursery.cancel_scope.cancel()


def traffic(node: SwarmNode) -> dict[str, float]:
    network, gossip = node.network.statistics(), node.swarm.statistics().gossip
    return {
        "sent_bytes_per_s": network.bytes_sent,
        "received_bytes_per_s": network.bytes_received,
        "gossip_sent_bytes_per_s": gossip.bytes_sent,
        "gossip_rpcs_per_s": gossip.rpcs_sent,
    }


def report(results: list[dict[str, float]]) -> None:
    print(f"{'':26}{'first':>10}{'mean':>10}{'most':>10}")
    for name in results[0]:
        values = [result[name] for result in results]
        print(f"{name:26}{values[0]:10.2f}{sum(values) / len(values):10.2f}{max(values):10.2f}")


if __name__ == "__main__":
    main()
