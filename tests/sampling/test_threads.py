"""What is small is one thread's work, and does not depend on how many there are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.sampling import process_logits
from engine.sampling.threads import one_thread
from tests.sampling.support import make_row


class Watch(TorchDispatchMode):
    """Notes how many threads each operation may use."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_one_thread_ends_with_the_block_however_it_ends() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("four_threads")
def test_the_nucleus_does_not_depend_on_the_number_of_threads() -> None:
    """Its edge is where a sum over the vocabulary says, and threads would sum in another order."""
    logits = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0)) * 3
    row = make_row([1], [], temperature=0.8, top_p=0.9)
    with Watch() as watch:
        shared = process_logits(logits, [row])
    with one_thread():
        assert torch.equal(process_logits(logits, [row]), shared)
    assert 1 in watch.seen


@pytest.mark.parametrize(("given", "expected"), [(None, "5000"), ("7", "7")])
def test_threads_that_wait_soon_sleep(given: str | None, expected: str) -> None:
    """Unless the environment says otherwise."""
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    if given is not None:
        environment["GOMP_SPINCOUNT"] = given
    program = "import engine.types, os; print(os.environ['GOMP_SPINCOUNT'])"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
