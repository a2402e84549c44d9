"""Bounds of the network layer, each with its reason. What a protocol above it allows stands in swarmnode/limits.py.

Two kinds: sizes, which bound the memory that peers can make this node spend, and times, which bound how long anything
waits. A time here is the last resort behind the caller's own deadline.
"""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

# --- Connections ------------------------------------------------------------------------------------------------------

CONNECTIONS_MAX: Final = 256
"""Connections with a finished handshake. A leader's swarm is smaller; file descriptors (1,024) stay well above it."""

CONNECTIONS_PER_PEER_MAX: Final = 4
"""Two arise when both sides dial at once, one more while a dead one is noticed. The fourth is slack."""

PENDING_HANDSHAKES_MAX: Final = 128
"""Inbound connections in their handshake. When full, the oldest of the busiest address goes: it had the most time."""

HANDSHAKE_SECONDS_MAX: Final = 5.0
"""TCP accepted to muxer agreed: four round trips and four milliseconds of CPU. Idle connections are gone after it."""

CONNECT_SECONDS_MAX: Final = 10.0
"""A whole dial of one address: TCP (a lost SYN costs 1 s, then 3 s), then the handshake."""

DISCONNECT_SECONDS_MAX: Final = 5.0
"""Closing is local work; libp2p sleeps 0.1 s in it for each connection."""

KNOWN_PEERS_MAX: Final = 2 * CONNECTIONS_MAX
"""Peers in libp2p's book of keys and addresses; those that are not connected are dropped when it is full. Its own
limit drops this node's own keys first, and not all entries meet it."""

DUPLICATE_CHECK_SECONDS: Final = 2.0
"""How often a connection looks whether it is a spare one (both sides dialed) and idle, and may go."""

# --- Liveness ---------------------------------------------------------------------------------------------------------

KEEPALIVE_TICK_SECONDS: Final = 2.5
"""A connection silent for so long is pinged. Application pings are faster; this notices what they do not cover."""

SILENCE_SECONDS_MAX: Final = 10.0
"""Four pings without an answer: the peer's process is suspended or its machine gone. The connection is closed."""

WRITE_STALL_SECONDS_MAX: Final = 10.0
"""The kernel takes no byte for so long: the peer stopped reading its socket. The connection is closed."""

# --- Streams ----------------------------------------------------------------------------------------------------------

INBOUND_STREAMS_MAX: Final = 64
"""Open streams that one connection's peer may have opened, all protocols. Times the first window: 16 MiB.

Also how many may wait to be accepted: more than can be open come only from opening and resetting without end.
"""

OUTBOUND_STREAMS_MAX: Final = 256
"""Open streams towards one peer: a leak on this side shows here before it shows in memory."""

OPEN_STREAM_SECONDS_MAX: Final = 10.0
"""One round trip. Ten seconds covers a link that is full of shards."""

PROTOCOL_SECONDS_MAX: Final = 10.0
"""A peer that opened a stream must say for which protocol."""

PROTOCOL_NAME_BYTES_MAX: Final = 256
"""A line of multistream-select. The longest name in use has 30 bytes."""

PROPOSALS_MAX: Final = 8
"""Names that one side may propose before the other gives up."""

SEND_STALL_SECONDS_MAX: Final = 60.0
"""The peer's application reads nothing for so long while its window is full: the stream is reset."""

RECEIVE_SECONDS_MAX: Final = 24 * 3600.0
"""A receive that waits a day belongs to a forgotten stream. Liveness is the keepalive's and the caller's affair."""

LINGER_SECONDS_MAX: Final = 30.0
"""After aclose: how long the peer may take to close its side before the stream is reset and freed."""

# --- Flow control -----------------------------------------------------------------------------------------------------

FIRST_WINDOW_BYTES: Final = 256 * KIB
"""What a peer may send on a stream before anybody read: yamux's constant, both sides must agree on it."""

WINDOW_BYTES_MAX: Final = 8 * MIB
"""A window doubles while its reader keeps up, up to here: 3.2 Gbit/s at 20 ms."""

CONNECTION_EXTRA_BYTES_MAX: Final = 32 * MIB
"""All windows of a connection together beyond their first size. With the first windows: 48 MiB a connection."""

NETWORK_BUFFERED_BYTES_MAX: Final = 512 * MIB
"""Unread bytes of all connections. Only an attack gets here; the connection that holds most is then closed."""

SEND_WINDOW_BYTES_MAX: Final = 2**31
"""A peer that grants more than any implementation can mean overflows counters on purpose: closed."""

FRAME_PAYLOAD_BYTES: Final = 65_535 - 16 - 12
"""A large message goes in frames of this size, each one Noise message. Between two frames others have their turn."""

OUTPUT_BACKLOG_BYTES_MAX: Final = 1 * MIB
"""Sealed bytes that the kernel did not take. Data waits for zero; only answers to a peer that does not read pile up."""

SMALL_FRAME_BYTES: Final = 1 * KIB
SMALL_FRAMES_PER_TICK_MAX: Final = 50_000
"""Frames with less than SMALL_FRAME_BYTES, in a keepalive tick: 20,000 a second. A peer that asks and waits manages
14,000 on loopback; a flood costs at most a tenth of a core before its connection is closed."""

RECEIVE_CHUNK_BYTES: Final = 256 * KIB
"""One read from the socket. Four Noise messages: fewer system calls for shards, little memory for all connections."""

CALLS_WITHOUT_CHECKPOINT_MAX: Final = 8
"""Sends and receives that need no waiting skip trio's scheduler (half their cost); after so many they do not."""
