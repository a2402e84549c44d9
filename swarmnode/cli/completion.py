"""`swarmctl completion`: the script that lets a shell finish commands and options. Click writes it."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.option("--program", type=click.Choice(("swarmctl", "swarmnode")), default="swarmctl", show_default=True)
@click.pass_context
def completion(context: click.Context, shell: str, program: str) -> None:
    """Print what makes Tab finish commands and options in SHELL.

    \b
    Examples:
      swarmctl completion bash >> ~/.bashrc
      swarmctl completion zsh >> ~/.zshrc
      swarmctl completion fish > ~/.config/fish/completions/swarmctl.fish
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    click.echo(kind(root, {}, program, f"_{program.upper()}_COMPLETE").source())
