"""A deterministic simulator of whole swarms: a seed in, the same history (and its hash) out.

It runs the very objects of `scheduler/` that the daemon runs, in a world that is worse than ours: messages get lost,
doubled, late and out of order; links break in one direction; processes stop, crash in the middle of a write, and come
back; clocks run at different rates; strangers forge terms and votes. `checks.py` says what must hold all the while,
and `swarm.py` what must be true again soon after everything has healed.

    world      time, order and the history's hash
    network    messages under way
    host       one machine: clock, disk, and the behaviours that run on it
    election   behaviours: a backbone peer, the leader's orders, a worker
    nemesis    what goes wrong
    forger     what strangers invent
    checks     what must hold
    swarm      one run: simulate(seed) -> Outcome
    runner     many runs, resumable: python -m tests.simulator --seeds 20000 --resume FILE

A further part of the swarm joins as a `Behaviour` (host.py): it gets its host's clock, disk, timers and network, its
own channel for messages, and is built anew whenever the host boots. `Parts.more` (election.py) adds it to the nodes.
What must hold of it is a method of `Checks`, called by the behaviour where it happens.
"""
