"""Where converted models and compiled kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """`$SPECSERVE_HOME`, else `specserve` in the user's cache directory."""
    if home := os.environ.get("SPECSERVE_HOME"):
        return Path(home)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specserve"
