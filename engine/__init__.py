"""Tokens in, tokens out: the inference engine. No HTTP, no text."""
