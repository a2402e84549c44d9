"""The texts of the configuration's [api] section: an address to listen at, API keys, origins, host names."""

from __future__ import annotations

import ipaddress
import re

PORT_MAX = 65_535


def http_address(value: str) -> tuple[str, int] | None:
    """ADDRESS:PORT as a pair; None: off."""
    if value == "off":
        return None
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if host != "localhost":
        ipaddress.ip_address(host)
    if not colon or not re.fullmatch(r"\d{1,5}", port) or int(port) > PORT_MAX:
        raise ValueError("no port")
    return host, int(port)


def check_listen(value: str) -> str:
    try:
        http_address(value)
    except ValueError:
        raise ValueError('must be an address and a port such as 127.0.0.1:11435, or "off"') from None
    return value


def check_key(value: str) -> str:
    if not re.fullmatch(r"[!-~]{16,256}", value):
        raise ValueError("must have 16 to 256 characters, no spaces (`openssl rand -hex 24` makes one)")
    return value


def check_origin(value: str) -> str:
    if not re.fullmatch(r"https?://[^/\s*]+", value):
        raise ValueError("must be an origin such as https://chat.example.org, without a path")
    return value


def check_host(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9.-]{1,253}", value):
        raise ValueError("must be a host name in small letters, without a port")
    return value
