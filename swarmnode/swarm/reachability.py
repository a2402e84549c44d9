"""Which addresses go into an invite: those that really answer, the ones that reach furthest first.

Each address is dialed from this machine, as a stranger with the network key would. That finds closed ports and
addresses that are gone; it cannot tell whether a router lets the outside in, so addresses that mean something only on
this network or this machine are named in a warning.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import trio

from capabilities.errors import NotReady
from swarmnode import limits
from swarmnode.net.interface import DialFailed

Dial = Callable[[str], Awaitable[object]]
"""Connects to an address with its peer id, or raises DialFailed. It must not be this node's own network, which would
recognise itself."""

PUBLIC: Final = "public"
PRIVATE: Final = "private"
LOCAL: Final = "local"
_RANKS: Final = (PUBLIC, PRIVATE, LOCAL)
_WORDS: Final = {
    PRIVATE: "reachable only on the same local network (or through a port that a router forwards)",
    LOCAL: "reachable on this machine only",
}
_SHARED: Final = ipaddress.ip_network("100.64.0.0/10")  # carrier-grade NAT (RFC 6598): not global, and not private


class Warned(NamedTuple):
    """An address and what is to be said about it."""

    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reachable:
    """`addresses` for the invite, best first; `warnings` about them and about those left out."""

    addresses: tuple[str, ...]
    warnings: tuple[Warned, ...]


def scope_of(address: str) -> str:
    """How far an address reaches: `public`, `private` or `local`. A DNS name counts as public."""
    _, kind, host, *_ = (*address.split("/"), "", "")
    if kind not in ("ip4", "ip6"):
        return PUBLIC
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return LOCAL
    if ip.is_loopback or ip.is_link_local or ip.is_unspecified:
        return LOCAL
    return PUBLIC if ip.is_global and ip not in _SHARED else PRIVATE


async def find_reachable(dial: Dial, listened: Sequence[str], named: Sequence[str] = ()) -> Reachable:
    """Try all addresses at once; takes INVITE_DIAL_SECONDS_MAX at most.

    `named` are addresses that a person asked for (a forwarded port, a DNS name): they go in first and whatever they
    answer, since a router often does not let its own network in that way. Loopback goes in only where all else fails.

    Raises:
        NotReady: there is none to put in.
    """
    faults = await _faults(dial, [*named, *listened])
    answering = [address for address in dict.fromkeys(listened) if address not in faults and address not in named]
    answering.sort(key=lambda address: _RANKS.index(scope_of(address)))
    if any(scope_of(address) != LOCAL for address in (*named, *answering)):
        answering = [address for address in answering if scope_of(address) != LOCAL]
    chosen = tuple(dict.fromkeys((*named, *answering)))[: limits.INVITE_ADDRESSES_MAX]
    if not chosen:
        tried = "; ".join(f"{address}: {fault}" for address, fault in faults.items())
        raise NotReady(
            f"no address of this peer answers ({tried or 'it listens on none'})",
            hint="Let it listen where others can reach it (node.listen), or name an address with --address.",
        )
    warnings = [Warned(address, f"did not answer: {fault}") for address, fault in faults.items()]
    if all(scope_of(address) != PUBLIC for address in chosen):
        warnings += [Warned(address, _WORDS[scope_of(address)]) for address in chosen]
    return Reachable(chosen, tuple(warnings))


async def _faults(dial: Dial, addresses: Sequence[str]) -> dict[str, str]:
    """Why an address did not answer, for those that did not."""
    faults: dict[str, str] = {}

    async def try_one(address: str) -> None:
        fault = f"silent for {limits.INVITE_DIAL_SECONDS_MAX:.0f} s"
        with trio.move_on_after(limits.INVITE_DIAL_SECONDS_MAX):
            try:
                await dial(address)
                return
            except DialFailed as error:
                fault = error.reason
        faults[address] = fault

    async with trio.open_nursery() as nursery:
        for address in dict.fromkeys(addresses):
            nursery.start_soon(try_one, address)
    return {address: faults[address] for address in dict.fromkeys(addresses) if address in faults}
