"""The two commands: `swarmnode` (the daemon) and `swarmctl` (everything else).

daemon     swarmnode run, config, version
ctl        swarmctl demo, bench, and all the others put together; models adds `swarmctl model ...`
asking     swarmctl ask; chat: the same in turns
watching   swarmctl status, top
logs       swarmctl logs
service    swarmctl service install, status, remove
requests   swarmctl requests, verify, forget; render_requests shows what they found, model_at_hand has the model
doctor     swarmctl doctor
predict    swarmctl predict
schema     swarmctl schema
completion  swarmctl completion
equivalence  swarmctl equivalence; render_equivalence shows what it found
kernels    swarmctl kernels build, list, compare
mesh       swarmctl placement, drain, undrain
audit      swarmctl audit, audit experiment; render_audit shows them
peer       swarmctl peer, peer release; render_peer shows what is known of one
swarm      swarmctl init, join, leave, invite, ban, backbone; owner adds `swarmctl owner ...`
belonging  what those of swarm and owner share; passphrase is where the owner's comes from
common     options, exit statuses, and the one place where a failure is printed
render     what people see; render_top of `top`; progress is the line that says a long command lives
"""
