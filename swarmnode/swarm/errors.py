"""What can go wrong with belonging to a swarm, each named for what happened."""

from __future__ import annotations

from capabilities.errors import SwarmError


class NotInSwarm(SwarmError):
    """This node belongs to no swarm, and the command is about one."""

    type = "not_in_swarm"
    default_hint = "`swarmctl init` makes a swarm; `swarmctl join TOKEN` enters one with an invite."


class NotAdmitted(SwarmError):
    """The swarm did not take this peer in. Details: `cause`, which is `unreachable`, `expired`, `revoked`, `used_up`,
    `unknown`, `banned`, `busy`, `not_backbone`, `version` or `refused`."""

    type = "not_admitted"
    default_hint = "Ask for a new invite."


class BadOwnerKey(SwarmError):
    """The owner's key is not here, is damaged, is of another swarm, or the passphrase is wrong."""

    type = "bad_owner_key"
    default_hint = "Run it where the owner's key is, or `swarmctl owner import FILE` here first."
