"""What the daemon does for swarmctl: the methods of the control socket.

Each is a coroutine (params, reply) -> result; it may send events meanwhile, raises a SwarmError to fail, and is
cancelled when the caller goes away.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import structlog
import trio

from capabilities.errors import NotReady, SwarmError, UsageError
from scheduler.sampling import SamplingParams
from swarmnode.asker import Asker
from swarmnode.chat_messages import Message, chat
from swarmnode.control import ControlReply
from swarmnode.kept_requests import KeptRequest, KeptRequests, not_keeping
from swarmnode.leader.service import Leader
from swarmnode.models import Models, OnProgress
from swarmnode.prompt_messages import Alive, Ask, Done, Failed, Queued, Token, loggable, new_request_id, new_seed

_log = structlog.get_logger(__name__)

Params = dict[str, Any]


class Services(Protocol):
    """What a daemon lends to its commands. What is asked for may be another one each time: leaders come and go."""

    models: Models
    kept: KeptRequests

    @property
    def asker(self) -> Asker:
        """Where prompts go. Raises SwarmError where there is nobody to ask for good: this node is in no swarm."""

    @property
    def leader(self) -> Leader | None:
        """The leader, if it is this node."""

    async def status(self) -> Mapping[str, Any]: ...

    def counters(self) -> Mapping[str, Any]:
        """Of this node's `network` and `worker`, since it began; None where it has none."""

    async def placement(self, without: str | None) -> Mapping[str, Any]:
        """Who holds what (`swarmctl placement`); `without`: what the loss of that peer would cost, too."""

    async def outline(self) -> Mapping[str, Any]:
        """The model and the workers as `swarmctl predict` needs them: outline.Outline."""

    async def peer(self, name: str) -> Mapping[str, Any]:
        """What is known of a peer (`swarmctl peer`): by its name, its id or a piece of that."""

    async def drain(self, on: bool) -> Mapping[str, Any]:
        """Ask to hold nothing more and to lead no longer, or take that back."""

    async def use_model(self, name: str) -> Mapping[str, Any]:
        """Make one of this node's models the one that the swarm serves."""

    async def fetch_model(self, target: Path, bytes_max: int | None, progress: OnProgress) -> Mapping[str, Any]:
        """Have the model that the swarm serves, whole, in one file (fetch_model.py)."""

    def check_may_add(self) -> None:
        """UsageError unless models are added and removed on this node."""

    def active_model(self) -> str | None:
        """The id of the manifest that the swarm serves, as far as this node has a part in it."""

    def models_changed(self) -> None:
        """A model was added or removed."""


class HttpState(Protocol):
    """The daemon's HTTP interface, as far as `status` tells of it."""

    def in_status(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """The status with what is to be said of it."""


class Handlers:
    """The table of methods for one daemon."""

    def __init__(self, services: Services, http: HttpState) -> None:
        self._services = services
        self._http = http
        self._models = services.models

    def table(self) -> Mapping[str, Callable[[Params, ControlReply], Awaitable[Mapping[str, Any]]]]:
        return {
            "status": self.status,
            "ask": self.ask,
            "requests": self.requests,
            "request": self.request,
            "replay": self.replay,
            "forget": self.forget,
            "placement": self.placement,
            "outline": self.outline,
            "peer": self.peer,
            "drain": self.drain,
            "statistics": self.statistics,
            "model_add": self.model_add,
            "model_list": self.model_list,
            "model_show": self.model_show,
            "model_fetch": self.model_fetch,
            "model_use": self.model_use,
            "model_remove": self.model_remove,
        }

    async def status(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        return self._http.in_status(await self._services.status())

    async def placement(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        return await self._services.placement(_text_or_none(params, "without"))

    async def outline(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        return await self._services.outline()

    async def peer(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        return await self._services.peer(_text(params, "name"))

    async def drain(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        return await self._services.drain(params.get("on") is not False)

    async def statistics(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        """Counters for measurements. `timed` switches the timing of the decode thread's own work on or off."""
        leader = self._services.leader
        if leader is None or leader.active is None:
            raise UsageError("only a leader with a model has statistics")
        if (timed := params.get("timed")) is not None:
            leader.active.time_callbacks(bool(timed))
        return leader.active.statistics()

    # -- prompts ------------------------------------------------------------------------------------------------

    async def ask(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        """Stream an answer as events; the result has it whole."""
        return await self._answer(parse_ask(params), reply, self._services.asker)

    async def _answer(self, ask: Ask, reply: ControlReply, asker: Asker) -> Mapping[str, Any]:
        log = _log.bind(request_id=ask.request_id)
        log.info("request.begin", role="asker")
        started, first = time.monotonic(), None
        text: list[str] = []
        tokens: list[int] = []
        logprobs: list[dict[str, Any]] = []
        done: Done | None = None
        async with asker.replies(ask) as replies:
            async for item in replies:
                match item:
                    case Queued(position):
                        await reply.event("queued", position=position)
                    case Token(index, token, piece):
                        first = time.monotonic() if first is None else first
                        tokens.append(token)
                        if item.logprob is not None:
                            logprobs.append(_logprob(item, item.logprob))
                        text.append(piece)
                        await reply.event("token", index=index, token=token, text=piece)
                    case Done():
                        done = item
                    case Failed(error):
                        log.warning("request.failed", role="asker", error=loggable(error))
                        error.details.setdefault("request_id", ask.request_id)
                        raise error
                    case Alive():
                        pass
        if done is None:
            raise NotReady("the answer ended without an end", request_id=ask.request_id)
        if done.text:
            text.append(done.text)
            await reply.event("token", index=None, token=None, text=done.text)
        total = time.monotonic() - started
        log.info("request.end", role="asker", finish_reason=done.finish_reason, seconds=round(total, 3))
        first_token_s = None if first is None else first - started
        result = _result(done.leader or asker.leader, ask, done, tokens, "".join(text), total, first_token_s)
        return result if ask.logprobs is None else {**result, "logprobs": logprobs}

    # -- requests of the past -----------------------------------------------------------------------------------

    async def requests(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        """Those that are kept, the newest first, without their text."""
        kept = await trio.to_thread.run_sync(self._services.kept.all)
        return {"keep": self._services.kept.keep, "requests": [each.summary() for each in kept]}

    async def request(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        """One of them, whole; without a name the newest."""
        return (await self._kept(params)).to_json()

    async def replay(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        """Ask the swarm the same once more, with the same random numbers; as `ask`, but nothing is kept of it."""
        kept = await self._kept(params)
        ask = replace(kept.ask, request_id=new_request_id())
        if kept.finish_reason == "error":
            ask = replace(ask, max_tokens=len(kept.tokens))
        return await self._answer(ask, reply, not_keeping(self._services.asker))

    async def forget(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        """Remove one request, or all of them."""
        which = _text_or_none(params, "request_id")
        return {"forgotten": await trio.to_thread.run_sync(self._services.kept.forget, which)}

    async def _kept(self, params: Params) -> KeptRequest:
        which = _text_or_none(params, "request_id")
        return await trio.to_thread.run_sync(self._services.kept.get, which)

    # -- models -------------------------------------------------------------------------------------------------

    async def model_add(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        path, name = _text(params, "path"), params.get("name")
        if name is not None and not isinstance(name, str):
            raise UsageError("a model's name is a text")
        self._services.check_may_add()
        result = await _shown(reply, partial(self._models.add, _absolute(path), name))
        self._services.models_changed()
        return result

    async def model_fetch(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        """Have the model that the swarm serves, whole, in a file that does not exist yet."""
        path, bytes_max = _absolute(_text(params, "path")), params.get("bytes_max")
        if bytes_max is not None and (not isinstance(bytes_max, int) or isinstance(bytes_max, bool)):
            raise UsageError("bytes_max is a whole number")
        return await _shown(reply, partial(self._services.fetch_model, path, bytes_max))

    async def model_list(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        found = await trio.to_thread.run_sync(self._models.summaries)
        return {"models": [self._mark(model) for model in found]}

    async def model_show(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        return self._mark(await trio.to_thread.run_sync(self._models.show, _text(params, "name")))

    async def model_remove(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        name = _text(params, "name")
        manifest = await trio.to_thread.run_sync(self._models.manifest, name)
        if manifest.id == self._services.active_model():
            raise UsageError(
                f"{name} is the model that the swarm serves now",
                hint="`swarmctl model use NAME` makes it serve another one; then remove this one.",
            )
        await trio.to_thread.run_sync(self._models.remove, name)
        self._services.models_changed()
        return {"removed": name}

    async def model_use(self, params: Params, reply: ControlReply) -> Mapping[str, Any]:
        return await self._services.use_model(_text(params, "name"))

    def _mark(self, model: dict[str, Any]) -> dict[str, Any]:
        return {**model, "active": model["id"] == self._services.active_model()}


def _absolute(path: str) -> Path:
    if not os.path.isabs(path):
        raise UsageError(f"{path} is no absolute path", hint="The daemon runs elsewhere: name the file in full.")
    return Path(path)


async def _shown(
    reply: ControlReply, work: Callable[[OnProgress], Awaitable[Mapping[str, Any]]]
) -> Mapping[str, Any]:
    """Do some work, and tell how far it is."""
    send, receive = trio.open_memory_channel[tuple[str, int, int]](64)

    def progress(step: str, done: int, total: int) -> None:
        with contextlib.suppress(trio.WouldBlock):  # a slow terminal sees fewer steps
            send.send_nowait((step, done, total))

    async def show() -> None:
        async for step, done, total in receive:
            await reply.event("progress", step=step, done=done, total=total)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(show)
        with send:
            try:
                result: Mapping[str, Any] | SwarmError = await work(progress)
            except SwarmError as error:
                result = error
    if isinstance(result, SwarmError):
        raise result
    return result


def _result(
    leader: str | None,
    ask: Ask,
    done: Done,
    tokens: list[int],
    text: str,
    total_s: float,
    first_token_s: float | None,
) -> dict[str, Any]:
    usage = done.usage
    return {
        "text": text,
        "tokens": tokens,
        "finish_reason": done.finish_reason,
        "leader": leader,
        "request_id": ask.request_id,
        "seed": ask.params.seed,
        "mixed_classes": done.mixed,
        "tainted": done.tainted,
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
        "timings": {
            "queue_s": round(done.timings.queue_s, 6),
            "prefill_s": round(done.timings.prefill_s, 6),
            "decode_s": round(done.timings.decode_s, 6),
            "total_s": round(total_s, 6),
            "first_token_s": None if first_token_s is None else round(first_token_s, 6),
        },
    }


def _logprob(token: Token, logprob: float) -> dict[str, Any]:
    def shown(piece: bytes) -> str:
        return piece.decode(errors="replace")

    top = [{"token": other, "text": shown(piece), "logprob": value} for other, value, piece in token.top]
    return {"token": token.token, "text": shown(token.bytes), "logprob": logprob, "top": top}


def parse_ask(params: Params) -> Ask:
    """A request of swarmctl's: unknown values are refused by name, absent ones get their defaults.

    Raises:
        UsageError: a value of the wrong kind or out of range.
    """
    messages = _messages(params)
    prompt, system = "" if messages else _text(params, "prompt"), params.get("system")
    if system is not None and not isinstance(system, str):
        raise UsageError("system is a text")
    stop = params.get("stop") or []
    if not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
        raise UsageError("stop is a list of texts")
    max_tokens = params.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool)):
        raise UsageError("max_tokens is a whole number")
    raw = bool(params.get("raw"))
    if raw and system is not None:
        raise UsageError("a raw prompt has no system text", hint="Put it into the prompt.")
    if messages and (raw or system is not None):
        raise UsageError("messages stand alone", hint="Put the system text before them, as a message.")
    for key in ("grammar", "json_schema"):
        if not isinstance(params.get(key), str | None):
            raise UsageError(f"{key} is a text")
    logprobs = params.get("logprobs")
    if logprobs is not None and (not isinstance(logprobs, int) or isinstance(logprobs, bool)):
        raise UsageError("logprobs is a whole number")
    seed = params.get("seed")
    names = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
    given = {name: params[name] for name in names if params.get(name) is not None}
    return Ask(
        request_id=new_request_id(),
        params=SamplingParams(**given, seed=new_seed() if seed is None else seed),
        prompt=prompt if raw else None,
        messages=() if raw else messages or chat(prompt, system),
        max_tokens=max_tokens,
        stop=tuple(stop),
        ignore_eos=bool(params.get("ignore_eos")),
        logprobs=logprobs,
        grammar=params.get("grammar"),
        json_schema=params.get("json_schema"),
    )


def _messages(params: Params) -> tuple[Message, ...]:
    """A conversation in place of a prompt; Ask judges each message."""
    messages = params.get("messages")
    if messages is None:
        return ()
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise UsageError("messages is a list of objects", hint="Each has a role and a content.")
    if "prompt" in params:
        raise UsageError("a request has either a prompt or messages", hint="Leave one of them out.")
    return tuple(messages)


def _text(params: Params, key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not value:
        raise UsageError(f"{key} is missing", hint=f"Give a {key}.")
    return value


def _text_or_none(params: Params, key: str) -> str | None:
    """None and absent are the same."""
    return None if params.get(key) is None else _text(params, key)
