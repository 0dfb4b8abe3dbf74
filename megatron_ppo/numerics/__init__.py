"""Pure functions on tensors: advantages, losses, metric reduction. No I/O, no process groups."""
