"""`swarmctl chat`: a conversation. It lives in this process alone; nothing of it is written unless that is asked for.

On a terminal prompt_toolkit edits what is typed; elsewhere each line of standard input is a message, so that scripts
can talk, too. An answer that fails or is stopped never ends the session.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from capabilities.errors import ContextLengthExceeded, SwarmError, UsageError
from swarmnode.cli import common
from swarmnode.cli.asking import sampling_options, show_answer
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.control_client import REQUEST_LINE_BYTES_MAX, Call, request
from swarmnode.printable import printable_line, printable_text

HELP: Final = """\
/help          this
/reset         begin anew; the system text stays
/system TEXT   set the system text; without TEXT take it away
/save FILE     write the conversation to a new file, as JSON
/quit, /exit   end (or Ctrl-D)
Enter sends; Alt-Enter begins a new line; a pasted text may have many. Ctrl-C stops an answer.
A message that begins with a slash: put a space before it."""
COMMANDS: Final = ("/help", "/reset", "/system", "/save", "/quit", "/exit")
_DISCLOSURE: Final = (
    "The leader reads all of this in plain text; workers see activations, from which much can be reconstructed."
)


@dataclass
class Conversation:
    """What was said so far. `system` stands before all of it."""

    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def with_question(self, question: str) -> list[dict[str, str]]:
        """The messages of the next request."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """A turn that gave something."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def save(self, path: Path) -> None:
        """To a new file that only this user may read.

        Raises:
            UsageError: it exists, or cannot be written.
        """
        data = json.dumps({"messages": self.with_question("")[:-1]}, ensure_ascii=False, indent=2) + "\n"
        try:
            descriptor = os.open(path.expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(data)
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}", hint="Name another file.") from error


def run_command(line: str, talk: Conversation) -> str | None:
    """Do what a line with a slash asks for; what to say about it, or None: the session ends.

    Raises:
        UsageError: there is no such command, or it cannot do that.
    """
    name, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if name in ("/quit", "/exit"):
        return None
    if name == "/help":
        return HELP
    if name == "/reset":
        talk.messages.clear()
        return "A new conversation."
    if name == "/system":
        talk.system = rest
        return "The system text is set." if rest else "There is no system text any more."
    if name == "/save":
        if not rest:
            raise UsageError("/save needs a file's name", hint="For example: /save talk.json")
        talk.save(Path(rest))
        return f"Saved in {rest}."
    hint = f"There are {', '.join(COMMANDS)}. A message that begins with a slash: put a space before it."
    raise UsageError(f"{name} is no command", hint=hint)


@click.command()
@sampling_options
@click.option("--system", default="", metavar="TEXT", help="System text for the model's chat template.")
@click.option(
    "--history", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Keep what you type in this file, for the up arrow of later sessions. Default: in memory only."
)  # fmt: skip
@common_options
@pass_settings
def chat(settings: Settings, /, system: str, history: Path | None, **options: Any) -> int:
    """Talk with the swarm. Ctrl-C stops an answer and keeps the session; Ctrl-D ends it; /help shows more.

    The leader reads all text in plain text, and workers see activations, from which much of it can be reconstructed.
    Without a terminal each line of standard input is a message; with --json each answer is an object on a line, as of
    `swarmctl ask --json`, and the exit status is 1 if one failed.

    \b
    Examples:
      swarmctl chat
      swarmctl chat --system "Answer in one sentence." --temperature 0
      printf 'Hello\\nAnd now in French\\n' | swarmctl chat --json
    """
    given = {name: value for name, value in options.items() if value is not None}
    talk = Conversation(system)
    person = sys.stdin.isatty() and sys.stdout.isatty() and not settings.json
    where = request(settings.socket, "status", {})
    if person:
        _greet(where)
    failed = False
    for line in _typed(history) if person else _lines():
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                if (said := run_command(line, talk)) is None:
                    break
                if not settings.json:
                    click.echo(said, err=not person)
            else:
                _turn(settings, talk, line, given)
        except SwarmError as error:
            failed = True
            _show_error(settings, error)
    return common.EXIT_NO if failed and not person else 0


def _turn(settings: Settings, talk: Conversation, question: str, options: dict[str, Any]) -> None:
    """Ask, show the answer, remember both. Of an answer that was stopped what came of it is remembered."""
    heard: list[str] = []
    try:
        with Call(settings.socket, "ask", {"messages": talk.with_question(question), **options}) as call:
            if settings.json:
                for _ in call:
                    pass
                heard.append(str(call.result.get("text", "")))
                common.print_json(call.result)
                sys.stdout.flush()
            else:
                show_answer(call, heard.append)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        click.echo("(stopped)", err=True)
    except ContextLengthExceeded as error:
        error.hint = "The conversation is too long for the context: /reset begins anew."
        raise
    if text := "".join(heard):
        talk.add(question, text)


def _show_error(settings: Settings, error: SwarmError) -> None:
    if settings.json:
        common.print_json({"error": error.to_json()})
        return
    click.echo(f"Error: {printable_text(error.message)}", err=True)
    if error.hint:
        click.echo(printable_text(error.hint), err=True)


def _greet(status: dict[str, Any]) -> None:
    model, swarm = status.get("model") or {}, status.get("swarm") or {}
    name = printable_line(str(model.get("name") or "no model yet"))
    click.echo(f"{name} of the swarm {printable_line(str(swarm.get('name') or '-'))}. /help shows commands.", err=True)
    if status.get("ready") is not True:
        click.echo(f"It is not ready: {printable_line(str(status.get('reason')))}", err=True)
    click.echo(_DISCLOSURE, err=True)


def _lines() -> Iterator[str]:
    """The lines of standard input."""
    while line := sys.stdin.buffer.readline(REQUEST_LINE_BYTES_MAX + 1):
        if len(line) > REQUEST_LINE_BYTES_MAX:
            hint = "No context holds that much."
            raise UsageError(f"a line has more than {REQUEST_LINE_BYTES_MAX} bytes", hint=hint)
        try:
            yield line.decode().rstrip("\n")
        except UnicodeDecodeError as error:
            hint = "Convert standard input first, for example with iconv."
            raise UsageError(f"a line is not UTF-8: {error.reason} at byte {error.start}", hint=hint) from error


def _typed(history: Path | None) -> Iterator[str]:
    """What a person types, message by message, until Ctrl-D."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    kept = InMemoryHistory() if history is None else FileHistory(str(private_file(history)))
    session: PromptSession[str] = PromptSession(
        history=kept, key_bindings=keys, multiline=True, completer=WordCompleter(COMMANDS, sentence=True),
        complete_while_typing=False, prompt_continuation="  ",
    )  # fmt: skip
    while True:
        try:
            yield session.prompt("> ")
        except KeyboardInterrupt:
            click.echo("(Ctrl-D ends)", err=True)
        except EOFError:
            return


def private_file(path: Path) -> Path:
    """The file, made if it is not there, for this user alone: what is typed is private.

    Raises:
        UsageError: it cannot be opened.
    """
    path = path.expanduser()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.fchmod(descriptor, 0o600)
        os.close(descriptor)
    except OSError as error:
        raise UsageError(f"{path} cannot be kept as history: {error.strerror}", hint="Name another file.") from error
    return path
