"""The kernels and what launches them. Each computes a row as if it were alone.

Where there is no CUDA device, Triton's interpreter stands in. It has to know before Triton is
imported, which torch may do at any time: hence an environment variable.
"""

from __future__ import annotations

import os
import sys

import torch

from engine.model.cuda.interpreter import VARIABLE, mend

if not torch.cuda.is_available() and os.environ.get(VARIABLE) != "1":
    if "triton" in sys.modules:
        raise ImportError(
            f"There is no CUDA device, and Triton was loaded without {VARIABLE}=1; set it in the "
            "environment to run the kernels in its interpreter."
        )
    os.environ[VARIABLE] = "1"

if os.environ.get(VARIABLE) == "1":
    mend()
