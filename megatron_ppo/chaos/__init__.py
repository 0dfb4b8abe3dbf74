"""Faults that a run injects into itself: one wrapper per seam, installed by `app.faults` when `chaos` is on."""
