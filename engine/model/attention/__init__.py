"""Paged attention behind one small interface; `reference` is the truth, `cpu` the fast path."""
