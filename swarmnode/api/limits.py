"""Every bound of the HTTP interface, each with its reason.

Whoever can open a connection is a stranger: on loopback any program of any user of this machine, and any page in a
browser.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

CONNECTIONS_MAX: Final = 128
"""Of all clients. Each costs a task and a few KiB; browsers open six each, a client library a dozen."""

CONNECTIONS_PER_ADDRESS_MAX: Final = 64
"""Of one address that is not this machine: half, so that nobody alone keeps the others out."""

HEADER_BYTES_MAX: Final = 16 * KIB
"""Request line and headers; cookies of other programs on localhost are the largest part of them."""

HEADERS_SECONDS_MAX: Final = 10.0
"""From connecting, or the last answer, to the end of the next request's headers: a header that drips is cut off."""

BODY_BYTES_MAX: Final = 4 * MIB
"""A request's text may have 2 MiB (REQUEST_TEXT_BYTES_MAX), and JSON writes some characters with more bytes."""

BODIES_BYTES_MAX: Final = 64 * MIB
"""Of all requests that are read at this moment: sixteen of the largest."""

BODY_SECONDS_MAX: Final = 30.0
"""A whole body: 4 MiB pass a 1.2 Mbit/s link in this time, and a body that drips is cut off."""

RETRY_SECONDS_MAX: Final = 3_600
"""A leader says when a place in its queue should be free; more than an hour is no estimate."""

WRITE_SECONDS_MAX: Final = 20.0
"""A client that takes nothing for so long, with the kernel's buffer full, has gone in all but name."""

INLINE_JSON_BYTES_MAX: Final = 64 * KIB
"""Parsing more goes to a thread: it takes the event loop over a millisecond."""

STREAM_PATIENCE_SECONDS: Final = 0.8
"""A stream's status line waits so long for the first token: what fails at once then has its own status."""

STREAM_COMMENT_SECONDS: Final = 10.0
"""While a stream has nothing to say it sends a comment: proxies give up a silent one after 30 to 60 s."""

CHOICES_MAX: Final = 16
"""Answers to one request (`n`, times the prompts of /v1/completions); each takes a place in the leader's queue."""

WAITING_MAX: Final = 1_024
"""Answers of all clients that wait in this daemon. Each holds its request, 2 MiB at most, usually a few KiB."""

CLIENTS_REMEMBERED_MAX: Final = 1_024
"""Clients whose rate is known; of more, the one that was silent longest begins anew."""

RETRY_SECONDS: Final = 2
"""What Retry-After says: an election is over by then, a place in a queue often free."""

SEEN_SECONDS: Final = 1.0
"""How long a status or a placement is shown again: a page may ask each second, and so may many pages."""

SEEN_MAX: Final = 8
"""Placements without one peer or another that are kept for so long."""

LISTEN_RETRY_SECONDS: Final = 5.0
"""A port that is taken is tried again so often: whoever frees it sees the daemon take it at once."""

REFUSE_SECONDS_MAX: Final = 1.0
"""To tell a client that there are too many: the answer fits the kernel's buffer, so this is for a full one."""

REST_SECONDS_MAX: Final = 0.1
"""For the rest of a body that is refused, which mostly has come already: then the connection goes on."""

DISCARD_SECONDS_MAX: Final = 2.0
DISCARD_BYTES_MAX: Final = 32 * MIB
"""Of a body that is refused, so much is read and dropped: a client that still writes would miss why it is refused."""

LAST_WORD_SECONDS: Final = 0.5
"""To tell a client that the daemon stops: well within what the daemon has for that."""

ANSWER_EVENTS_MAX: Final = 64
"""Replies of all of a request's answers that wait for a slow client; then the leader is not read either."""
