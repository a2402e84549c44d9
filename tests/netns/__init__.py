"""A bed of real daemons in network namespaces, joined by a bridge that adds delay, loss, rates and cuts.

| file | what lives there |
|---|---|
| links.py | what lies between hosts: a pure machine |
| hosts.py | namespaces, their devices and addresses |
| bridge.py | the process that joins both, and its commands |
| bed.py | the bed as a test sees it |
| swarm.py | daemons in it, made a swarm |
| faults.py | a round: a fault in the middle of an answer, and what came of it |
| __main__.py | many rounds, as a command |
| skipping.py | a bed, or a test skipped with the reason |
"""
