"""Experts and trunks on their way from one peer's disk to another's, each checked against the hash that names it.

messages     the protocol
service      answers: from a model's own file, or from any other source
fetch        asks for manifests and experts: several sources, resumable
trunk        asks for a trunk, by pieces
whole        asks for everything, as one file that llama.cpp reads
lanes        a fetch at work (fetch_plan decides who fetches what; pace is how fast bytes may go)
store        the cache on disk, one file an expert, within a budget (manifests: of which models they are;
             files: the same for another process, which only reads)
borrowing    experts for a moment, on a node without the model's file
serving      what this node has for others: models, and the cache
"""
