"""The training loop and the pure parts of a step. Adapters are reached through ports only."""
