"""Ctrl-C while an answer comes: it ends the answer, not the program."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import termios
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any


async def unless_stopped(work: Coroutine[Any, Any, None]) -> bool:
    """Does the work unless Ctrl-C comes, which cancels it; returns whether it was finished."""
    task = asyncio.create_task(work)
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        with _silent_keys():
            await task
    except asyncio.CancelledError:
        if not stopped:
            raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return not stopped


@contextmanager
def _silent_keys() -> Iterator[None]:
    """Keys typed meanwhile do not appear in the middle of an answer; the next prompt gets them."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        yield  # no terminal
        return
    silent = before[:]
    silent[0] &= ~termios.ICRNL  # Enter stays Enter
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
