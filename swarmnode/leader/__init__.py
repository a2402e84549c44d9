"""The leader: it routes, samples and combines. Experts are computed on workers; everything else of a token is here.

service           one leadership: who comes, and which model is served; active_model is that with all that serves it
protocols         what others open streams for, served once by the leader of the moment
prompts           a request to the engine, its effects back to whoever asked; asked reads it: tokens, the answer's form
trunk             the trunk in llama.cpp, kept from one leadership to the next
engine            the decode thread: one llama.cpp context, one batcher, one loop
remote_experts    one MoE layer out to its holders and back, called from the decode thread; flight is one such layer
routing           an epoch as it uses it, and ways around peers that fail meanwhile
own_experts       the leader's own copy of every expert, for what no holder gives
link              one worker's experts stream
members           who is there (the member protocol)
placer            when to place, who holds what, and when an epoch begins
shares            which share a worker should hold meanwhile, and how those change over that have no room for two
specs             what placement is told of members, and people of a placement
inheritance       what a predecessor left, and what is left to a successor
coverage          what of a placement can be used now: the answer behind `ready`
proving           links to workers, and the proof that each must give; rest for those who fail
report            the placement as `swarmctl placement` shows it
publishing        the routing that the decode thread gets
probe             every held expert, named and compared, before it serves
audit_tap         answers of live work that are chosen to be recomputed, on their way to the judge
settling          an answer ends when what was chosen of it is judged
recomputing       recomputes them; auditing acts on what it finds, and audit_evidence is what it shows for that
judge_process     has a process of its own do so, for a leader (judge_child; judge_frames in between);
                  judge does with a thread
repeating         whether a worker answers the same when it is asked again
checking          how precisely workers add, asked with crafted rows: before they serve, and now and then while they do
"""
