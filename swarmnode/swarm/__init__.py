"""Belonging to a swarm: its owner, its members, and what this node remembers of it.

store, record       the swarm's record, on disk and as a value that hears news
ownership, bans     the owner's keys and who is shut out: what the owner signs (founding: the backbone)
releases            whom the owner has released from what leaders held of it
owner_key           the key itself, under its passphrase
invites             tokens; invite_book counts their uses, reachability finds the addresses for them
members_only        protocols that need membership, beyond the network's key
admission, joining  the two sides of /swarmnode/join/1 (join_messages)
vote_file           a backbone peer's memory, and its seat's name
commands            the control methods; offline runs them where there is no daemon
errors, blobs       typed errors; byte strings within one

advert_node         all of the following together, as the daemon runs it
news                /swarmnode/news/1: the owner's word on its way to every member
spreading           how that is done with signed pieces of any kind: gossip, and asking a neighbour
verdicts            /swarmnode/verdicts/1: what leaders hold of peers; verdict_book is the newest of each, signed
mdns                peers on the same local network
adverts             what this node says of itself and hears of others: the service
advert_exchange     /swarmnode/adverts/1: asking a neighbour for adverts
dht                 adverts and holders of layers in the DHT
neighbourhood       connections for the sake of gossip
"""
