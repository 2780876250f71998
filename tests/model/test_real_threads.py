"""What the system tells of the threads that compute, in a process that has started no others."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import torch
from engine.model.threads import ThreadWatch

watch = ThreadWatch(3, apply=torch.set_num_threads)
matrix = torch.ones(700, 700)
for _ in range(10):
    matrix @ matrix
times = watch._read()
assert len(times) == 3, times
assert all(ran > 0 for ran, _ in times.values()), times
"""


def test_the_kernel_tells_what_threads_of_a_pass_got() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
