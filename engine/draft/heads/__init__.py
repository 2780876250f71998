"""Heads: small drafters that read the target's own hidden states."""
