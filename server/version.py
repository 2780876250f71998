"""Which specserve this is."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """The installed version of specserve."""
    try:
        return metadata.version("specserve")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0.0.0"
