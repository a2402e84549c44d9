"""`swarmctl init`, `join`, `invite`, `leave`, `ban` and `backbone`: belonging to a swarm, and the owner's say in it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.belonging import base64_text, call, open_store, publish, show, unlock
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.owner import owner
from swarmnode.cli.passphrase import new_passphrase, passphrase_option
from swarmnode.control_client import request
from swarmnode.limits import INVITE_SECONDS_MAX, INVITE_SECONDS_MIN
from swarmnode.printable import printable_line

DISCLOSURE = """\
Before you join, know who sees what:
  - The swarm's backbone, the peers that may lead it, reads prompts and answers in plain text.
  - Workers, and this machine will be one, compute on activations. Much of the text can be reconstructed from them.
Ask a swarm only what its members may know, and keep what passes through this machine to yourself."""
TOKEN_CHARS_MAX = 8_192
PEER_ID_CHARS_MIN = 46  # of RSA keys; those of Ed25519 keys have 52
_UNITS = {"m": 60, "h": 3_600, "d": 86_400}


# -- entering and leaving ----------------------------------------------------------------------------------------------


@click.command()
@click.option("--name", default="swarm", show_default=True, help="What people call the swarm.")
@passphrase_option
@common_options
@pass_settings
def init(settings: Settings, name: str, passphrase_file: Path | None) -> None:
    """Make a swarm, with this peer as its backbone and an owner's key that a passphrase protects.

    Who has the key and its passphrase decides who may lead, who is banned, and whose models count. Keep a copy of it:
    `swarmctl owner export FILE`.

    \b
    Examples:
      swarmctl init --name home
      swarmctl init --passphrase-file FILE
    """
    from swarmnode.swarm.founding import Founding
    from swarmnode.swarm.owner_key import OwnerKey
    from swarmnode.swarm.record import check_name

    check_name(name)
    store = open_store(settings)
    store.check_free()
    words = new_passphrase(passphrase_file)
    key = OwnerKey.generate()
    founding = Founding.draft(name, call(settings, "swarm_info", {})["peer_id"], key)
    file = store.files.owner_key(founding.chain.swarm)
    file.save(key.seal(founding.chain.swarm, words))  # first: without its key a swarm would be lost
    chain, backbone_set = base64_text(founding.chain.to_bytes()), base64_text(founding.backbone.to_bytes())
    params = {"name": name, "chain": chain, "backbone": backbone_set}
    result = {**call(settings, "swarm_init", params), "owner_key": str(file.path)}
    show(settings, result, f"The swarm {name} is made. Its owner's key is in {file.path}; keep a copy elsewhere.")
    _say_next(settings, result, "`swarmctl invite` makes a token for the next peer.")


@click.command()
@click.argument("token")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common_options
@pass_settings
def join(settings: Settings, token: str, yes: bool) -> None:
    """Enter a swarm with an invite, as a worker. TOKEN '-' reads standard input.

    The swarm's backbone reads prompts and answers in plain text. Workers see activations, from which much of the text
    can be reconstructed.

    \b
    Examples:
      swarmctl join TOKEN
      swarmctl join - < token.txt
    """
    from swarmnode.swarm.invites import Invite

    if token == "-":
        token = sys.stdin.read(TOKEN_CHARS_MAX)
    store = open_store(settings)
    store.check_free()
    invite = Invite.parse(token)
    click.echo(DISCLOSURE, err=True)
    if not yes and sys.stdin.isatty():
        click.confirm(f"Join the swarm {invite.name} ({invite.swarm[:16]})?", abort=True, err=True)
    result = call(settings, "swarm_join", {"token": invite.token})
    show(settings, result, f"This peer is a member of the swarm {invite.name}.")
    _say_next(settings, result, "`swarmctl status` shows it.")


@click.command()
@click.option("--force", is_flag=True, help="Also while this peer is in a backbone of several.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@common_options
@pass_settings
def leave(settings: Settings, force: bool, yes: bool) -> None:
    """Leave the swarm. The way back is a new invite; the owner's key stays if it is here.

    \b
    Examples:
      swarmctl leave
    """
    record = open_store(settings).need()
    if not yes and sys.stdin.isatty():
        click.confirm(f"Leave the swarm {record.name} ({record.swarm[:16]})?", abort=True, err=True)
    result = call(settings, "swarm_leave", {"force": force})
    show(settings, result, f"This peer has left the swarm {record.name}.")
    if result["owner_key"] and not settings.json:
        click.echo(f"The owner's key stays in {result['owner_key']}.", err=True)


def _say_next(settings: Settings, result: Mapping[str, Any], what: str) -> None:
    if not settings.json:
        click.echo(what if result["daemon"] else f"Start the daemon with `swarmnode run`, then: {what}", err=True)


# -- invites -----------------------------------------------------------------------------------------------------------


def _lifetime(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    number, unit = value[:-1], value[-1:]
    if not number.isdecimal() or unit not in _UNITS or len(number) > 6:
        raise click.BadParameter(f"{value!r} is no time such as 30m, 12h or 7d")
    seconds = int(number) * _UNITS[unit]
    if not INVITE_SECONDS_MIN <= seconds <= INVITE_SECONDS_MAX:
        raise click.BadParameter(f"an invite lasts from a minute to {INVITE_SECONDS_MAX // _UNITS['d']}d, not {value}")
    return seconds


@click.command()
@click.option("--uses", type=click.IntRange(1, 256), default=1, show_default=True, help="How many peers it is for.")
@click.option("--expires", default="7d", show_default=True, callback=_lifetime, help="How long it lasts: 30m, 12h, 7d.")
@click.option("--address", multiple=True, help="Also try this address of this peer (a forwarded port). Repeatable.")
@click.option("--list", "listed", is_flag=True, help="Show the invites that this peer has made.")
@click.option("--revoke", metavar="ID", help="End an invite.")
@common_options
@pass_settings
def invite(
    settings: Settings, uses: int, expires: int, address: tuple[str, ...], listed: bool, revoke: str | None
) -> None:
    """Make a token with which others join, on a backbone peer. Give it to those alone who may: it is a secret.

    It holds the network's key and the addresses of this peer that really answer. This peer admits the newcomers, so
    its daemon must run when they come.

    \b
    Examples:
      swarmctl invite
      swarmctl invite --uses 5 --expires 12h
      swarmctl invite --address /dns/example.org/tcp/11436
      swarmctl invite --list
    """
    if listed and revoke:
        raise UsageError("--list and --revoke are two commands")
    if listed:
        _show_invites(settings, call(settings, "swarm_invite_list", {}))
    elif revoke:
        result = call(settings, "swarm_invite_revoke", {"id": revoke})
        show(settings, result, f"Invite {revoke} is revoked. Members that it made stay members.")
    else:
        params = {"uses": uses, "lifetime_s": expires, "addresses": list(address)}
        _show_token(settings, request(settings.socket, "swarm_invite", params))


def _show_token(settings: Settings, result: dict[str, Any]) -> None:
    if settings.json:
        common.print_json(result)
        return
    click.echo(result["token"])
    until = _moment(result["expires_at_s"])
    click.echo(f"\nInvite {result['id']}, for {result['uses']}, until {until}. On the other machine:", err=True)
    click.echo("  swarmctl join TOKEN", err=True)
    for warning in result["warnings"]:
        click.echo(printable_line(f"Warning: {warning['address']}: {warning['reason']}"), err=True)


def _show_invites(settings: Settings, result: dict[str, Any]) -> None:
    if settings.json:
        common.print_json(result)
        return
    if not result["invites"]:
        click.echo("No invites.")
    for each in result["invites"]:
        until = _moment(each["expires_at_s"])
        click.echo(f"{each['id']}  {each['state']:8}  used {each['used']} of {each['uses']}, until {until}")


def _moment(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


# -- the owner's word --------------------------------------------------------------------------------------------------


@click.command()
@click.argument("peer")
@click.option("--lift", is_flag=True, help="Take an earlier ban back.")
@passphrase_option
@common_options
@pass_settings
def ban(settings: Settings, peer: str, lift: bool, passphrase_file: Path | None) -> None:
    """Shut PEER (its whole peer id) out of the swarm, or let it in again. Needs the owner's key.

    A member of the backbone must be removed from it first. What a banned backbone peer vouched for counts no more:
    members that it admitted need a new invite, unless they were renewed since.

    \b
    Examples:
      swarmctl ban PEER
      swarmctl ban PEER --lift
    """
    from swarmnode.swarm.bans import Ban
    from swarmnode.swarm.record import ban_news

    store = open_store(settings)
    record = store.need()
    check_peer(peer)
    if peer in record.backbone.peers and not lift:
        raise UsageError(f"{peer} is in the backbone", hint=f"Run `swarmctl backbone remove {peer}` first.", peer=peer)
    if record.bans.is_banned(peer) is not lift:
        hint = "Check the peer id: `swarmctl status --json` shows them whole."
        raise UsageError(f"{peer} is {'not banned' if lift else 'banned already'}", hint=hint, peer=peer)
    key = unlock(store, passphrase_file)
    signed = Ban.make(record.swarm, peer, record.bans.next_sequence, not lift, key.sign)
    result = publish(settings, [ban_news(signed)])
    shown = {"peer": peer, "banned": not lift, "sequence": signed.sequence, "daemon": result["daemon"]}
    show(settings, shown, f"{peer} is banned." if not lift else f"{peer} is no longer banned.")


def check_peer(peer: str) -> None:
    """UsageError unless this is a whole peer id."""
    from capabilities.errors import PeerMistake
    from capabilities.packing import Fields

    try:
        Fields([peer], 1, "peer").peer("id")
        if len(peer) < PEER_ID_CHARS_MIN:
            raise PeerMistake("too short")
    except PeerMistake:
        hint = "`swarmctl status --json` shows them whole."
        raise UsageError(f"{peer[:80]!r} is no peer id", hint=hint) from None


@click.group()
@common_options
def backbone() -> None:
    """Who may lead: the peers that hold the trunk, vote, and read all text."""


@backbone.command("list")
@common_options
@pass_settings
def list_backbone(settings: Settings) -> None:
    """Show the backbone that acts, as far as this peer knows."""
    record = open_store(settings).need()
    members = [{"peer": each.peer, "vote_file": each.vote_file.hex()} for each in record.backbone.members]
    result = {"version": record.backbone.version, "members": members, "quorum": record.backbone.quorum}
    lines = "\n".join(f"  {each['peer']}" for each in members)
    if settings.json:
        common.print_json(result)
    else:
        click.echo(f"version {result['version']}, {record.backbone.quorum} of {len(members)} elect a leader\n{lines}")


@backbone.command()
@click.argument("peer")
@passphrase_option
@common_options
@pass_settings
def add(settings: Settings, peer: str, passphrase_file: Path | None) -> None:
    """Let PEER, a member that is connected now, lead and vote. Needs the owner's key, and this daemon in the backbone.

    The backbone changes by one peer at a time: the new one acts once majorities of the old and the new have stored it.
    A peer that has lost the file of its votes must be removed and added anew, or it could vote twice.

    \b
    Examples:
      swarmctl backbone add PEER
    """
    from swarmnode.swarm.founding import with_member

    check_peer(peer)
    store = open_store(settings)
    acting = store.need().backbone
    seat = bytes.fromhex(request(settings.socket, "swarm_seat", {"peer": peer})["vote_file"])
    with_member(acting, peer, seat, lambda _: bytes(64))  # to say what is wrong before the passphrase is asked for
    key = unlock(store, passphrase_file)
    _propose(settings, with_member(acting, peer, seat, key.sign).to_bytes(), f"{peer} is to join the backbone")


@backbone.command()
@click.argument("peer")
@passphrase_option
@common_options
@pass_settings
def remove(settings: Settings, peer: str, passphrase_file: Path | None) -> None:
    """Let PEER lead and vote no more; it stays a member. Needs the owner's key, and this daemon in the backbone.

    \b
    Examples:
      swarmctl backbone remove PEER
    """
    from swarmnode.swarm.founding import without_member

    store = open_store(settings)
    acting = store.need().backbone
    without_member(acting, peer, lambda _: bytes(64))
    key = unlock(store, passphrase_file)
    _propose(settings, without_member(acting, peer, key.sign).to_bytes(), f"{peer} is to leave the backbone")


def _propose(settings: Settings, backbone_set: bytes, text: str) -> None:
    result = request(settings.socket, "swarm_backbone_propose", {"backbone": base64_text(backbone_set)})
    show(settings, result, f"{text}: version {result['version']} acts once the members have stored it.")


COMMANDS = (init, join, leave, invite, ban, backbone, owner)
"""For `swarmctl.add_command`."""
