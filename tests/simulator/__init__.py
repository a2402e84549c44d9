"""A deterministic simulator of whole swarms: a seed in, the same history (and its hash) out.

It runs the very objects of `scheduler/` that the daemon runs, in a world that is worse than ours: messages get lost,
doubled, late and out of order; links break in one direction; processes stop, crash in the middle of a write, and come
back; clocks run at different rates; strangers forge terms and votes. `checks.py` says what must hold all the while,
and `swarm.py` what must be true again soon after everything has healed.

    world      time, order and the history's hash
    network    messages under way; streams are those that arrive in order or not at all
    host       one machine: clock, disk, and the behaviours that run on it
    nemesis    what goes wrong; harm is what goes wrong in whole swarms besides
    forger     what strangers invent
    checks     what must hold of terms, votes, orders and quarantines; answers, of tokens and layers
    runner     many runs, resumable: python -m tests.simulator --seeds 20000 --resume FILE

A run of elections alone, which is cheap and so rough that little else would get done:

    election   behaviours: a backbone peer, the leader's orders, whoever obeys them
    swarm      one run: simulate(seed) -> Outcome
    failover   how long a swarm is without a leader

A run of a whole swarm:

    toy        a language model whose tokens show every mistake
    member     every node's view of who leads
    leading    what a backbone peer does while it leads, as the daemon does it, in callbacks: stays (who is there),
               placer, coverage, proving and inheritance (the epochs), dispatching (a layer's rows), engine (the
               decode loop); messages are what is said
    volunteer  a worker, which may turn bad
    asker      who asks, and goes on asking the next leader
    whole      one run: simulate_whole(seed) -> Outcome

A further part of the swarm joins as a `Behaviour` (host.py): it gets its host's clock, disk, timers and network, its
own channel for messages, and is built anew whenever the host boots. `Parts.more` (election.py) adds it to the nodes.
What must hold of it is a method of `Checks`, called by the behaviour where it happens.
"""
