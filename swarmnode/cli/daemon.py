"""`swarmnode`: runs the daemon. What one does with it afterwards is `swarmctl`'s."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path

import click

from capabilities.errors import UsageError
from swarmnode.cli import common
from swarmnode.cli.common import Settings, data_dir_option, json_option, pass_settings


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=common.show_version)
def swarmnode() -> None:
    """A peer of a swarm that together runs one mixture-of-experts language model."""


@swarmnode.command()
@click.option("--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="Configuration (TOML).")
@data_dir_option
@pass_settings
def run(settings: Settings, config_file: Path | None) -> None:
    """Run the daemon until it is stopped (Ctrl-C, SIGTERM).

    Without --config the file config.toml is read where the daemon keeps its things, if it is there.
    """
    from swarmnode import logs
    from swarmnode.config import load_config
    from swarmnode.daemon import run as run_daemon
    from swarmnode.log_file import BoundedLogFile
    from swarmnode.paths import find_paths

    paths = find_paths(settings.data_dir)
    if config_file is None and paths.config_file.exists():
        config_file = paths.config_file
    config = load_config(config_file)
    file = BoundedLogFile(paths.logs, config.log.file_mib << 20) if config.log.file_mib else None
    logs.configure(config.log.level, config.log.format, file=file)
    run_daemon(config, paths)


@swarmnode.command()
@click.option("--default", "default", is_flag=True, help="Every key with its default and its meaning.")
def config(default: bool) -> None:
    """Print a configuration to start from: `swarmnode config --default > config.toml`."""
    from swarmnode.config import default_text

    if not default:
        hint = "`swarmnode config --default` prints the commented default."
        raise UsageError("say which configuration to print", hint=hint)
    click.echo(default_text(), nl=False)


@swarmnode.command("version")
@json_option
@pass_settings
def show_version(settings: Settings) -> None:
    """Print the versions of this program and of what its numbers depend on."""
    versions = {name: version(name) for name in ("swarmnode", "llama-cpp-python", "libp2p")}
    versions["python"] = platform.python_version()
    if settings.json:
        common.print_json(versions)
    else:
        click.echo("\n".join(f"{name} {number}" for name, number in versions.items()))


def main() -> None:
    sys.exit(common.main(swarmnode, "swarmnode"))
