"""The requests that this node asked last, so that their answers can be verified: on this machine alone, one file each.

Prompts are private. The folder and its files are readable by this user only, there are `keep` of them at most, the
oldest go first, and `swarmctl forget` removes them. Leaders and workers keep nothing.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog
import trio

from capabilities.errors import PeerMistake, SwarmError, UsageError
from swarmnode import limits
from swarmnode.asker import Asker
from swarmnode.durable import write_whole
from swarmnode.prompt_frames import decode_ask, encode_ask
from swarmnode.prompt_messages import Ask, Done, Failed, Reply, Token
from swarmnode.wire import split_frame

_log = structlog.get_logger(__name__)

_SUFFIX: Final = ".json"
_FILE_BYTES_MAX: Final = 4 * limits.REQUEST_TEXT_BYTES_MAX + 16 * limits.MAX_TOKENS_MAX
"""Base64 takes a third more, and a token in JSON at most twelve characters."""
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")  # those that this node draws; nothing else becomes a file's name
_HINT: Final = "`swarmctl requests` lists those that are kept; `[requests] keep` says how many."


@dataclass(frozen=True, slots=True)
class KeptRequest:
    """A request and the answer that came.

    asked_at       seconds since 1970 (UTC), when the answer ended
    model          the manifest's id of the model that answered, where this node knew it
    finish_reason  as in Done, or "error": the answer broke off after these tokens
    """

    ask: Ask
    asked_at: float
    tokens: tuple[int, ...] = field(repr=False)
    finish_reason: str
    leader: str
    model: str | None
    prompt_tokens: int | None = None
    mixed: bool = False
    tainted: bool = False

    def to_json(self) -> dict[str, Any]:
        """Everything; the request as the frame that asks it, in base64."""
        return {
            **self.summary(),
            "tokens": list(self.tokens),
            "ask": base64.b64encode(encode_ask(self.ask)).decode(),
        }

    def summary(self) -> dict[str, Any]:
        """Without text and tokens."""
        return {
            "request_id": self.ask.request_id,
            "asked_at": round(self.asked_at, 3),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.tokens),
            "finish_reason": self.finish_reason,
            "leader": self.leader or None,
            "model": self.model,
            "mixed_classes": self.mixed,
            "tainted": self.tainted,
            "token_hash": token_hash(self.tokens),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> KeptRequest:
        """Raises KeyError, TypeError, ValueError or a SwarmError where it is none."""
        return cls(
            ask=decode_ask(split_frame(base64.b64decode(value["ask"], validate=True), limits.PROMPT_REQUEST)[0]),
            asked_at=float(value["asked_at"]),
            tokens=tuple(int(token) for token in value["tokens"]),
            finish_reason=str(value["finish_reason"]),
            leader=str(value["leader"] or ""),
            model=value["model"],
            prompt_tokens=None if value["prompt_tokens"] is None else int(value["prompt_tokens"]),
            mixed=bool(value["mixed_classes"]),
            tainted=bool(value.get("tainted", False)),
        )


def token_hash(tokens: Sequence[int]) -> str:
    """SHA-256, in hex, of the token ids as uint32, little-endian, one after the other."""
    return hashlib.sha256(np.array(tokens, "<u4").tobytes()).hexdigest()


class KeptRequests:
    """The folder. Methods block for some milliseconds.

    keep  how many; 0: none, and what was kept before goes with the next request
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self.keep = keep

    def add(self, kept: KeptRequest) -> None:
        """OSError where the disk does not take it."""
        if self.keep and _ID.fullmatch(kept.ask.request_id):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            ask = replace(kept.ask, generated=(), attempt=0)
            data = json.dumps(replace(kept, ask=ask).to_json())
            write_whole(self._folder / f"{ask.request_id}{_SUFFIX}", data.encode())
        for path in self._files()[self.keep :]:
            path.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """The newest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._folder):
                if entry.name.endswith(_SUFFIX) and _ID.fullmatch(entry.name.removesuffix(_SUFFIX)):
                    with contextlib.suppress(FileNotFoundError):  # forgotten meanwhile
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
        return [self._folder / name for _, name in sorted(found, reverse=True)]

    def all(self) -> list[KeptRequest]:
        """The newest first; files that cannot be read are left out."""
        found = []
        for path in self._files():
            with contextlib.suppress(UsageError):
                found.append(self._read(path))
        return found

    def get(self, request_id: str | None) -> KeptRequest:
        """A request by its id, or the end of it; None: the newest.

        Raises:
            UsageError: there is none, or several, or its file is damaged.
        """
        files = self._files()
        if request_id is not None:
            files = [path for path in files if path.stem == request_id] or [
                path for path in files if path.stem.endswith(request_id)
            ]
            if len(files) > 1:
                raise UsageError(f"several requests are called {request_id!r:.80}", hint=_HINT)
        if not files:
            which = "no request is kept" if request_id is None else f"no request {request_id!r:.80} is kept"
            raise UsageError(f"{which} on this node", hint=_HINT)
        return self._read(files[0])

    def _read(self, path: Path) -> KeptRequest:
        try:
            with path.open("rb") as file:
                data = file.read(_FILE_BYTES_MAX + 1)
            return KeptRequest.from_json(json.loads(data))
        except FileNotFoundError:
            raise UsageError(f"the request {path.stem} was forgotten just now", hint=_HINT) from None
        except (OSError, KeyError, TypeError, ValueError, RecursionError, PeerMistake, UsageError) as error:
            hint = f"`swarmctl forget {path.stem}` removes it."
            raise UsageError(f"{path} is damaged: {error!s:.100}", hint=hint) from None

    def forget(self, request_id: str | None) -> int:
        """Remove one, or all; how many those were. UsageError where there is none of that name."""
        files = self._files()
        if request_id is not None:
            files = [path for path in files if path.stem == request_id]
            if not files:
                raise UsageError(f"no request {request_id!r:.80} is kept on this node", hint=_HINT)
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)


class KeepingAsker:
    """An asker that keeps what came of each request.

    model  the manifest's id of the model that the swarm serves, where this node knows it
    """

    def __init__(self, asker: Asker, kept: KeptRequests, model: Callable[[], str | None]) -> None:
        self.kept = kept
        self._asker = asker
        self._model = model

    @property
    def leader(self) -> str | None:
        return self._asker.leader

    @asynccontextmanager
    async def replies(self, ask: Ask) -> AsyncIterator[AsyncIterator[Reply]]:
        async with self._asker.replies(ask) as replies:
            yield self._watched(ask, replies)

    async def _watched(self, ask: Ask, replies: AsyncIterator[Reply]) -> AsyncIterator[Reply]:
        tokens: list[int] = []
        async for reply in replies:
            match reply:
                case Token(token=token):
                    tokens.append(token)
                case Done():
                    await self._keep(ask, tokens, reply)
                case Failed() if tokens:
                    await self._keep(ask, tokens, None)
                case _:
                    pass
            yield reply

    async def _keep(self, ask: Ask, tokens: list[int], done: Done | None) -> None:
        kept = KeptRequest(
            ask=ask,
            asked_at=time.time(),
            tokens=tuple(tokens),
            finish_reason="error" if done is None else done.finish_reason,
            leader=(done.leader if done else "") or self._asker.leader or "",
            model=self._model(),
            prompt_tokens=None if done is None else done.usage.prompt_tokens,
            mixed=done is not None and done.mixed,
            tainted=done is not None and done.tainted,
        )
        try:
            await trio.to_thread.run_sync(self.kept.add, kept)
        except (OSError, SwarmError) as error:  # the answer counts for more
            _log.warning("request.not_kept", request_id=ask.request_id, reason=str(error))


def not_keeping(asker: Asker) -> Asker:
    """For what nobody asked anew: a proof's second answer must not push out those that people asked for."""
    return asker._asker if isinstance(asker, KeepingAsker) else asker
