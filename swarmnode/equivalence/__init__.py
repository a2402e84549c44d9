"""`swarmctl equivalence A B`: what two backends' or two peers' numbers differ by; without peers no daemon is needed.

    targets    what can be compared, by name, and what of it can be switched
    peers      peers as targets: by name, and what they compute by way of this machine's daemon
    restarts   kernels whose process ended, started anew
    recipes    what the level op computes, by name, so that another machine can compute the same
    ops        the level op: single operators, by weight type and batch width
    roundings  what a side rounds activations to, as its products show
    causes     what an operator's difference comes from, by a reference with switches
    splits     one model in llama.cpp whose experts two targets compute in turn
    shared     a side's experts on two machines: those that a peer holds, and the rest
    passes     a text through both models: the levels layer, logits and decisions
    task       the text's perplexity and questions with four answers: the level task
    divergence where two sides part: the layer, the expert, and the peer that computed it
    answers    greedy answers of both models: the level generation
    text       the text and the questions that models are compared on
    run        all of it, and the report
    matrix     every pair of the swarm's peers; kept: the last one
    figures    a level's figures in words; page: the report to look at, with charts

Figures and verdicts are in capabilities/equivalence.py, generation_level.py and task_level.py, limits in tolerances.py.
"""
