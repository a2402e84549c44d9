"""The bridge's process: makes the hosts, carries their packets by the rules of `links.py`, obeys lines of JSON.

    -> {"hosts": 5, "ipv4": true, "ipv6": true, "delay_s": 0.01, "seed": 0}       once
    <- {"namespaces": ["/proc/PID/fd/N", ...]}          or {"error": "..."}, and the end
    -> {"set": [0, 1], "cut": true}                     also delay_s, loss, rate_bytes_s: one direction
    -> {"shield": 2, "on": true}                        no connection to host 2 any more
    -> {"counts": true}
    <- {...}                                            one answer a line: it has happened, or {"error": "..."}

When its input ends, so does every process in the namespaces, then the bridge, and with it the hosts. It is a process of
its own so that a busy test does not read as a slow network.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from random import Random
from typing import Any, Final

from tests.netns import hosts
from tests.netns.links import Links

BURST_PACKETS: Final = 64  # from one device before the others have their turn
IDLE_SECONDS: Final = 1.0
NICENESS: Final = -10  # the machine's load must not read as the network's delay
COMMAND_BYTES_MAX: Final = 1 << 16


class Bridge:
    """Hosts, links, and the clock between them."""

    def __init__(self, spec: dict[str, Any]) -> None:
        n, families = spec["hosts"], {"ipv4": spec["ipv4"], "ipv6": spec["ipv6"]}
        self._links = Links([hosts.addresses(i, **families) for i in range(n)], Random(spec["seed"]))
        for source in range(n):
            for to in range(n):
                if source != to:
                    self._links.set(source, to, delay_s=spec["delay_s"])
        self.hosts = hosts.make(n, **families)
        self._index = {host.device: i for i, host in enumerate(self.hosts)}

    def turn(self, also: int) -> bool:
        """Wait for the next event and carry what is due; whether the file `also` can be read."""
        due_s = self._links.next_due_s()
        wait_s = IDLE_SECONDS if due_s is None else min(IDLE_SECONDS, max(0.0, due_s - time.monotonic()))
        readable, _, _ = select.select([also, *self._index], [], [], wait_s)
        for device in readable:
            if device != also:
                self._read(device)
        for to, packet in self._links.receive(time.monotonic()):
            with contextlib.suppress(OSError):  # its queue is full: a packet is lost
                os.write(self.hosts[to].device, packet)
        return also in readable

    def _read(self, device: int) -> None:
        for _ in range(BURST_PACKETS):
            try:
                packet = os.read(device, 2 * hosts.MTU)
            except BlockingIOError:
                return
            self._links.send(self._index[device], packet, time.monotonic())

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        match command:
            case {"set": [source, to], **changes}:
                self._links.set(source, to, **changes)
            case {"shield": host, "on": on}:
                self._links.shield(host, on)
            case {"counts": _}:
                return dict(self._links.counts)
            case _:
                raise ValueError("no such command")
        return {}


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    spec = json.loads(sys.stdin.readline())
    try:
        bridge = Bridge(spec)
    except OSError as error:
        _say({"error": f"network namespaces cannot be made here: {error}"})
        return
    try:
        with contextlib.suppress(OSError):
            os.nice(NICENESS)
        _say({"namespaces": [f"/proc/{os.getpid()}/fd/{host.namespace}" for host in bridge.hosts]})
        pending = b""
        while True:
            if not bridge.turn(0):
                continue
            data = os.read(0, COMMAND_BYTES_MAX)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                try:
                    _say(bridge.obey(json.loads(line)))
                except (ValueError, TypeError) as error:
                    _say({"error": str(error)})
    finally:
        hosts.end_all([host.namespace for host in bridge.hosts])


if __name__ == "__main__":
    main()
