"""Experts by content: the disk cache, the service that gives them out, and fetching from several sources."""
