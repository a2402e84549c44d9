"""Peers of one swarm on one local network find each other without an address: multicast DNS (RFC 6762, 6763).

Each announces a service `_swarmnode._tcp` under its peer id, with its port, its addresses, and a tag that only members
understand: a hash of the peer id under the swarm's network key. A stranger sees that some peer is here, and neither
which swarm it belongs to nor which of the others belong to the same one. What is found is a place to dial and no more:
the network key and the handshake prove who answers there.

zeroconf runs in threads of its own; what it finds comes to trio as a call.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

import structlog
import trio
from zeroconf import Error, InterfaceChoice, IPVersion, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

from swarmnode import limits
from swarmnode.net.interface import PeerId
from swarmnode.swarm.reachability import LOCAL, scope_of
from swarmnode.swarm.record import is_address, peer_of

_log = structlog.get_logger(__name__)

SERVICE: Final = "_swarmnode._tcp.local."
_TAG: Final = b"t"
_TAG_BYTES: Final = 16
_QUERY_MS: Final = 2_000
_CLOSE_SECONDS_MAX: Final = 2.0


class LanState(StrEnum):
    OFF = "off"
    """This node listens on this machine alone: there is nothing to be found."""
    STARTING = "starting"
    ON = "on"
    BLOCKED = "blocked"
    """The system refuses multicast, or this node does not even hear itself."""


def tag_of(psk: bytes, peer: str) -> str:
    """What tells members that `peer` belongs to the swarm with this network key."""
    return hmac.digest(psk, b"swarmnode mdns " + peer.encode(), "sha256")[:_TAG_BYTES].hex()


@dataclass(frozen=True, slots=True)
class Announced:
    """Where this node can be found: one port, and the addresses that are listened on with it."""

    port: int
    hosts: tuple[str, ...]

    @classmethod
    def of(cls, addresses: Sequence[str], *, local: bool) -> Announced | None:
        """From multiaddrs, best first; those of this machine only where `local`. None if nothing remains."""
        parts = [address.split("/") for address in addresses if local or scope_of(address) != LOCAL]
        found = [(part[2], int(part[4])) for part in parts if part[1] in ("ip4", "ip6") and part[3] == "tcp"]
        if not found:
            return None
        port = found[0][1]
        hosts = dict.fromkeys(host for host, its_port in found if its_port == port)
        return cls(port, tuple(hosts)[: limits.LAN_ADDRESSES_MAX])


class LanDiscovery(ServiceListener):
    """Announces this node and finds others. Run `run` in a nursery; `found` is where peers were seen, until they leave.

    `addresses`: what this node listens on. `on_found` is called with a peer that is new, or at other addresses.
    `interfaces`: addresses of those to use (tests: loopback); None takes all.
    """

    def __init__(
        self,
        psk: bytes,
        peer: PeerId,
        addresses: Callable[[], Sequence[str]],
        on_found: Callable[[str], object],
        *,
        interfaces: Sequence[str] | None = None,
    ) -> None:
        self.state = LanState.OFF
        self.reason = ""
        self._psk = psk
        self._peer = peer
        self._addresses = addresses
        self._on_found = on_found
        self._interfaces = interfaces
        self._found: dict[str, tuple[str, ...]] = {}
        self._heard_itself = trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None

    def found(self) -> Mapping[str, tuple[str, ...]]:
        """Addresses with peer ids of the swarm's peers on this network."""
        return dict(self._found)

    async def run(self) -> None:
        """Announce and listen until cancelled. Returns where that makes no sense or is not possible."""
        listened = self._addresses()
        if self._interfaces is None and listened and all(scope_of(address) == LOCAL for address in listened):
            return
        self.state, self._token = LanState.STARTING, trio.lowlevel.current_trio_token()
        try:
            zeroconf = await trio.to_thread.run_sync(self._open)
        except OSError as error:
            self._set_blocked(f"the system refuses multicast: {error.strerror or error}")
            return
        try:
            await self._announce_and_listen(zeroconf)
        finally:
            # (The stubs that trio-typing brings do not know abandon_on_cancel.)
            with trio.CancelScope(shield=True), trio.move_on_after(_CLOSE_SECONDS_MAX):
                await trio.to_thread.run_sync(zeroconf.close, abandon_on_cancel=True)  # type: ignore[call-arg]

    async def _announce_and_listen(self, zeroconf: Zeroconf) -> None:
        browser = await trio.to_thread.run_sync(partial(ServiceBrowser, zeroconf, SERVICE, listener=self))
        info: ServiceInfo | None = None
        try:
            while True:
                wanted = self._info()
                if wanted is not None and wanted != info:
                    register = zeroconf.register_service if info is None else zeroconf.update_service
                    try:
                        await trio.to_thread.run_sync(register, wanted, abandon_on_cancel=True)  # type: ignore[call-arg]
                    except (Error, OSError) as error:  # its name is taken: by a copy of this identity
                        _log.warning("mdns.not_announced", reason=str(error) or type(error).__name__)
                    info = wanted
                    await self._listen_for_itself()
                await trio.sleep(limits.LAN_ANNOUNCE_SECONDS)
        finally:
            browser.cancel()

    async def _listen_for_itself(self) -> None:
        """Multicast that works comes back to who sent it."""
        with trio.move_on_after(limits.LAN_ECHO_SECONDS_MAX):
            await self._heard_itself.wait()
        if not self._heard_itself.is_set():
            self._set_blocked("this node does not hear its own announcement")

    def _set_blocked(self, reason: str) -> None:
        self.state, self.reason = LanState.BLOCKED, reason
        _log.info("mdns.blocked", reason=reason)

    def _open(self) -> Zeroconf:
        if self._interfaces is not None:
            return Zeroconf(interfaces=list(self._interfaces), ip_version=IPVersion.V4Only)
        try:
            return Zeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.All)
        except OSError:  # no IPv6 here
            return Zeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)

    def _info(self) -> ServiceInfo | None:
        announced = Announced.of(self._addresses(), local=self._interfaces is not None)
        if announced is None:
            return None
        return ServiceInfo(
            SERVICE,
            f"{self._peer}.{SERVICE}",
            port=announced.port,
            parsed_addresses=list(announced.hosts),
            properties={_TAG: tag_of(self._psk, self._peer)},
            server=f"{self._peer}.local.",
        )

    # --- In threads of zeroconf's ---

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """A service is there, or says something else."""
        peer = name.partition(".")[0]
        if not is_address(f"/x/p2p/{peer}"):
            return
        info = ServiceInfo(type_, name)
        if not info.request(zc, _QUERY_MS):
            return
        tag = info.properties.get(_TAG) or b""
        if not hmac.compare_digest(tag, tag_of(self._psk, peer).encode()):
            return
        hosts = info.parsed_addresses(IPVersion.All)[: limits.LAN_ADDRESSES_MAX]
        self._in_trio(self._note, peer, tuple(_multiaddr(host, info.port or 0, peer) for host in hosts))

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """See add_service."""
        self.add_service(zc, type_, name)

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """A service said goodbye, or was silent for too long."""
        self._in_trio(self._note, name.partition(".")[0], ())

    def _in_trio(self, call: Callable[..., object], *args: object) -> None:
        assert self._token is not None
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(call, *args)

    # --- Back in trio ---

    def _note(self, peer: str, addresses: tuple[str, ...]) -> None:
        if peer == self._peer:
            if addresses:
                self._heard_itself.set()
                self.state, self.reason = LanState.ON, ""
            return
        usable = tuple(address for address in addresses if is_address(address) and peer_of(address) == peer)
        if not usable:
            self._found.pop(peer, None)
        elif self._found.get(peer) != usable and (peer in self._found or len(self._found) < limits.LAN_PEERS_MAX):
            self._found[peer] = usable
            _log.info("mdns.found", peer=peer, addresses=usable)
            self._on_found(peer)


def _multiaddr(host: str, port: int, peer: str) -> str:
    """ "" for addresses that mean nothing without their interface."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if ip.is_link_local and ip.version == 6:
        return ""
    return f"/ip{ip.version}/{ip}/tcp/{port}/p2p/{peer}"
