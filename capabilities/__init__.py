"""What a peer can do, how closely two peers' numbers agree, and what can go wrong between them.

errors      every typed error: its name on the wire, its message, what to do next
agreement   differences between two results of the same rows, and how small they must be
equivalence two backends set against each other, level by level; generation_level and task_level: the last two of them;
            tolerances: how far apart they may be
advert      what a peer says of itself, signed, and its heartbeat; advert_content is what it can say,
            held_experts which experts it holds
precision   how a backend accumulates and rounds, and the probe that tells; row_check tells it from answers in service,
            row_grades tells single rows of live work: right, coarse, or another function's
measurement what a peer measured of one backend, by weight type; numeric_class has the words for its classes
tool_form   how models write calls of tools
verdict     what a leader holds of a peer, and by what evidence; the board that it is written on
backbone    who may lead, in signed versions; certificates: the votes that make a term; membership_certificate: who
            belongs to the swarm; packing is the one form of their bytes

It imports nothing of the other packages, and `errors` needs the standard library alone: command lines start with it.
"""
