"""Every limit of every application protocol, each with its reason. (What the network itself allows: net/limits.py.)

A peer is hostile until shown otherwise, so whatever it can make this node store, wait for or compute ends at a number
in this file. Limits on single fields do not bound their product: where two fields multiply into memory (rows times
width), the product has its own limit and is checked from the header, before the payload is read.

Units come last in the names. `FrameLimits` is what one read of one protocol allows; wire.read_frame enforces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The most that one frame may hold. `items` bounds every msgpack array and map, `text_bytes` every string."""

    header_bytes: int
    payload_bytes: int
    items: int = 64
    text_bytes: int = 1 * KIB


# --- Frames -----------------------------------------------------------------------------------------------------------

HEADER_BYTES_MAX: Final = 8 * KIB
"""Headers describe, payloads carry: the largest header is a typed error with its list of experts (under 4 KiB)."""

HEADER_DEPTH_MAX: Final = 4
"""Containers within containers. A map holding an error holding a list of experts is three."""

EAGER_PAYLOAD_BYTES: Final = 64 * KIB
"""Up to here header and payload are read at once (one wake-up for a decode step); above, the header is judged first."""

ERROR_MESSAGE_BYTES_MAX: Final = 1_000
ERROR_HINT_BYTES_MAX: Final = 400
ERROR_DETAIL_BYTES_MAX: Final = 128
ERROR_EXPERTS_MAX: Final = 256
"""With these four an error stays under 4 KiB, and still names all experts of a layer in nearly every model."""

REQUEST_ID_CHARS_MAX: Final = 64
"""Request ids appear in every peer's log: a uuid (36) or a short name, never a text."""

# --- Streams ----------------------------------------------------------------------------------------------------------

PEERS_MAX: Final = 256
"""Members of one leader: as many as the network keeps connections."""

OPEN_STREAM_SECONDS_MAX: Final = 5.0
"""Opening a stream costs two round trips; 5 s covers a bad mobile link and still ends before a person gives up."""

IDLE_STREAM_SECONDS_MAX: Final = 60.0
"""A request stream on which nothing arrives is closed: streams are counted, so idle ones must not add up."""

SEND_SECONDS_MAX: Final = 20.0
"""One frame to a peer that stopped reading. The largest chunk (256 KiB) passes a 128 kbit/s link in this time."""

# --- Experts: leader to worker and back -------------------------------------------------------------------------------

DISPATCH_TOKENS_MAX: Final = 4_096
"""Rows of activations in one dispatch. llama.cpp's largest micro-batch in use is 512; a token's index fits 16 bits."""

DISPATCH_ROWS_MAX: Final = 32_768
"""(token, expert) pairs in one dispatch: 4,096 tokens with eight experts each, all held by one worker."""

DISPATCH_PAYLOAD_BYTES_MAX: Final = 32 * MIB
"""512 tokens of width 8,192 in F32 take 16 MiB, with room for twice that. Longer prefills go in several dispatches."""

REPLY_PAYLOAD_BYTES_MAX: Final = 64 * MIB
"""Bounds the product rows * n_out * 4, as no limit on a field does: 512 tokens, 8 experts, 4,096 wide are 64 MiB."""

EXPERT_ID_MAX: Final = 65_535
"""Expert ids are 16 bits on the wire; the largest models have about a thousand experts a layer."""

LAYER_MAX: Final = 65_535

EXPERTS_REQUEST: Final = FrameLimits(header_bytes=128, payload_bytes=DISPATCH_PAYLOAD_BYTES_MAX, items=9, text_bytes=64)
"""A dispatch header is nine integers (60 bytes at most with both length words); a notice carries a request id (64)."""

EXPERTS_REPLY: Final = FrameLimits(HEADER_BYTES_MAX, REPLY_PAYLOAD_BYTES_MAX, items=ERROR_EXPERTS_MAX)
"""A reply header is four integers; a failure carries a typed error instead."""

EXPERTS_STREAMS_PER_PEER_MAX: Final = 4
"""One persistent stream carries all dispatches; more exist only while an old one is being replaced."""

COMPUTE_US_MAX: Final = 2**32 - 1

# --- Shards: fetching experts -----------------------------------------------------------------------------------------

SHARD_CHUNK_BYTES: Final = 256 * KIB
"""Every chunk but a range's last is exactly this long, so a deadline a chunk is also a lowest rate. Short enough that
a ping waits 2 ms behind one on a 1 Gbit/s link, long enough that a chunk's fixed cost (a thread hop) is small."""

MANIFEST_SECONDS_MAX: Final = 60.0
"""A whole manifest from one peer. 16 MiB pass a 2.5 Mbit/s link in this time, the usual 1 MiB a far slower one."""

SHARDS_REQUEST: Final = FrameLimits(header_bytes=256, payload_bytes=0, items=8, text_bytes=64)
SHARDS_REPLY: Final = FrameLimits(HEADER_BYTES_MAX, SHARD_CHUNK_BYTES, items=ERROR_EXPERTS_MAX)

SHARD_STREAMS_PER_PEER_MAX: Final = 4
"""A fetch uses two a source; a second fetch may begin while the first one winds down."""

SHARD_STREAMS_MAX: Final = 64
"""All peers together: 64 chunks in flight are 16 MiB."""

SHARD_READS_MAX: Final = 4
"""Chunks read from disk at once, each in a thread. More only make a spinning disk seek."""

SHARD_READ_WAIT_SECONDS_MAX: Final = 20.0
"""Waiting for a turn to read, and for the disk; then the asker is told `overloaded` and goes elsewhere."""

SHARD_SOURCES_MAX: Final = 8
"""Peers that one fetch draws on at once. Two fill a home downlink; eight ride out several that fail."""

SHARD_LANES_PER_SOURCE: Final = 2
"""Streams a source: while one waits for the round trip between two experts, the other one transfers."""

SHARD_CHUNK_SECONDS_MAX: Final = 10.0
"""One chunk's arrival. 256 KiB in 10 s is 26 KB/s: below that a source is as good as gone, and another is asked."""

SHARD_FETCH_PATIENCE_SECONDS: Final = 60.0
"""A fetch without a single new chunk for this long fails. It covers a source's restart (a daemon is back in 10 s)."""

SHARD_BACKOFF_SECONDS_MIN: Final = 0.25
SHARD_BACKOFF_SECONDS_MAX: Final = 8.0
"""A source that failed is left alone for the minimum, doubled with every further failure, up to the maximum."""

BORROWINGS_MAX: Final = 4
"""Batches of experts that a leader without the model's file fetches at a time, to probe with: with 64 MiB each, what
they may keep of the cache stays small, and a slow holder holds up a quarter of the probes."""

BORROW_SECONDS_MIN: Final = 60.0
BORROW_BYTES_PER_SECOND_MIN: Final = 256.0 * KIB
"""One batch may take the first, or its bytes at the second: an uplink of 2 Mbit/s. A holder below that is too slow to
be proven."""

MANIFESTS_KEPT_MAX: Final = 8
"""Manifests kept for what is in the cache: more models than a swarm goes through before their experts are evicted. Of
16 MiB each at most, usually of one."""

SERVED_MODELS_OPEN_MAX: Final = 4
"""Models whose files are open to serve from. The active one, its successor, and two for who is behind."""

# --- Prompt: asker to leader ------------------------------------------------------------------------------------------

REQUEST_TEXT_BYTES_MAX: Final = 2 * MIB
"""A conversation's text. A context of 131,072 tokens is about 0.6 MB of English and under 2 MiB in any script."""

REQUEST_TEXTS_BYTES_MAX: Final = 256 * MIB
"""Texts of all requests that a leader waits for, queues or answers. Streams and their sizes are bounded one by one, and
256 peers with 16 prompts of 2 MiB each would be 8 GiB."""

MAX_TOKENS_MAX: Final = 1_048_576
"""Longer than any context; the context's own length is the real limit."""

PROMPT_REQUEST: Final = FrameLimits(
    HEADER_BYTES_MAX, REQUEST_TEXT_BYTES_MAX + 4 * MAX_TOKENS_MAX, items=64, text_bytes=1 * KIB
)
"""The text, and the tokens of an answer that is to be continued, four bytes each."""

REQUEST_TOKEN_BYTES: Final = 40
"""What such a token counts for among the texts that a leader holds: as a number in its memory, not on the wire."""

PROMPT_REPLY: Final = FrameLimits(HEADER_BYTES_MAX, 1 * MIB, items=ERROR_EXPERTS_MAX)
"""One frame of an answer holds a few tokens' text; the last one also the calls of tools, whose arguments may be as long
as an answer."""

MESSAGES_MAX: Final = 1024
"""Of a conversation: a few hundred turns fill any context."""

TOOLS_MAX: Final = 128
"""Of a request, as OpenAI's API has it."""

TOOL_CALLS_MAX: Final = 128
"""Of one message, and of one answer: as many as there may be tools."""

TOOLS_BYTES_MAX: Final = 512 * KIB
"""Descriptions and schemas of all tools of a request. They go into the prompt: more would fill any context."""

GRAMMAR_BYTES_MAX: Final = 64 * KIB
"""A grammar or a JSON schema. Those that people write have a few KiB; the largest generated ones some 30."""

TOP_LOGPROBS_MAX: Final = 20
"""Alternatives to each token, as OpenAI's API has it."""

TOKEN_BYTES_MAX: Final = 256
"""Of one token where its bytes are told. The longest of known vocabularies are 128 spaces; with 20 alternatives this
still fits a header."""

PROMPT_STREAMS_PER_PEER_MAX: Final = 16
"""Prompts of one peer at a time. Each holds a place in the queue of the leader."""

PROMPT_KEEPALIVE_SECONDS: Final = 1.0
"""A queued prompt hears from its leader this often, so that an asker tells a queue from a dead leader."""

PROMPT_SILENCE_SECONDS_MAX: Final = 4.0
"""An asker that hears nothing for this long reports the leader as lost: with detection it stays under 5 s."""

# --- Status, membership, pings ----------------------------------------------------------------------------------------

STATUS_REQUEST: Final = FrameLimits(header_bytes=256, payload_bytes=0, items=8)
STATUS_REPLY: Final = FrameLimits(HEADER_BYTES_MAX, 4 * MIB, items=ERROR_EXPERTS_MAX)
"""256 peers with 16 KB each."""

STATUS_STREAMS_PER_PEER_MAX: Final = 4

MEMBER_REPORT: Final = FrameLimits(HEADER_BYTES_MAX, payload_bytes=0, items=ERROR_EXPERTS_MAX)
"""From a worker: a hello, or progress with perhaps an error. A leader has many, so none may send it a payload."""

MEMBER_FRAME: Final = FrameLimits(HEADER_BYTES_MAX, 2 * MIB, items=ERROR_EXPERTS_MAX)
"""An assignment names every expert that a worker holds: 128 layers of 1,024 experts at 3 bytes are 0.4 MB."""

ASSIGNED_EXPERTS_MAX: Final = 131_072
"""Experts of all layers that one worker may be told to hold: 128 layers of 1,024."""

MEMBER_STREAMS_PER_PEER_MAX: Final = 2
"""One lives; a second appears while a peer that restarted comes back before the first one was given up."""

MEMBER_HELLO_SECONDS_MAX: Final = 10.0

PING_FRAME: Final = FrameLimits(header_bytes=64, payload_bytes=0, items=4, text_bytes=0)
PING_STREAMS_PER_PEER_MAX: Final = 2

# --- Belonging to a swarm: its record, invites, joining ---------------------------------------------------------------

ADDRESS_CHARS_MAX: Final = 256
"""A multiaddr with a peer id and a DNS name (up to 253 characters in theory, under 60 in practice)."""

SWARM_ADDRESSES_MAX: Final = 32
"""Where a node begins to look for its swarm: a few addresses of each backbone peer (at most nine)."""

SWARM_ADDRESSES_PER_PEER_MAX: Final = 4
"""So that one peer with many interfaces, or a hostile one, cannot push the others out."""

ROTATIONS_MAX: Final = 16
"""Owner keys in a row. Every member keeps and checks the whole chain."""

KEPT_RECORDS_MAX: Final = 32
"""Records of an old owner key that a rotation keeps good: three backbone sets, with room for what else owners sign."""

BANS_MAX: Final = 1_024
"""Peers that were ever banned; a lifted ban stays, or the old one could be replayed. 1,024 take 0.2 MB."""

RELEASES_MAX: Final = 512
"""Peers that were ever released: a peer needs one after a quarantine only, and bans have the rest of NEWS_REPLY."""

INVITES_MAX: Final = 128
"""Invites that one backbone peer keeps, ended ones of the last month included."""

INVITE_USES_MAX: Final = 256
"""Uses of one invite. Who used it is remembered, so that a newcomer whose answer was lost can ask again."""

INVITE_ADDRESSES_MAX: Final = 6
"""Addresses in a token. Each makes it some 40 characters longer."""

INVITE_SECONDS_MIN: Final = 60
INVITE_SECONDS_MAX: Final = 366 * 86_400
"""An invite carries the network key, so none is for ever."""

INVITE_TOKEN_CHARS_MAX: Final = 4_096
"""Six addresses of full length make under 2,600."""

JOIN_REQUEST: Final = FrameLimits(header_bytes=512, payload_bytes=0, items=8, text_bytes=400)
"""The largest is a membership certificate to be renewed (under 384 bytes)."""

JOIN_REPLY: Final = FrameLimits(HEADER_BYTES_MAX, 512 * KIB, items=ERROR_EXPERTS_MAX, text_bytes=1 * KIB)
"""All bans (0.25 MB), releases (0.13 MB), the owner's rotations (23 KB), the backbone (4 KB) and addresses (8 KB)."""

JOIN_STREAMS_PER_PEER_MAX: Final = 2

JOIN_CONVERSATIONS_MAX: Final = 16
"""Newcomers at a time. One takes two round trips and a write to the disk; for one more, the oldest silent one goes."""

JOIN_SECONDS_MAX: Final = 20.0
"""One conversation: two round trips over a bad link, with the disk in between. A person waits in front of it."""

JOIN_ATTEMPTS_BURST: Final = 60
JOIN_ATTEMPTS_PER_SECOND: Final = 2.0
"""All newcomers together, beyond a burst: many machines may join at once, and a flood costs under 1 % of a core."""

JOIN_FAILURES_MAX: Final = 5
JOIN_FAILURE_SECONDS: Final = 300.0
"""A peer with so many wrong proofs within the time is refused unheard. Secrets have 128 bits; this is about noise."""

JOIN_FAILING_PEERS_MAX: Final = 1_024
"""Peers whose failures are remembered; of more, those that failed longest ago are forgotten."""

INVITE_DIAL_SECONDS_MAX: Final = 5.0
"""Trying one's own address before it goes into an invite; those that are silent cost a person this long."""

JOIN_DIAL_SECONDS_MAX: Final = 4.0
"""A newcomer gives each address of an invite this long, one after another: a lost SYN comes again after 1 s and 3 s."""

# --- Adverts: what peers say of themselves ----------------------------------------------------------------------------

ADVERTS_REQUEST: Final = FrameLimits(header_bytes=64, payload_bytes=80 * KIB, items=4, text_bytes=0)
"""The asker names what it has: 1,024 peers with a number each, 73 bytes at most."""

ADVERTS_REPLY: Final = FrameLimits(header_bytes=2 * KIB, payload_bytes=256 * KIB, items=32, text_bytes=0)
"""Some adverts of up to 8 KiB each, and the length and age of each in the header."""

ADVERTS_IN_REPLY_MAX: Final = 32
ADVERTS_STREAMS_PER_PEER_MAX: Final = 2

ADVERTS_SECONDS_MAX: Final = 20.0
"""One exchange: 100 adverts are 100 KB, most peers lack none."""

ADVERTS_SERVED_BURST_BYTES: Final = 2 * MIB
ADVERTS_SERVED_BYTES_PER_SECOND: Final = 32.0 * KIB
"""To one peer. A newcomer to a swarm of 256 peers gets all at once; who asks for all again and again has to wait."""

ADVERTS_SERVED_PEERS_MAX: Final = 512
"""Peers whose share is remembered."""

ADVERTS_ASK_SECONDS_MIN: Final = 60.0
"""Everything is asked of one neighbour this often at most, however often it reconnects."""

ADVERTS_WANTED_MAX: Final = 64
"""Peers that are heard of, but whose adverts are missing, asked for at a time."""

NEIGHBOURS_WANTED: Final = 8
"""Connections that a node tries to have, for its gossip: GossipSub's degree of 6, and two to choose from."""

NEIGHBOUR_DIAL_SECONDS: Final = 10.0
"""Between two tries to find another one."""

NEIGHBOUR_RETRY_SECONDS: Final = 600.0
"""A peer whose addresses did not answer is tried again after so long."""

NEIGHBOUR_LONELY_RETRY_SECONDS: Final = 20.0
"""The same for a node without any connection: whom it tried may just be starting."""

NEIGHBOUR_ADDRESSES_MAX: Final = 3
"""Addresses of one peer that are tried: each may cost ten seconds."""

REMEMBER_ADDRESSES_SECONDS: Final = 60.0
"""How often a node looks whether the backbone's addresses have changed, to keep them for its next start."""

LAN_PEERS_MAX: Final = 256
"""Peers on the local network that are remembered: as many as there can be connections."""

LAN_ADDRESSES_MAX: Final = 8
"""Addresses of one of them, as in an advert."""

LAN_ANNOUNCE_SECONDS: Final = 30.0
"""How often this node looks whether its own addresses have changed. Announcing goes by RFC 6762's own times."""

LAN_ECHO_SECONDS_MAX: Final = 15.0
"""Within this time a node hears its own announcement, or multicast does not work here. Probing takes 2 s."""

DHT_PUT_SECONDS_MIN: Final = 60.0
"""Between two puts of this node's advert, however often it changes."""

DHT_PROVIDE_SECONDS: Final = 1_200.0
"""What this node provides is said again so often: records last for an hour."""

HOLDERS_ASKED_MAX: Final = 20
"""Peers that claim to hold a layer and whose adverts are looked up. The DHT knows of no more for one key."""

# --- News: the owner's word on its way to every member ----------------------------------------------------------------

NEWS_REQUEST: Final = FrameLimits(header_bytes=64, payload_bytes=0, items=2, text_bytes=16)
"""A digest of 16 bytes."""

NEWS_REPLY: Final = FrameLimits(header_bytes=64, payload_bytes=512 * KIB, items=2, text_bytes=0)
"""All bans (0.25 MB), releases (0.13 MB), the owner's rotations (23 KB) and the backbone (4 KB)."""

NEWS_STREAMS_PER_PEER_MAX: Final = 2

NEWS_SECONDS_MAX: Final = 20.0
"""One exchange: all the news there can be over 128 kbit/s."""

NEWS_QUEUE_MAX: Final = 64
"""Pieces that wait for the disk (some milliseconds each). An owner makes one at a time."""

NEWS_ASK_SECONDS_MIN: Final = 60.0
"""One peer is asked for everything this often at most, however often it reconnects or brings what cannot be checked."""

NEWS_ASK_SECONDS: Final = 300.0
"""Besides, anybody is asked this often: what gossip lost is known to all within minutes, for 100 bytes each time."""

NEWS_SERVED_BURST_BYTES: Final = 1 * MIB
NEWS_SERVED_BYTES_PER_SECOND: Final = 8.0 * KIB
"""To one peer: everything twice at once; who knows the same gets nothing at all."""

NEWS_UNPROVEN_BURST: Final = 16
NEWS_UNPROVEN_PER_SECOND: Final = 0.1
"""Pieces of one neighbour whose proof fails here: a rotation that this node missed explains a few, not a flood."""

NEWS_SERVED_PEERS_MAX: Final = 512
"""Peers whose share is remembered."""

# --- Verdicts: what leaders hold of peers, on its way to every member. Paces and queues are those of news. -----------

VERDICTS_MAX: Final = 512
"""Peers with a verdict: twice as many as a leader serves (leader/members.py). Beyond that the oldest that says "fit"
goes first."""

VERDICTS_REPLY: Final = FrameLimits(header_bytes=64, payload_bytes=3 * MIB, items=2, text_bytes=0)
"""All verdicts: 5.7 KB each at most with their mandates, about 1.2 KB as a rule."""

VERDICTS_SERVED_BURST_BYTES: Final = 6 * MIB
VERDICTS_SERVED_BYTES_PER_SECOND: Final = 16.0 * KIB
"""To one peer: everything twice at once; who knows the same gets nothing at all."""

VERDICTS_KEEP_SECONDS: Final = 1.0
"""Between two writes of the file: what a crash may lose, other backbone peers have heard."""

VERDICTS_ADOPT_SECONDS: Final = 0.25
"""Between two verdicts that a new leader signs anew: under the rate that gossip forgives, all within two minutes."""

# --- Measuring --------------------------------------------------------------------------------------------------------

MEASURE_EXTRA_SECONDS_MAX: Final = 80.0
"""One measurement in a child, beside its deadline: its start, which takes an emulated processor half a minute, waiting
20 s for other daemons that measure, and the computation in which the deadline comes, on a machine that is busy
otherwise (it has the lowest priority)."""

# --- Comparing: a member has another one compute, to see how it rounds ------------------------------------------------

COMPARE_PAYLOAD_BYTES_MAX: Final = 4 * MIB
"""Either way. A weight type's products at eight lengths are 1.7 MB; who compares experts' rows cuts them to fit."""

COMPARE_REQUEST: Final = FrameLimits(1 * KIB, COMPARE_PAYLOAD_BYTES_MAX, items=16, text_bytes=128)
COMPARE_REPLY: Final = FrameLimits(HEADER_BYTES_MAX, COMPARE_PAYLOAD_BYTES_MAX, items=ERROR_EXPERTS_MAX)

COMPARE_STREAMS_PER_PEER_MAX: Final = 2
"""One lives; a second appears while a command that was stopped winds down."""

COMPARE_WAITING_MAX: Final = 8
"""Askers that wait for their turn; one piece of work is done at a time. More hear `overloaded`."""

COMPARE_LENGTHS_MAX: Final = 8
COMPARE_LENGTH_MAX: Final = 32 * KIB
COMPARE_WIDTHS_MAX: Final = 8
COMPARE_WIDTH_MAX: Final = 512
"""Sums and batches of one request: as long as the widest models' and llama.cpp's largest batch. All at their largest
take half a minute of one core; the usual ones under a second."""

COMPARE_ROWS_MAX: Final = 512
"""Expert rows of one request: 64 tokens with eight experts each."""

COMPARE_SLICE_ROWS: Final = 32
"""Rows between two looks at whether a request waits for the kernels: 2 to 20 ms of work."""

COMPARE_YIELD_FACTOR: Final = 9.0
"""While this worker serves requests, a slice is followed by a pause of so many times what it took: a tenth of the
kernels' time at most goes to comparisons."""

COMPARE_YIELD_SECONDS_MAX: Final = 1.0
"""The longest of these pauses: a request for rows still ends in time."""

COMPARE_SECONDS_MAX: Final = 60.0
"""One piece of work, its wait included; a child that computes is then ended."""

COMPARE_ASKER_BURST_SECONDS: Final = 180.0
COMPARE_ASKER_RATE: Final = 0.02
"""Seconds of computing for one asker, and what comes back a second. All six levels of the demo model take about a
minute of them; for ever after an asker has 2 % of one core."""

COMPARE_BURST_SECONDS: Final = 360.0
COMPARE_RATE: Final = 0.05
"""The same for all askers together, so that many do not get what one may not: 5 % of one core in the long run, at the
lowest priority."""

COMPARE_ASKERS_MAX: Final = 512
"""Askers whose share is remembered."""

COMPARE_RELAYS_MAX: Final = 4
"""Requests that a backbone peer passes on at a time, for members that cannot reach each other: 8 MiB each."""

COMPARE_RELAY_BURST_BYTES: Final = 256 * MIB
COMPARE_RELAY_BYTES_PER_SECOND: Final = 128.0 * KIB
"""For one asker: a comparison of all levels over a small model once, and a trickle after that."""

COMPARE_KEPT_STREAMS_MAX: Final = 8
"""Streams to peers that a daemon keeps open for its own user's comparisons, the least used of which is closed."""

COMPARE_DIAL_SECONDS_MAX: Final = 4.0
COMPARE_DIALS_MAX: Final = 3
"""One address of a peer that is to be compared, and how many are tried, before a backbone peer is asked to pass on."""

# --- Who leads: the election among the backbone, and its word to every member -----------------------------------------

ELECTION_FRAME: Final = FrameLimits(HEADER_BYTES_MAX, payload_bytes=0, items=16, text_bytes=4 * KIB)
"""The longest message, an update of the backbone, has 7,912 bytes, its longest record 3,584."""

ELECTION_STREAMS_PER_PEER_MAX: Final = 2
"""One lives; a second appears while a peer that restarted comes back."""

ELECTION_OUTBOX_MAX: Final = 32
"""Messages that wait for one peer: six seconds of heartbeats. Of more, the oldest is the one that is worth least."""

ELECTION_SEND_SECONDS_MAX: Final = 5.0
"""A message that a peer does not take for so long means nothing any more: elections are over in three."""

ELECTION_STRANGERS_MAX: Final = 8
"""Peers outside of the backbone that are being told of its version at a time."""

BACKBONE_DIAL_SECONDS_MAX: Final = 4.0
"""One address of a backbone peer: a lost SYN comes again after 1 s and 3 s. The next address waits for it."""

BACKBONE_RETRY_SECONDS_MIN: Final = 0.2
BACKBONE_RETRY_SECONDS_MAX: Final = 2.0
"""Between two tries. A peer that restarts is found within two seconds; nine that are gone cost five dials a second."""

BACKBONE_STABLE_SECONDS: Final = 2.0
"""A connection that broke sooner does not begin the retries anew."""

LEADERSHIP_FRAME: Final = FrameLimits(HEADER_BYTES_MAX, 512 * KIB, items=16)
"""A word is a header with some addresses (under 3 KiB). The payload is for proofs: a mandate and all of the owner's
news (JOIN_REPLY)."""

LEADERSHIP_STREAMS_PER_PEER_MAX: Final = 2

LEADERSHIP_WORD_SECONDS: Final = 1.0
"""A backbone peer says at least this often that it is there. Unchanged, that takes some 90 bytes on the wire, so a
hundred members cost each backbone peer 9 KB/s."""

LEADERSHIP_FRESH_SECONDS: Final = 3.0
"""A word counts for so long: two may be lost or late. A broken connection ends it at once."""

LEADERSHIP_SILENCE_SECONDS_MAX: Final = 6.0
"""A backbone peer that says nothing for so long is asked over a new stream: twice what makes its word stale."""

LEADERSHIP_MEMBER_FRAMES_BURST: Final = 64
LEADERSHIP_MEMBER_FRAMES_PER_SECOND: Final = 40.0
"""Of one peer, in elections as well. A leader sends five heartbeats a second, a candidate as many requests; what comes
faster is read more slowly, and nothing of it is lost."""

LEADERSHIP_MISTAKE_COST: Final = 40
"""What no honest peer sends counts as so many: a false proof costs some milliseconds to find out, and a second to
whoever sends it."""

LEADERSHIP_PACES_MAX: Final = 512
"""Peers whose rate is remembered, or each new stream would begin with a clean sheet."""

MEMBERSHIP_SECONDS_MAX: Final = 3.0
"""A stream of a peer whose advert has not come waits so long. Adverts follow a connection within a second, and an asker
takes four seconds of silence for its leader's loss."""

LEADER_RECORD_BYTES_MAX: Final = 4 * MIB
"""What a leader leaves to its successor: who holds which experts, and the verdicts. 48 layers of 256 experts with two
replicas over 256 peers are 0.3 MB."""

LEADER_RECORD_CHUNK_BYTES: Final = 32 * KIB
"""A record goes in pieces, so that a word waits 0.3 s behind one on a 1 Mbit/s uplink, and not for all of it."""
