"""Benchmarks of whole jobs and of single parts; `docs/benchmarks.md` says what each figure means.

Each module is a command, `python -m benchmarks.NAME`, that prints a table and writes `outputs/bench/NAME.json`.
"""
