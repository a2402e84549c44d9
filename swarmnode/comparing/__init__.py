"""Comparing peers: a member has another one compute and looks at the numbers itself (`swarmctl equivalence peer:NAME`).

    messages   /swarmnode/compare/1: single operators by recipe, rows of the experts that a peer holds
    service    the peer's side: members alone, one piece of work at a time, within an allowance
    work       what the service computes: operators in a child process, rows with the serving kernels
    child      that child process
    asking     the other side, in the asker's daemon: streams to peers, by way of the backbone where it must be
    commands   what swarmctl may ask of its daemon for it

A peer computes what it always computes. It decides nothing here, and what comes out decides nothing about it.
"""
