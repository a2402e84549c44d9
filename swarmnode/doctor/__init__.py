"""`swarmctl doctor`: what is wrong with this machine's part in a swarm, each fault by its cause and with its mend.

facts     what is looked at, as values; nothing else reaches a check
machine   gathers those of the machine: files, memory, disk, ports, kernels, addresses
node      gathers those of the node: its data folder, its record, its daemon, an invite
checks    facts to findings, pure: one function for each check
node_checks  the same for what the swarm and the daemon say
report    all checks, in order, as JSON
mending   what --fix does
"""
