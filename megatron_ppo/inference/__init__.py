"""The inference engine: vLLM behind `protocol.ports.RolloutEngine`. Nothing here imports the trainer or Ray."""
