"""A worker: it fetches the experts that the leader assigns, proves them in a probe, and computes `experts(x, ids)`."""
