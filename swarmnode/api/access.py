"""Who may ask: the host that a request names, the page that it comes from, and the key that it shows.

On loopback programs of this machine need no key. A page in a browser on this machine is not one of them: it is known by
its Origin, or by a host name that only looks like this machine (DNS rebinding), and refused unless it is configured.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from swarmnode.api.errors import Refusal
from swarmnode.config_sections import ApiConfig

LOOPBACK_HOSTS: Final = frozenset(("127.0.0.1", "localhost", "::1"))
OPEN_PATHS: Final = frozenset(("/", "/healthz", "/readyz"))
"""Without a key: what tells nothing but that a daemon is here, and whether it is well."""
CLIENT: Final = "swarmnode.client"
"""Where a request's scope has it."""
_FORM_TYPES: Final = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
_SAFE_FETCHES: Final = ("same-origin", "none")
_METHODS: Final = "GET, POST, OPTIONS"
_PREFLIGHT_SECONDS: Final = 600
_SEEN_BY_PAGES: Final = b"retry-after, x-request-id"
"""Headers that OpenAI's clients read, and that browsers keep from pages of other origins unless told."""


@dataclass(frozen=True, slots=True)
class Granted:
    """`client` is whom limits count for: a key, or an address. `headers` go into every answer; `response`, if there is
    one, is the whole answer (a browser's preflight)."""

    client: str = ""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    response: Response | None = None


class Access:
    """The rules of one configuration."""

    def __init__(self, config: ApiConfig) -> None:
        self._keys = [key.encode() for key in config.keys]
        self._origins = frozenset(config.origins)
        self._checks_host = config.is_loopback
        self._hosts = LOOPBACK_HOSTS | {config.host, *config.hosts}

    def check(self, scope: Scope) -> Granted:
        """Raises Refusal."""
        headers = Headers(scope=scope)
        self._check_host(headers)
        granted = self._check_origin(scope, headers)
        if granted.response is not None:
            return granted
        try:
            client = self._check_key(scope, headers)
            self._check_content(scope, headers)
        except Refusal as refusal:  # a page that may ask may also read why not
            refusal.headers.update((name.decode(), value.decode()) for name, value in granted.headers)
            raise
        return replace(granted, client=client)

    def _check_host(self, headers: Headers) -> None:
        if not self._checks_host:
            return
        name = _host_of(headers.get("host", ""))
        if len(headers.getlist("host")) != 1 or name not in self._hosts:
            message = "the request is for another host. If this name is meant, put it into api.hosts"
            raise Refusal(403, message, "wrong_host")

    def _check_origin(self, scope: Scope, headers: Headers) -> Granted:
        origin = headers.get("origin")
        if origin is None:
            fetch = headers.get("sec-fetch-site", "none")
            if fetch not in _SAFE_FETCHES and headers.get("sec-fetch-mode") != "navigate":
                raise Refusal(403, "the request comes from a page of another origin", "wrong_origin")
            return Granted()
        if _is_same(origin, headers.get("host", "")):
            return Granted()
        if origin not in self._origins:
            message = "a page of another origin asks. If that is meant, put its origin into api.origins"
            raise Refusal(403, message, "wrong_origin")
        allow = [
            (b"access-control-allow-origin", origin.encode()),
            (b"access-control-expose-headers", _SEEN_BY_PAGES),
            (b"vary", b"origin"),
        ]
        if scope["method"] != "OPTIONS":
            return Granted(headers=allow)
        wanted = headers.get("access-control-request-headers", "authorization, content-type")
        more = {
            "access-control-allow-methods": _METHODS,
            "access-control-allow-headers": wanted,
            "access-control-max-age": str(_PREFLIGHT_SECONDS),
        }
        if "access-control-request-private-network" in headers:  # a page of the internet's asks for one of this machine
            more["access-control-allow-private-network"] = "true"
        return Granted(headers=allow, response=Response(status_code=204, headers=more))

    def _check_key(self, scope: Scope, headers: Headers) -> str:
        """The client's name."""
        if not self._keys or scope["path"] in OPEN_PATHS or scope["path"].startswith("/static/"):
            return f"address {(scope.get('client') or ('',))[0]}"
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        given = shown.strip().encode() if scheme.lower() == "bearer" else b""
        matching = [hmac.compare_digest(given, key) for key in self._keys]  # every one, each time
        if True not in matching:
            message = "no API key, or a wrong one: send `Authorization: Bearer KEY` with one of api.keys"
            raise Refusal(401, message, "invalid_api_key", headers={"www-authenticate": "Bearer"})
        return f"key {matching.index(True) + 1}"

    def _check_content(self, scope: Scope, headers: Headers) -> None:
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind in _FORM_TYPES:  # what a page may send anywhere without being asked
            raise Refusal(415, "send JSON, and the header `Content-Type: application/json`", "unsupported_media_type")
        if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
            raise Refusal(415, "send the body as it is, without Content-Encoding", "unsupported_media_type")


def _host_of(text: str) -> str:
    """The host of a Host header, without its port; empty if it is none."""
    try:
        return urlsplit(f"//{text}").hostname or ""
    except ValueError:
        return ""


def _is_same(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower() != ""
