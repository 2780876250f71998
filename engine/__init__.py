"""Tokens in, tokens out: the inference engine. No HTTP, no text."""

import os

# Threads of torch's operations wait for each other by spinning, by default for milliseconds, which
# on a busy machine keeps the core from the very thread they wait for. So they spin for some
# microseconds and then sleep. The runtime reads this when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
