"""What it costs a node to say what it is and to hear the others, when nothing happens: processor, memory, traffic.

    python -m tests.measure_adverts [--peers 10] [--seconds 60] [--settle 20]

Each peer is a process of its own with libp2p, gossip, the DHT and the advert service, and nothing else. All dial the
first one; further connections they find by themselves. Figures are of the time after `settle`.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time

import psutil
import structlog
import trio

from tests.advert_nodes import SpeakingNode, real_node


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=20.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        trio.run(peer, options.child, options.settle, options.seconds)
        return
    report(run_peers(options.peers, options.settle, options.seconds))


def run_peers(peers: int, settle: float, seconds: float) -> list[dict[str, float]]:
    """Start the processes and collect what each found out about itself."""
    command = [sys.executable, "-m", "tests.measure_adverts", "--settle", str(settle), "--seconds", str(seconds)]
    children: list[subprocess.Popen[str]] = []
    address = ""
    try:
        for _ in range(peers):
            child = subprocess.Popen([*command, "--child", address], stdout=subprocess.PIPE, text=True)
            children.append(child)
            assert child.stdout is not None
            address = address or child.stdout.readline().strip()
        return [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    finally:
        for child in children:
            child.kill()


async def peer(address: str, settle: float, seconds: float) -> None:
    """One process: print the own address, join, and at the end what it took."""
    async with real_node(dht=True, held=()) as node:
        print(node.network.addresses[0], flush=True)
        if address:
            await node.network.connect(address)
        await trio.sleep(settle)
        before, began, busy = traffic(node), time.monotonic(), time.process_time()
        await trio.sleep(seconds)
        took = time.monotonic() - began
        spent = {
            "cpu_percent": 100 * (time.process_time() - busy) / took,
            "rss_mib": psutil.Process().memory_info().rss / 2**20,
            "peers_ready": sum(state == "ready" for state in node.states().values()),
            "connections": len(node.network.connected_peers()),
        }
        spent |= {name: (after - before[name]) / took for name, after in traffic(node).items()}
        print(json.dumps(spent), flush=True)


def traffic(node: SpeakingNode) -> dict[str, float]:
    network, gossip = node.network.statistics(), node.gossip.statistics()
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
