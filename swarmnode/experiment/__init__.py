"""Does the leader find out who cheats, and does it let honest peers be? `swarmctl audit experiment`.

cheats      the cheats, as expert backends: each can be a daemon's, by [compute] factory
dispatches  real activations of a model, as a leader would send them to one peer
trials      one peer after the other, cheating or honest, under the leader's own audits and judge, in one process
report      what many of them show, with the bounds that they prove; kept in a file, so that a long run can go on
daemons     the same with real daemons, one of which cheats
run         all of it together
"""
