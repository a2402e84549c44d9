"""A worker: it fetches the experts that the leader assigns, proves them in a probe, and computes `experts(x, ids)`.

service           the parts put together
membership        dials the leader, obeys its assignments, comes back after every break
loader            an assignment: manifest, shards, memory
epochs            the expert sets in memory, found by term and epoch: this is where a dispatch is fenced
experts_service   checks a dispatch, computes it, answers
load              how busy the kernels are
"""
