"""`swarmctl service`: the daemon as something that starts by itself."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, common_options, pass_settings


@click.group()
@common_options
def service() -> None:
    """Run the daemon whenever this machine runs, as a service of yours (systemd or launchd)."""


@service.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="Configuration (TOML).")
@common_options
@pass_settings
def install(settings: Settings, config_file: Path | None) -> int:
    """Install and start the service: it starts with the machine, starts again after a fault, and gives way to you.

    Run it again after the program moved or the options changed. Its log: `swarmctl logs`.
    """
    from swarmnode.config import load_config
    from swarmnode.paths import DATA_DIR_VARIABLE, find_paths, shared_cache_folder
    from swarmnode.service.managers import manager_of_this_system
    from swarmnode.service.units import Daemon

    if os.geteuid() == 0 and "SUDO_USER" in os.environ:
        raise UsageError("under sudo the service would be root's", hint="Run the command as yourself, without sudo.")
    paths = find_paths(settings.data_dir)
    load_config(config_file if config_file or not paths.config_file.exists() else paths.config_file)
    program = [sys.executable, "-P", "-m", "swarmnode", "run"]  # -P: nothing in the home folder shadows a module
    if settings.data_dir is not None or DATA_DIR_VARIABLE in os.environ:
        program += ["--data-dir", str(paths.data)]
    if config_file is not None:
        program += ["--config", str(config_file.absolute())]
    paths.make()
    # The temporary folder has what all daemons of this machine share: the stock of threads.
    writable = sorted({paths.data, paths.cache, shared_cache_folder(), Path(tempfile.gettempdir())})
    daemon = Daemon(program, writable, paths.logs)
    status = manager_of_this_system().install(daemon)
    common.print_result(settings, status)
    return 0 if status["active"] else common.EXIT_NO


@service.command()
@common_options
@pass_settings
def status(settings: Settings) -> int:
    """Say whether the service is installed, runs, and survives a logout. Exit status 1 if it does not run."""
    from swarmnode.service.managers import manager_of_this_system

    found = manager_of_this_system().status()
    common.print_result(settings, found)
    return 0 if found["active"] else common.EXIT_NO


@service.command()
@common_options
@pass_settings
def remove(settings: Settings) -> None:
    """Stop the service and remove it. Its data stays: key, membership, models, cache."""
    from swarmnode.service.managers import manager_of_this_system

    common.print_result(settings, manager_of_this_system().remove())
