"""`swarmctl audit`: the swarm's audits of live work, by peer; `audit experiment`: cheats and honest peers tried."""

from __future__ import annotations

import os
from pathlib import Path

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.progress import ProgressLine
from swarmnode.control_client import request

FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(invoke_without_command=True)
@common_options
@click.pass_context
def audit(context: click.Context) -> None:
    """Show what audits of live work have found of each peer (`swarmctl audit show`), or try how well they do."""
    if context.invoked_subcommand is None:
        context.invoke(show)


@audit.command()
@common_options
@pass_settings
def show(settings: Settings) -> None:
    """Show what audits of live work have found of each peer. `swarmctl audit` does the same."""
    found = audits_of(request(settings.socket, "status", {}))
    if settings.json:
        common.print_json(found)
    else:
        from swarmnode.cli.render_audit import print_audits

        print_audits(found)


def audits_of(status: dict[str, object]) -> dict[str, object]:
    """What `swarmctl audit --json` prints, of a status."""
    keys = ("peer_id", "name", "fitness", "audits", "verdict")
    rows = status["peers"] if isinstance(status["peers"], list) else []
    return {"leader": status["leader"], "peers": [{key: row.get(key) for key in keys} for row in rows]}


@audit.command()
@click.option(
    "--cheat", "cheats", multiple=True, metavar="NAME",
    help="A cheat, or a class of your own as module:Class; its attribute `every` says of how many dispatches one is"
    " wrong (if it has none, all are, and it must be found in time). Default: all."
)  # fmt: skip
@click.option(
    "--honest", multiple=True, metavar="TARGET",
    help="An honest peer's kernels, as for `swarmctl equivalence`, or module:Class. Default: all that are here."
)  # fmt: skip
@click.option("--no-honest", is_flag=True, help="Cheats alone.")
@click.option("--no-cheats", is_flag=True, help="Honest peers alone.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=1, show_default=True)
@click.option(
    "--trials", type=click.IntRange(1), default=300, show_default=True, help="Of each cheat, new and long trusted."
)
@click.option(
    "--dispatches", type=click.IntRange(1), default=5_000, show_default=True, help="Until a cheat counts as missed."
)
@click.option(
    "--audits", type=click.IntRange(1), default=20_000, show_default=True, help="At most, of each honest peer."
)
@click.option("--minutes", type=click.FloatRange(0.01), default=60.0, show_default=True, help="Likewise.")
@click.option(
    "--together", type=click.FloatRange(0.01), metavar="MINUTES",
    help="Of all honest peers together, who take turns; then --audits and --minutes do not count."
)  # fmt: skip
@click.option("--model", default="demo", show_default=True, metavar="FILE", help="A GGUF file, or `demo`.")
@click.option("--resume", type=FILE, metavar="FILE", help="Keep results here, and go on from them.")
@click.option("--daemons", is_flag=True, help="Real daemons instead, one of which cheats; one --cheat.")
@common_options
@pass_settings
def experiment(
    settings: Settings,
    cheats: tuple[str, ...],
    honest: tuple[str, ...],
    no_honest: bool,
    no_cheats: bool,
    seed: int,
    trials: int,
    dispatches: int,
    audits: int,
    minutes: float,
    together: float | None,
    model: str,
    resume: Path | None,
    daemons: bool,
) -> int:
    """Try whether cheats are found out and honest peers are not. Needs no daemon.

    Each cheat is a peer that computes with a model's real weights over real activations, and answers wrong in every
    dispatch or in one of many; the leader's own tap, judge and sequential tests look at it, until it is out. Honest
    peers compute with every kernel of this machine, and all of their answers are audited.

    The exit status is 1 if a cheat was missed or late beyond chance, or an honest peer was convicted.
    """
    if daemons and (len(cheats) > 1 or honest or resume):
        raise UsageError("--daemons takes one --cheat, and no --honest or --resume")
    if no_cheats and no_honest:
        raise UsageError("nothing is left to try", hint="Leave --no-cheats or --no-honest out.")
    if (no_cheats and cheats) or (no_honest and honest):
        raise UsageError("some are named that are not to be tried", hint="Leave --no-cheats or --no-honest out.")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded: as one of many processes
    from swarmnode.bench import find_model
    from swarmnode.experiment.daemons import run_daemons
    from swarmnode.experiment.run import Effort, run_experiment

    with ProgressLine() as progress, common.without_daemon():
        file = find_model(model, progress)
        if daemons:
            result = run_daemons(file, cheats[0] if cheats else "wrong-expert", minutes=minutes, progress=progress)
        else:
            result = run_experiment(
                file, None if no_cheats else cheats, None if no_honest else honest, seed=seed,
                effort=Effort(trials, dispatches, audits, minutes, together), resume=resume, progress=progress,
            )  # fmt: skip
    if settings.json:
        common.print_json(result)
    else:
        from swarmnode.cli.render_audit import print_daemons, print_experiment

        (print_daemons if daemons else print_experiment)(result)
    return 0 if result["pass"] else common.EXIT_NO

