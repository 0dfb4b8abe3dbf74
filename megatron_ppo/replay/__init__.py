"""The staleness-gated replay buffer: pure bookkeeping, its snapshot, and the asyncio service around it."""
