"""Ray: thin actor shells, their typed clients, and what only trainer rank 0 does."""
