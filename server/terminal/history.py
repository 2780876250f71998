"""What was typed before, kept for the arrow keys: for its owner's eyes only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def history_file(environment: Mapping[str, str] = os.environ) -> Path:
    """`specserve/chat-history` in the user's state directory."""
    base = environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "specserve" / "chat-history"


def make_private(file: Path) -> None:
    """Makes sure that `file` is there and that nobody else can read it.

    Raises:
        OSError: it cannot be written.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # also of one that was there before
    finally:
        os.close(descriptor)
