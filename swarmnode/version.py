"""The program's own version, from the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final


def _version() -> str:
    try:
        return version("swarmnode")
    except PackageNotFoundError:
        return "0.0.0+unknown"


VERSION: Final = _version()
