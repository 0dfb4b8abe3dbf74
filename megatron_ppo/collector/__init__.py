"""The collector: reserve a slot, roll out, score, commit; group by group, in plain asyncio."""
