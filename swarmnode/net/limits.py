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

# --- Gossip -----------------------------------------------------------------------------------------------------------

GOSSIP_MESSAGE_BYTES_MAX: Final = 64 * KIB
"""One published message. An advert has 8 KiB; a placement of 61 layers of 256 experts over 100 peers fits."""

GOSSIP_RPC_BYTES_MAX: Final = 256 * KIB
"""What a neighbour may send at once: a few of the largest messages. Checked before it is read."""

GOSSIP_BATCH_BYTES: Final = 32 * KIB
"""What this node puts into one RPC, but for a single larger message."""

GOSSIP_RPC_MESSAGES_MAX: Final = 512
"""Messages in one RPC of a neighbour: a batch of the smallest that this node sends has 250."""

GOSSIP_TOPICS_MAX: Final = 16
"""Topics of one neighbour. A swarm has two or three."""

GOSSIP_TOPIC_CHARS_MAX: Final = 64

GOSSIP_MESSAGES_BURST: Final = 256
GOSSIP_MESSAGES_PER_SECOND: Final = 40.0
"""Of one neighbour. 100 peers make 7 messages a second, of which a neighbour brings some; with 40, each checked in
0.2 ms, it costs under 1 % of a core. Whoever sends more is read more slowly, and nothing of it is lost."""

GOSSIP_BYTES_BURST: Final = 1 * MIB
GOSSIP_BYTES_PER_SECOND: Final = 128.0 * KIB

GOSSIP_REFUSED_COST: Final = 8
"""A message that no honest node sends counts as so many: five bad ones a second is all that a neighbour gets."""

GOSSIP_RATES_MAX: Final = 512
"""Neighbours whose rates are remembered, or a flood would be forgiven with each new connection."""

GOSSIP_CONTROL_MAX: Final = 32
"""GRAFT, PRUNE, IHAVE and IWANT entries in one RPC: one a topic is usual."""

GOSSIP_IDS_MAX: Final = 128
"""Message ids in one IHAVE or IWANT. Two seconds of 256 peers' messages are 35."""

GOSSIP_SERVED_MAX: Final = 1_024
"""Messages that a neighbour got by asking for them, remembered so that each is sent once only."""

GOSSIP_SEEN_MAX: Final = 16_384
GOSSIP_SEEN_SECONDS: Final = 120.0
"""Ids of messages that came already: two minutes of 100 messages a second. A message cache holds five seconds."""

GOSSIP_OUTBOX_BYTES_MAX: Final = 1 * MIB
"""Waiting for one neighbour that reads slowly. Beyond, the oldest go: adverts are repeated anyway."""

GOSSIP_SEND_SECONDS_MAX: Final = 15.0
"""One RPC to a neighbour that does not read. Then its stream is given up and opened anew."""

GOSSIP_RETRY_SECONDS_MIN: Final = 0.5
GOSSIP_RETRY_SECONDS_MAX: Final = 30.0
"""Before a stream to a connected neighbour is tried again; doubled from the first to the second."""

GOSSIP_STREAMS_PER_PEER_MAX: Final = 4
"""One is in use; others appear while a connection is replaced."""

GOSSIP_RELAY_SECONDS_MAX: Final = 0.4
"""How long a relayed message waits for company, half of it at least. Small messages share a packet, and who meanwhile
sends the same message need not get it: one copy a link instead of up to two. Own messages leave at once."""

GOSSIP_DEGREE: Final = 4
GOSSIP_DEGREE_LOW: Final = 3
GOSSIP_DEGREE_HIGH: Final = 5
"""Neighbours to which messages go at once, for each topic. Each is a copy of everything in one direction or the other,
so with five of them and a hundred peers a node sends 6 KB/s. GossipSub's own six to twelve hide more neighbours that
drop what they should pass on; here those outside of the mesh notice (GOSSIP_SOUNDED_MAX)."""

GOSSIP_SOUNDED_MAX: Final = 4
"""Neighbours outside of a topic's mesh, of those that do not ask, which are told of messages in one heartbeat. A hub
with a hundred has been round within half a minute, before anybody who hears nothing more would suspect the others."""

GOSSIP_SOUNDING_IDS: Final = 4
"""Messages that such a neighbour is told of. One is enough to show that it gets none, a second that it gets few."""

# --- DHT --------------------------------------------------------------------------------------------------------------

DHT_VALUE_BYTES_MAX: Final = 8 * KIB
"""An advert."""

DHT_REQUEST_BYTES_MAX: Final = 32 * KIB
"""One stream's requests: a value, py-libp2p's record around it, and the sender's signed addresses."""

DHT_REPLY_BYTES_MAX: Final = 128 * KIB
"""A value, and 20 closer peers with their addresses and signed records."""

DHT_VALUES_MAX: Final = 1_024
"""Values that this node keeps for others: 8 MiB. The original's bound is 50,000 of a megabyte."""

DHT_VALUE_SECONDS_MAX: Final = 3_600.0
"""How long they are kept. Who lives puts its own again much sooner, and the dead should not stay listed for a day."""

DHT_PROVIDER_KEYS_MAX: Final = 1_024
DHT_PROVIDERS_PER_KEY_MAX: Final = 20
DHT_KEYS_PER_PROVIDER_MAX: Final = 64
"""A peer holds shards of a few models, in groups of layers: 8 to 32 keys."""

DHT_PROVIDER_SECONDS_MAX: Final = 3_600.0

DHT_PROVIDES_BURST: Final = 5
DHT_PROVIDES_PER_SECOND: Final = 0.5
"""py-libp2p drops the eleventh provider record of a peer within ten seconds, and says nothing."""

DHT_STREAMS_MAX: Final = 64
DHT_STREAMS_PER_PEER_MAX: Final = 4
DHT_SERVE_SECONDS_MAX: Final = 15.0
"""One request and its reply. The original's twelve places are taken for ever by twelve silent streams."""

DHT_READS_BURST: Final = 200
DHT_READS_PER_SECOND: Final = 60.0
"""Of one peer, all its streams together. A request takes some three reads and two milliseconds."""

DHT_RATES_MAX: Final = 512
"""Peers whose rates are remembered, or a flood would be forgiven with each new connection."""

DHT_LOOKUP_SECONDS_MAX: Final = 20.0
"""A whole look-up: two or three rounds, of which each may meet peers that do not answer."""

DHT_DIAL_SECONDS_MAX: Final = 4.0
DHT_DIAL_ADDRESSES_MAX: Final = 3
DHT_DIALS_BURST: Final = 10
DHT_DIALS_PER_SECOND: Final = 1.0
"""Peers that a look-up connects to because others named them: those may name any address in the world."""

DHT_FIRST_REFRESH_SECONDS: Final = 30.0
DHT_REFRESH_SECONDS: Final = 600.0
"""py-libp2p's own interval between two looks around; the first one when connections have been made."""

DHT_ADDRESSES_CACHED_SECONDS: Final = 10.0
"""Each of its messages carries this node's addresses; asking the system for them takes half a millisecond."""
