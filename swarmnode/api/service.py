"""The HTTP interface of one daemon, whatever swarm it is in: it listens for as long as the daemon runs.

A port that is taken must not end a daemon that nobody watches. It is told in the log, in `status` and as a finding, and
tried again, so that it mends itself once the other program is gone.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import structlog
import trio

from scheduler.advert_findings import Finding, FindingKind
from swarmnode.api import limits
from swarmnode.api.token import Token
from swarmnode.config_sections import ApiConfig
from swarmnode.handlers import Services
from swarmnode.paths import Paths

if TYPE_CHECKING:
    from trio_typing import TaskStatus

    from swarmnode.api.connection import Connections

_log = structlog.get_logger(__name__)


class Http:
    """Run `run` in a nursery."""

    def __init__(self, config: ApiConfig, services: Services, paths: Paths) -> None:
        self._address = config.address
        self._listen = config.listen
        self._services = services
        self._folder = paths.data
        self._token = Token(paths.run / "http.token")
        self._bound: str | None = None
        self._error: str | None = None
        self._connections = None if self._address is None else self._open(config)

    def _open(self, config: ApiConfig) -> Connections:
        from swarmnode.api.app import make_app  # a third of a second, which a daemon without HTTP need not spend
        from swarmnode.api.connection import Connections

        async def status() -> Mapping[str, Any]:
            return self.in_status(await self._services.status())

        return Connections(make_app(config, self._services, status, self._token, self._folder))

    async def run(self, *, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started()` once clients can connect, or it is known why they cannot."""
        if self._connections is None:
            task_status.started()
            return
        try:
            await trio.to_thread.run_sync(self._token.write)
        except OSError as error:  # everything but what needs the token goes on
            _log.warning("api.token_not_written", reason=error.strerror)
        listeners = await self._try_to_listen()
        task_status.started()
        while listeners is None:
            await trio.sleep(limits.LISTEN_RETRY_SECONDS)
            listeners = await self._try_to_listen()
        try:
            await self._connections.run(listeners)
        finally:
            self._bound = None

    async def _try_to_listen(self) -> list[trio.SocketListener] | None:
        assert self._address is not None
        host, port = self._address
        try:
            listeners = list(await trio.open_tcp_listeners(port, host=host))
        except OSError as error:
            reason = "another program uses it" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
            if self._error != reason:
                _log.warning("api.cannot_listen", address=self._listen, reason=reason)
            self._error = reason
            return None
        if port == 0:  # of a name with two addresses each would have another port
            for listener in listeners[1:]:
                await listener.aclose()
            listeners = listeners[:1]
        bound = listeners[0].socket.getsockname()
        self._bound = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
        self._error = None
        _log.info("api.listening", address=self._bound)
        return listeners

    # -- what `status` says -------------------------------------------------------------------------------------

    @property
    def url(self) -> str | None:
        """Where it answers, if it does."""
        return None if self._bound is None else f"http://{self._bound}"

    def in_status(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """The node's status with this interface in it."""
        http = {"listen": self._listen, "url": self.url, "error": self._error}
        findings = [*self._findings(status["self"]), *status["findings"]]
        return {**status, "http": http, "findings": findings}

    def _findings(self, me: str) -> list[dict[str, Any]]:
        if self._error is None:
            return []
        message = f"no HTTP interface: it cannot listen on {self._listen}, since {self._error}"
        hint = (
            "It is tried again every few seconds. Change api.listen in the configuration if another program is to keep"
            ' the port ("127.0.0.1:0" takes any free one), or if the address is not this machine\'s.'
        )
        return [dict(Finding(FindingKind.HTTP_ADDRESS, me, message, hint).to_json())]
