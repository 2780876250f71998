"""Which tests are slow and why, told by where they lie and by what their file imports.

Whole files are marked here, so that the quick part of the suite need not even import them; single
tests carry the same marks as decorators.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: What the quick part leaves out.
SLOW_MARKS = frozenset({"process", "smollm2", "simulation", "slow", "gpu"})

#: Folders and files whose tests are slow although no import tells it.
PLACES = {
    "tests/end_to_end": "process",
    "tests/lossless": "slow",
    "tests/server/test_fuzz.py": "slow",
    "tests/tools": "slow",
}

#: A file that imports one of these starts processes ...
_STARTS = re.compile(
    r"^(?:from|import) (?:subprocess|tests\.server\.processes|tests\.end_to_end\.serving)\b",
    re.MULTILINE,
)
#: ... and one that imports this simulates whole runs of a planner.
_SIMULATES = re.compile(r"^from tests\.control\.simulator import\b", re.MULTILINE)

#: Files whose imports say otherwise, and why they are quick.
QUICK = {
    "tests/test_architecture.py": "its one process only imports a few modules",
}


@functools.cache
def marks_of(path: Path) -> frozenset[str]:
    """Names of the marks that every test of a file carries.

    Args:
        path: a file of the suite, absolute.
    """
    name = path.relative_to(ROOT).as_posix()
    found = {
        mark for place, mark in PLACES.items() if name == place or name.startswith(place + "/")
    }
    if name not in QUICK:
        text = path.read_text("utf-8")
        found |= {"process"} if _STARTS.search(text) else set()
        found |= {"simulation"} if _SIMULATES.search(text) else set()
    return frozenset(found)
