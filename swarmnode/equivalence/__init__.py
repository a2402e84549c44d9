"""`swarmctl equivalence A B`: what two backends' numbers differ by, on one machine and without a daemon.

    targets    what can be compared, by name, and what of it can be switched
    ops        the level op: single operators, by weight type and batch width
    splits     one model in llama.cpp whose experts two targets compute in turn
    passes     a text through both models: the levels layer, logits and decisions
    task       the text's perplexity and questions with four answers: the level task
    answers    greedy answers of both models: the level generation
    text       the text and the questions that models are compared on
    run        all of it, and the report
    page       the report as a page to look at

Figures and verdicts are in capabilities/equivalence.py and task_level.py, limits in capabilities/tolerances.py.
"""
