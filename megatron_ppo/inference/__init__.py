"""The inference engine: vLLM behind `protocol.ports.RolloutEngine`. Imports no trainer and no Ray."""
