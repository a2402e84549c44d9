"""`swarmctl peer NAME`: what is known and held of one peer; `peer release`: the owner takes that back."""

from __future__ import annotations

import time
from pathlib import Path

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.belonging import open_store, publish, show, unlock
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.passphrase import passphrase_option
from swarmnode.cli.swarm import PEER_ID_CHARS_MIN, check_peer
from swarmnode.control_client import request


class _PeerGroup(click.Group):
    """`peer NAME` is `peer show NAME`, unless NAME is a command's."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["show", *args]
        return super().resolve_command(ctx, args)


@click.group(cls=_PeerGroup, subcommand_metavar="NAME | release NAME")
@common_options
def peer() -> None:
    """Explain one peer: its part, its arithmetic, what is held of it and why.

    NAME is a name, a peer id or a piece of one, as `swarmctl status` shows them.
    """


@peer.command("show")
@click.argument("name")
@common_options
@pass_settings
def show_peer(settings: Settings, name: str) -> None:
    """Explain the peer NAME. `swarmctl peer NAME` does the same."""
    answer = request(settings.socket, "peer", {"name": name})
    if settings.json:
        common.print_json(answer)
    else:
        from swarmnode.cli.render_peer import print_peer

        print_peer(answer)


@peer.command("release")
@click.argument("name")
@passphrase_option
@common_options
@pass_settings
def release_peer(settings: Settings, name: str, passphrase_file: Path | None) -> None:
    """Take back what leaders hold of the peer NAME: it is audited as a new one. Needs the owner's key.

    NAME is as in `swarmctl peer`; a whole peer id is released whether or not anybody knows the peer.
    """
    from swarmnode.swarm.record import release_news
    from swarmnode.swarm.releases import Release

    store = open_store(settings)
    record = store.need()
    subject = name
    if len(name) < PEER_ID_CHARS_MIN:
        subject = str(request(settings.socket, "peer", {"name": name})["peer_id"])
    check_peer(subject)
    if record.bans.is_banned(subject):
        hint = f"`swarmctl ban --lift {subject}` lets it in again."
        raise UsageError(f"{subject} is banned", hint=hint, peer=subject)
    key = unlock(store, passphrase_file)
    number = record.releases.number_of(subject) + 1
    signed = Release.make(record.swarm, subject, number, int(time.time()), key.sign)
    result = publish(settings, [release_news(signed)])
    shown = {"peer": subject, "released": number, "daemon": result["daemon"]}
    show(settings, shown, f"{subject} is released: it is audited like a new peer.")


COMMANDS = (peer,)
"""For `swarmctl.add_command`."""
