"""The leader: it routes, samples and combines. Experts are computed on workers; everything else of a token is here."""
