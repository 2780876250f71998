"""Small operations that no threads share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """torch's operations share their work with no other thread, in a block or a function.

    What is small gains little from sharing, and on a busy machine loses a time slice wherever
    threads wait for each other. And a sum that is shared out depends on how many share it.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
