"""Who leads: the shells around the pure election, and what every member is told of it.

Every member of a swarm runs all four: a peer that the owner adds to the backbone has to answer before it belongs to it.

dialer               connections to a set of peers that changes, and why one cannot be reached
election_service     /swarmnode/election/1: the election's clock, disk and streams (outlet: one stream out)
leadership_service   /swarmnode/leadership/1, the backbone's side: its word, proofs, and the leader's record
leader_watch         the members' side, one listener for each backbone peer: who leads, as LeaderView
leadership_messages  what is said there; news: the owner's word, which travels along; pace: how fast a peer may speak
kept                 the newest mandate and the leader's record on disk
reasons              why nobody leads, for people
"""
