"""What a peer can do, how closely two peers' numbers agree, and what can go wrong between them.

errors      every typed error: its name on the wire, its message, what to do next
agreement   differences between two results of the same rows, and how small they must be
advert      what a peer says of itself, signed, and its heartbeat; advert_content is what it can say,
            held_experts which experts it holds

It imports nothing of the other packages, and `errors` needs the standard library alone: command lines start with it.
"""
