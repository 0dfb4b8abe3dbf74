"""Models to start from: seeded supervised warm starts of small models, and SmolLM2 out of its package.

`recipe`, `facts` and `cache` import no torch; the builders are imported when a model is built.
"""
