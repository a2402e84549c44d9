"""`swarmctl doctor`: everything that may be wrong here, each by its cause and with its mend."""

from __future__ import annotations

import sys
from typing import Any

import click

from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.progress import ProgressLine

TOKEN_CHARS_MAX = 8_192
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}


@click.command()
@click.option(
    "--fix", is_flag=True, help="Mend what is safe to mend: modes that let others in, a dead daemon's socket."
)
@click.option(
    "--invite", "token", metavar="TOKEN", help="Also try the addresses in this invite. '-' reads standard input."
)
@common_options
@pass_settings
def doctor(settings: Settings, fix: bool, token: str | None) -> int:
    """Find out what is wrong with this machine's part in a swarm. Needs no daemon, and asks one that runs.

    The exit status is 1 if anything fails; warnings alone leave it 0.

    \b
    Examples:
      swarmctl doctor
      swarmctl doctor --fix
      swarmctl doctor --invite TOKEN    before joining
      swarmctl doctor --json | jq '.checks[] | select(.state == "fail")'
    """
    from swarmnode import logs
    from swarmnode.doctor.mending import mend
    from swarmnode.doctor.node import look, look_again
    from swarmnode.doctor.report import diagnose
    from swarmnode.paths import find_paths

    logs.configure("warning")
    paths = find_paths(settings.data_dir)
    if token == "-":
        token = sys.stdin.read(TOKEN_CHARS_MAX)
    with ProgressLine() as progress:
        progress("looking", 0, 1)
        facts = look(paths, token)
        mended = mend(facts, paths) if fix else []
        if mended:
            facts = look_again(facts, paths)
    result = {**diagnose(facts), "mended": mended, "data_dir": str(paths.data)}
    if settings.json:
        common.print_json(result)
    else:
        _print(result)
    return 0 if result["healthy"] else common.EXIT_NO


def _print(result: dict[str, Any]) -> None:
    from rich.text import Text

    from swarmnode.cli.render import console, indented, plain

    out = console()
    for sentence in result["mended"]:
        out.print(f"mended: {plain(sentence)}")
    for check in result["checks"]:
        state = check["state"]
        if state == "skip":
            continue
        head = Text(f"{state:5}", style=_STYLES[state])
        out.print(head.append(f" {check['id'].replace('_', ' ')}", style="default"))
        for key in ("cause", "mend"):
            if check[key]:
                out.print(indented(check[key], out.width), soft_wrap=True)
    skipped = [check["id"].replace("_", " ") for check in result["checks"] if check["state"] == "skip"]
    if skipped:
        out.print(Text(f"not looked at: {', '.join(skipped)} (--json says why)", style="dim"))
    failed = sum(check["state"] == "fail" for check in result["checks"])
    out.print(f"{failed} of {len(result['checks'])} checks fail" if failed else "Nothing fails.")
