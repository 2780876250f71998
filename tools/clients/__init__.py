"""Frameworks against a running server: `python -m tools.clients`."""
