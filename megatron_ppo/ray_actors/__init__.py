"""Ray actor shells around the parts, their clients, and what only rank 0 does."""
