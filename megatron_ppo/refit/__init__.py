"""Publishes the policy's weights to the engines. Knows neither vLLM nor Ray: it drives an `EngineFleet`."""
