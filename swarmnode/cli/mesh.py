"""`swarmctl placement`, `drain`, `undrain`: who holds what, and this peer's part in it."""

from __future__ import annotations

import click

from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.control_client import request


@click.command()
@click.option("--without", metavar="PEER", help="Also tell what the loss of this peer would cost (name or peer id).")
@common_options
@pass_settings
def placement(settings: Settings, without: str | None) -> None:
    """Show which peer holds which experts, what has one copy only, and why a peer got no output rank.

    \b
    Examples:
      swarmctl placement
      swarmctl placement --without attic
    """
    answer = request(settings.socket, "placement", {"without": without} if without else {})
    if settings.json:
        common.print_json(answer)
    else:
        from swarmnode.cli.render import print_placement

        print_placement(answer)


@click.command()
@common_options
@pass_settings
def drain(settings: Settings) -> None:
    """Let this peer's experts go to others, and let another peer lead. It goes on serving until they have them.

    It lasts until `swarmctl undrain` or the daemon's end.

    \b
    Examples:
      swarmctl drain && swarmctl status --watch
    """
    common.print_result(settings, request(settings.socket, "drain", {"on": True}))


@click.command()
@common_options
@pass_settings
def undrain(settings: Settings) -> None:
    """Take part again after `swarmctl drain`."""
    common.print_result(settings, request(settings.socket, "drain", {"on": False}))


COMMANDS = (placement, drain, undrain)
"""For `swarmctl.add_command`."""
