"""Fakes that validate their callers like the real parts, and Hypothesis strategies. For tests only."""
