"""Caches of a test's own that still have the kernels: to compile them takes ten seconds."""

from __future__ import annotations

from pathlib import Path

from engine.model.paths import cache_directory


def own_cache(place: Path) -> Path:
    """Makes a directory, where it is missing, that is good for `SPECSERVE_HOME`: empty, but for
    the compiled code of the cache in use. Call it before that variable is set."""
    kernels = cache_directory() / "native"
    kernels.mkdir(parents=True, exist_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    if not (place / "native").exists():
        (place / "native").symlink_to(kernels)
    return place
