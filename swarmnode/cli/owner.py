"""`swarmctl owner ...`: the key that decides over a swarm, its copies and its passphrase."""

from __future__ import annotations

from pathlib import Path

import click

from capabilities.errors import UsageError
from swarmnode.cli.belonging import open_store, publish, show
from swarmnode.cli.common import Settings, common_options, pass_settings
from swarmnode.cli.passphrase import NEW_PASSPHRASE_VARIABLE, new_passphrase, passphrase, passphrase_option

FILE = click.Path(dir_okay=False, path_type=Path)


@click.group()
@common_options
def owner() -> None:
    """Keep, move and renew the key of the swarm's owner."""


@owner.command("export")
@click.argument("file", type=FILE)
@common_options
@pass_settings
def export_(settings: Settings, file: Path) -> None:
    """Write a copy of the key to FILE, which must not exist. It stays under its passphrase.

    \b
    Examples:
      swarmctl owner export owner.key
    """
    from swarmnode.swarm.owner_key import export_key

    store = open_store(settings)
    record = store.need()
    key = store.files.owner_key(record.swarm).read(record.chain.current)
    export_key(key, file)
    show(settings, {"exported": str(file), "swarm": record.swarm}, f"The owner's key of {record.name} is in {file}.")


@owner.command("import")
@click.argument("file", type=FILE)
@passphrase_option
@common_options
@pass_settings
def import_(settings: Settings, file: Path, passphrase_file: Path | None) -> None:
    """Make this machine able to act for the owner, with a copy of the key. This peer must be in the swarm.

    \b
    Examples:
      swarmctl owner import owner.key
    """
    from swarmnode.swarm.errors import BadOwnerKey
    from swarmnode.swarm.owner_key import read_key_file

    store = open_store(settings)
    record = store.need()
    key = read_key_file(file)
    if key.swarm != record.swarm:
        raise BadOwnerKey(f"{file} holds the key of another swarm", hint="Join that swarm first.", path=str(file))
    if key.public != record.chain.current:
        known = key.public in record.chain.keys
        reason = "the key was rotated since" if known else "this peer has not heard yet that it is the owner's"
        raise BadOwnerKey(f"{file} does not hold the owner's key that counts: {reason}", path=str(file))
    key.unlock(passphrase(passphrase_file))
    place = store.files.owner_key(record.swarm)
    place.save(key)
    show(settings, {"imported": str(place.path), "swarm": record.swarm}, f"The owner's key is in {place.path}.")


@owner.command()
@passphrase_option
@common_options
@pass_settings
def rotate(settings: Settings, passphrase_file: Path | None) -> None:
    """Replace the key by a new one under the same passphrase; the old one signs nothing any more.

    Members accept the new key by the old one's word. Copies that were exported before are worth nothing afterwards:
    export again.
    """
    from swarmnode.swarm.owner_key import OwnerKey
    from swarmnode.swarm.record import ban_news, release_news, rotation_news
    from swarmnode.swarm.vote_file import load_vote_file

    store = open_store(settings)
    record = store.need()
    place = store.files.owner_key(record.swarm)
    sealed = place.read(record.chain.current)
    words = passphrase(passphrase_file)
    old, new = sealed.unlock(words), OwnerKey.generate()
    votes = load_vote_file(store.files.votes)
    pending = None if votes is None or votes.swarm != record.swarm else votes.pending
    sets = (record.enactment.previous, record.enactment.current, pending)
    try:
        rotation = record.chain.rotate(new.public, [each.digest for each in sets if each is not None], old.sign)
    except ValueError:
        message = f"the key was rotated {len(record.chain.rotations)} times, which is the most"
        raise UsageError(message, hint="Make a new swarm.") from None
    place.save_next(new.seal(record.swarm, words))  # beside the old one, until the swarm has heard of it
    bans, releases = record.bans.signed_anew(new.sign), record.releases.signed_anew(new.sign)
    publish(settings, [rotation_news(rotation), *map(ban_news, bans), *map(release_news, releases)])
    place.read(new.public)
    text = f"The owner's key number {rotation.number} counts from now on. Export it again; older copies are void."
    show(settings, {"rotation": rotation.number, "owner_key": str(place.path), "swarm": record.swarm}, text)


@owner.command("passphrase")
@passphrase_option
@click.option(
    "--new-passphrase-file",
    type=FILE,
    help=f"Read the new passphrase from this file's first line. Default: ${NEW_PASSPHRASE_VARIABLE}, else ask.",
)
@common_options
@pass_settings
def change_passphrase(settings: Settings, passphrase_file: Path | None, new_passphrase_file: Path | None) -> None:
    """Change the passphrase of the key on this machine. Copies elsewhere keep theirs."""
    store = open_store(settings)
    record = store.need()
    place = store.files.owner_key(record.swarm)
    key = place.read(record.chain.current).unlock(passphrase(passphrase_file))
    place.save(key.seal(record.swarm, new_passphrase(new_passphrase_file, NEW_PASSPHRASE_VARIABLE)))
    show(settings, {"changed": str(place.path), "swarm": record.swarm}, "The passphrase is changed.")
