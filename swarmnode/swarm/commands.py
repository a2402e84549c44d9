"""What the daemon does for `swarmctl init`, `join`, `invite`, `leave`, `ban`, `backbone` and `owner`: control methods.

The owner's key stays with the command line: what it signs arrives here as records, which are judged like those of any
peer. Where no daemon runs, the same methods are run by the command itself, under the data folder's lock (offline.py);
those that need the swarm's network then end with NoDaemon.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import trio

from capabilities.backbone import BackboneSet
from capabilities.errors import NoDaemon, UsageError
from capabilities.packing import PEER_ID_CHARS_MAX
from swarmnode import limits
from swarmnode.identity import Identity
from swarmnode.net.interface import Network, PeerId
from swarmnode.net.libp2p_host import open_libp2p_network
from swarmnode.swarm.founding import Founding, found
from swarmnode.swarm.invites import INVITE_ID_BYTES, Invite, new_invite_id, new_secret
from swarmnode.swarm.joining import ask_seat, join
from swarmnode.swarm.ownership import OwnerChain
from swarmnode.swarm.reachability import find_reachable
from swarmnode.swarm.record import NEWS_MAX, SwarmRecord, is_address
from swarmnode.swarm.store import SwarmStore

Params = dict[str, Any]
Result = Mapping[str, Any]
OpenNetwork = Callable[[Identity, bytes], AbstractAsyncContextManager[Network]]
"""A network of its own for one conversation: (identity, network key)."""

NEWS_TEXT_CHARS_MAX: Final = 8_192


def outbound_network(identity: Identity, psk: bytes) -> AbstractAsyncContextManager[Network]:
    """A network that listens nowhere."""
    return open_libp2p_network(identity, (), psk=psk)


@dataclass(frozen=True, slots=True)
class RunningSwarm:
    """What the daemon lends to the commands while it takes part in its swarm.

    `propose` gives the owner's next backbone set to the election, and raises UsageError where it does not fit; `spread`
    passes news on to the other members.
    """

    network: Network
    propose: Callable[[BackboneSet], Awaitable[None]]
    spread: Callable[[Sequence[bytes]], None]


class SwarmCommands:
    """The table of methods. `running` is asked each time: None while the daemon takes part in no swarm.

    `changed` is called when this node has entered or left a swarm; it must not wait for the command that calls it.
    """

    def __init__(
        self,
        identity: Identity,
        store: SwarmStore,
        *,
        running: Callable[[], RunningSwarm | None] = lambda: None,
        changed: Callable[[], None] = lambda: None,
        open_network: OpenNetwork = outbound_network,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._identity = identity
        self._store = store
        self._running = running
        self._changed = changed
        self._open_network = open_network
        self._clock = clock

    def table(self) -> Mapping[str, Callable[[Params, Any], Awaitable[Result]]]:
        """For control.serve_control, beside the daemon's other methods."""
        return {
            "swarm_info": self.info,
            "swarm_init": self.init,
            "swarm_join": self.join,
            "swarm_leave": self.leave,
            "swarm_invite": self.invite,
            "swarm_invite_list": self.invite_list,
            "swarm_invite_revoke": self.invite_revoke,
            "swarm_hear": self.hear,
            "swarm_seat": self.seat,
            "swarm_backbone_propose": self.backbone_propose,
        }

    # -- entering and leaving -----------------------------------------------------------------------------------

    async def info(self, params: Params, reply: object) -> Result:
        """Who this node is, and in which swarm."""
        record = self._store.record
        return {"peer_id": self._identity.peer_id, "swarm": None if record is None else _named(record)}

    async def init(self, params: Params, reply: object) -> Result:
        """`name`, `chain`, `backbone`: a swarm that its owner has signed, with this peer as the backbone."""
        founding = Founding(
            _text(params, "name", 64),
            OwnerChain.from_bytes(_blob(params, "chain")),
            BackboneSet.from_bytes(_blob(params, "backbone")),
        )
        identity, now_s = self._identity, int(self._clock())
        begin = partial(found, self._store, identity.peer_id, identity.sign, founding, now_s)
        record = await trio.to_thread.run_sync(begin)
        self._changed()
        return {"swarm": _named(record), "peer_id": record.peer}

    async def join(self, params: Params, reply: object) -> Result:
        """`token`: be admitted with an invite. It needs a network with the invite's key, so this opens one."""
        self._store.check_free()
        invite = Invite.parse(_text(params, "token", limits.INVITE_TOKEN_CHARS_MAX))
        if invite.issuer == self._identity.peer_id:
            raise UsageError("this peer made the invite itself", hint="It is for another machine.")
        invite.check_time(self._clock())
        async with self._open_network(self._identity, invite.psk) as network:
            record = await join(network, invite)
        await trio.to_thread.run_sync(self._store.enter, record)
        self._changed()
        return {"swarm": _named(record), "peer_id": record.peer, "admitted_by": record.certificate.issuer}

    async def leave(self, params: Params, reply: object) -> Result:
        """`force`: also as a member of a backbone that others need."""
        record = self._store.need()
        if record.peer in record.backbone.peers and len(record.backbone.peers) > 1 and params.get("force") is not True:
            raise UsageError(
                "this peer is in the backbone: without it the others may find no majority",
                hint=f"Run `swarmctl backbone remove {record.peer}` first, or leave with --force.",
            )
        await trio.to_thread.run_sync(self._store.leave)
        self._changed()
        key = self._store.files.owner_key(record.swarm)
        return {"left": _named(record), "owner_key": str(key.path) if key.exists else None}

    # -- invites ------------------------------------------------------------------------------------------------

    async def invite(self, params: Params, reply: object) -> Result:
        """`uses`, `lifetime_s`, `addresses` (besides those listened on): a token for newcomers."""
        record = self._store.need()
        if record.peer not in record.backbone.peers:
            hint = "Run it on one of those that `swarmctl backbone list` shows."
            raise UsageError("only a backbone peer can invite", hint=hint)
        uses = _whole(params, "uses", 1, limits.INVITE_USES_MAX)
        lifetime_s = _whole(params, "lifetime_s", limits.INVITE_SECONDS_MIN, limits.INVITE_SECONDS_MAX)
        named = [self._own_address(each) for each in _texts(params, "addresses", limits.INVITE_ADDRESSES_MAX)]
        running = self._need_running()

        async def dial(address: str) -> None:
            async with self._open_network(Identity.generate(), record.psk) as network:
                await network.connect(address)

        reachable = await find_reachable(dial, running.network.addresses, named)
        now_s = int(self._clock())
        invite = Invite(
            swarm=record.swarm,
            name=record.name,
            owner_key=record.chain.current,
            psk=record.psk,
            issuer=record.peer,
            addresses=reachable.addresses,
            invite_id=new_invite_id(),
            secret=new_secret(),
            issued_at_s=now_s,
            expires_at_s=now_s + lifetime_s,
            uses=uses,
        )
        await trio.to_thread.run_sync(self._store.invites().add, invite, now_s)
        return {
            "token": invite.token,
            "id": invite.invite_id.hex(),
            "swarm": _named(record),
            "uses": uses,
            "expires_at_s": invite.expires_at_s,
            "addresses": list(invite.addresses),
            "warnings": [warned._asdict() for warned in reachable.warnings],
        }

    async def invite_list(self, params: Params, reply: object) -> Result:
        """The invites that this peer issued."""
        return {"invites": self._store.invites().listed(self._clock())}

    async def invite_revoke(self, params: Params, reply: object) -> Result:
        """`id`: end an invite."""
        text = _text(params, "id", 2 * INVITE_ID_BYTES)
        try:
            invite_id = bytes.fromhex(text)
        except ValueError:
            raise UsageError(f"{text!r} is no invite's id", hint="`swarmctl invite --list` shows them.") from None
        return {"invite": await trio.to_thread.run_sync(self._store.invites().revoke, invite_id, self._clock())}

    # -- the owner's word ---------------------------------------------------------------------------------------

    async def hear(self, params: Params, reply: object) -> Result:
        """`news`: records of the owner's, all or none of which are taken in and passed on."""
        news = [_decoded(text, "news") for text in _texts(params, "news", NEWS_MAX)]
        new = await trio.to_thread.run_sync(self._store.hear, news)
        if new and (running := self._running()) is not None:
            running.spread(new)
        return {"new": len(new)}

    async def seat(self, params: Params, reply: object) -> Result:
        """`peer`: the name of its vote file, for the owner to sign."""
        record, peer = self._store.need(), PeerId(_text(params, "peer", PEER_ID_CHARS_MAX))
        network = self._need_running().network
        if peer not in network.connected_peers():
            hint = "Its daemon must run, as a member of this swarm: see `swarmctl status`."
            raise UsageError(f"this peer has no connection to {peer}", hint=hint, peer=peer)
        return {"peer": peer, "vote_file": (await ask_seat(network, peer, record.swarm)).hex()}

    async def backbone_propose(self, params: Params, reply: object) -> Result:
        """`backbone`: the owner's next set. It acts once majorities of both versions have stored it."""
        record, backbone = self._store.need(), BackboneSet.from_bytes(_blob(params, "backbone"))
        backbone.verify(record.swarm, self._store.verify_owner)
        await self._need_running().propose(backbone)
        return {"version": backbone.version, "members": list(backbone.peers)}

    # -- parameters ---------------------------------------------------------------------------------------------

    def _need_running(self) -> RunningSwarm:
        if (running := self._running()) is None:
            raise NoDaemon("this needs the daemon, as it talks to other peers")
        return running

    def _own_address(self, text: str) -> str:
        """An address of this peer that a person typed, with or without the peer id."""
        address = text if "/p2p/" in text else f"{text.rstrip('/')}/p2p/{self._identity.peer_id}"
        if not is_address(address) or not address.endswith(f"/p2p/{self._identity.peer_id}"):
            raise UsageError(f"{text!r} is no address of this peer", hint="For example /dns/example.org/tcp/11436.")
        return address


def _named(record: SwarmRecord) -> dict[str, str]:
    return {"id": record.swarm, "name": record.name}


def _text(params: Params, key: str, chars_max: int) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= chars_max:
        raise UsageError(f"{key} is a text of 1 to {chars_max} characters")
    return value


def _texts(params: Params, key: str, count_max: int) -> list[str]:
    value = params.get(key, [])
    if not isinstance(value, list) or len(value) > count_max:
        raise UsageError(f"{key} is a list of up to {count_max} texts")
    if not all(isinstance(each, str) and len(each) <= NEWS_TEXT_CHARS_MAX for each in value):
        raise UsageError(f"{key} is a list of texts")
    return value


def _whole(params: Params, key: str, low: int, high: int) -> int:
    value = params.get(key)
    if type(value) is not int or not low <= value <= high:
        raise UsageError(f"{key} is a whole number from {low} to {high}")
    return value


def _blob(params: Params, key: str) -> bytes:
    return _decoded(_text(params, key, 1 << 16), key)


def _decoded(text: str, key: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise UsageError(f"{key} is no base64") from None
