"""`specserve serve` as the child of another command: it ends when its parent does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from server.cli import main

_PR_SET_PDEATHSIG = 1


def serve_for(parent: int, config: str) -> int:
    """Serves until the parent ends; returns the exit code.

    Args:
        parent: process id of who wants it.
        config: file of settings.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # that has ended already
        return 1
    return main(["serve", "--config", config])


if __name__ == "__main__":
    sys.exit(serve_for(int(sys.argv[1]), sys.argv[2]))
