"""Every error that crosses a boundary: the wire, the control socket, the command line.

An error has a stable wire name (`type`), one message that names the cause, a hint that says what to do next, and
details (`layer`, `experts`, `peer`) where they apply. The two families are kept apart: `PeerMistake` is a fault of
somebody else's bytes and never takes the daemon down; all others are about this node or the request itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

Json = Any
_TEXT_LIMIT = 2_000
_DETAIL_KEYS = frozenset(
    {"layer", "experts", "peer", "cause", "request_id", "retry_after_s", "path", "term", "parameter", "model_bytes"}
)
_LIST_LIMIT = 4_096


_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_KINDS: dict[str, type[SwarmError]] = {}


class SwarmError(Exception):
    """Base of all typed errors. `type` is the name on the wire; `hint` says what to do next."""

    type: str = "internal"
    default_hint: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """The first class of a type stands for it: a subclass without a wire name of its own arrives as its parent."""
        _KINDS.setdefault(cls.type, cls)

    def __init__(self, message: str, *, hint: str | None = None, **details: Json) -> None:
        super().__init__(message)
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.details: dict[str, Json] = {k: v for k, v in details.items() if v is not None}

    def to_json(self) -> dict[str, Json]:
        """`{"type", "message", "hint", ...details}`, ready for JSON or msgpack."""
        return {"type": self.type, "message": self.message, "hint": self.hint, **self.details}

    @staticmethod
    def from_json(value: Mapping[str, Json]) -> SwarmError:
        """Rebuild an error that a peer or daemon sent; texts and details are cut.

        A type that is not known here (of a newer version, or of a part that is not loaded) keeps its name.
        """
        name = str(value.get("type"))
        kind = _KINDS.get(name, SwarmError)
        message = str(value.get("message", "no message"))[:_TEXT_LIMIT]
        hint = str(value.get("hint", ""))[:_TEXT_LIMIT]
        details = {k: _bounded(v) for k, v in value.items() if k in _DETAIL_KEYS}
        error = kind(message, hint=hint, **details)
        if _NAME.fullmatch(name):
            error.type = name
        return error


def _bounded(value: Json) -> Json:
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    if isinstance(value, list):
        return [_bounded(item) for item in value[:_LIST_LIMIT]]
    return str(value)[:_TEXT_LIMIT]


class Internal(SwarmError):
    """A fault of this program. The log of the node that raised it has the traceback."""

    type = "internal"
    default_hint = "This is a bug: the daemon's log has the details."


class PeerMistake(SwarmError):
    """A peer broke the protocol: wrong shape, id out of range, oversized frame, malformed header."""

    type = "peer_mistake"
    default_hint = "The other side sent something that the protocol forbids; compare versions in `swarmctl status`."


class BadModelFile(SwarmError):
    """A model file is broken, missing, or not what it was when it was added. Detail: path."""

    type = "bad_model_file"
    default_hint = "Download the file again and compare its size or checksum with the publisher's."


class UnsupportedModel(SwarmError):
    """A sound model that cannot be split: the message names what stands in the way."""

    type = "unsupported_model"
    default_hint = "Run `swarmctl model check FILE` for the details; another architecture or quantisation may work."


class LibraryMismatch(SwarmError):
    """The installed ggml is not one whose memory layout is known."""

    type = "library_mismatch"
    default_hint = "Install the llama-cpp-python version that pyproject.toml names (`make setup`)."


class UsageError(SwarmError):
    """What was asked cannot be meant: a value out of its range, a name that is taken, a missing file.

    Detail: parameter, the field of a request that is wrong.
    """

    type = "usage"
    default_hint = "`swarmctl --help` lists the commands, and a command's own --help shows what it takes."


@contextmanager
def about(parameter: str) -> Iterator[None]:
    """What is found wrong in here is this field of a request, unless the error names another one itself."""
    try:
        yield
    except UsageError as error:
        error.details.setdefault("parameter", parameter)
        raise


class NoDaemon(SwarmError):
    """No daemon listens on the control socket, or it went away."""

    type = "no_daemon"
    default_hint = "Start one with `swarmnode run`, or name its folder with --data-dir."


class NotReady(SwarmError):
    """Some expert has no holder that is proven and answers; the message says what is waited for."""

    type = "not_ready"
    default_hint = "Watch `swarmctl status`; ask again when it says ready."


class NoLeader(SwarmError):
    """The leader cannot be reached, or was lost in the middle of an answer. Detail: peer."""

    type = "no_leader"
    default_hint = "`swarmctl status` says who leads or why nobody does, and which peers are away: start those again."


class ModelNotFound(SwarmError):
    """There is no such model here, or nobody serves its manifest."""

    type = "model_not_found"
    default_hint = "`swarmctl model list` shows the models that this node knows."


class ContextLengthExceeded(SwarmError):
    """The prompt is longer than the context. The wire name is the one that API clients look for."""

    type = "context_length_exceeded"
    default_hint = "Shorten the prompt, or raise leader.context_tokens in the leader's configuration."


class ExpertsUnavailable(SwarmError):
    """No usable answer for some experts of a layer. Details: layer, experts, peer, cause."""

    type = "experts_unavailable"
    default_hint = "Ask again once `swarmctl status` is ready; the named peer is down, slow or wrong."


class RequestCancelled(SwarmError):
    """Whoever asked went away, or the daemon is stopping."""

    type = "cancelled"
    default_hint = "Ask again; `swarmctl status` says whether the swarm is ready."


class DeadlineExceeded(SwarmError):
    """The request's own deadline passed, or a daemon says nothing any more."""

    type = "deadline_exceeded"
    default_hint = "The swarm is slow or overloaded; try again or raise the request's deadline."


class Overloaded(SwarmError):
    """A queue or a table is full; nothing was begun."""

    type = "overloaded"
    default_hint = "Try again in a moment."


class KernelFailed(SwarmError):
    """Kernels of another build could not be built, or the process that runs them ended, hung or spoke nonsense."""

    type = "kernel_failed"
    default_hint = "`swarmctl kernels list` shows which ones there are; build them anew, or choose others."
