"""What a run leaves behind and shows: metrics, sinks, display, process logs, run directory, gates, doctor.

Nothing here imports torch, so that actors and scripts start fast.
"""
