"""Refusals in the shape that OpenAI's clients know: {"error": {"message", "type", "param", "code"}}.

`code` is the typed error's own name (docs/status.md lists them) and what programs should look at; the clients turn the
HTTP status into their exception classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, Final

from starlette.responses import JSONResponse

from capabilities.errors import SwarmError, UsageError
from swarmnode.api import limits

_STATUS: Final = {
    "usage": 400,
    "context_length_exceeded": 400,
    "unsupported_model": 400,
    "model_not_found": 404,
    "overloaded": 429,
    "internal": 500,
    "peer_mistake": 502,
    "deadline_exceeded": 504,
}
_OTHER_STATUS: Final = 503  # no_leader, not_ready, not_in_swarm, experts_unavailable, cancelled: later it may go well
_TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_PARAMS: Final = {"model_not_found": "model", "context_length_exceeded": "prompt"}
_RENAMED: Final = {"json_schema": "response_format"}
"""Fields of a request that the API knows by another name."""


class Refusal(Exception):
    """A request that is not served. `retry`: the same may go well after `limits.RETRY_SECONDS`."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None,
        param: str | None = None,
        *,
        retry: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = {**({"retry-after": str(limits.RETRY_SECONDS)} if retry else {}), **(headers or {})}

    def to_json(self) -> dict[str, Any]:
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, usual)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.to_json(), self.status, self.headers)


def refusal_of(error: SwarmError, text: str = "messages") -> Refusal:
    """A typed error as a client of the API sees it, who has no use for where the commands are explained.

    text: the field of the request that holds what is asked.
    """
    status = _STATUS.get(error.type, _OTHER_STATUS)
    hint = "" if error.hint == UsageError.default_hint else error.hint
    message = f"{error.message}. {hint}" if hint else error.message
    code = "invalid_value" if error.type == "usage" else error.type
    param = error.details.get("parameter") or _PARAMS.get(error.type)
    param = text if param == "prompt" else _RENAMED.get(str(param), param)
    headers = {}
    if error.type == "deadline_exceeded":  # clients repeat what failed with 5xx: this would only take as long again
        headers["x-should-retry"] = "false"
    if isinstance(after := error.details.get("retry_after_s"), int | float) and 0 < after <= limits.RETRY_SECONDS_MAX:
        headers["retry-after"] = str(ceil(after))
    return Refusal(status, message, code, param, retry=status in (429, 503), headers=headers)
