"""Drafters: cheap guesses at what the target will say next."""
