"""Everything that touches libp2p, behind one thin interface, so that all else runs on a simulated network as well.

interface         peers, streams of bytes, and what may go wrong: read this one
libp2p_host       the interface on TCP, Noise and yamux
memory            the interface inside one process, with delays, silence and cuts on demand
loopback          a node's streams to itself, and what is the same of those between two nodes in one process
limits            every bound of this folder, with its reason

gossip            telling everybody: topics, messages, handlers that judge them
gossipsub         the same by GossipSub over any network; gossip_router is py-libp2p's router and what it needs,
                  gossip_outbox what one neighbour is going to get
memory_gossip     the same without a network
dht               a table that all peers keep together, and the same within one process
kademlia          the same on py-libp2p's Kademlia; kademlia_stores bound what is kept for others

tcp               a socket that can be used without a pass through the scheduler
noise_session     libp2p's handshake, then sealing and opening as plain functions
muxer             many streams over one connection; muxer_stream is one of them, stream_owner what it needs of the
                  connection
multistream       agreeing on a protocol's name
admission         who may be in a handshake at the same time
libp2p_adapters   the above in the shapes that py-libp2p expects
handlers          runs what the layers above serve, and survives it
addresses, counters, groups   what an address means; what is counted; exceptions without their groups
"""
