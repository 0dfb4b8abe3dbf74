"""The rules of asynchronous PPO in plain Python: records, staleness, targets, ledger, ports.

Nothing here imports anything but the standard library, so every rule can be tested in milliseconds.
"""
