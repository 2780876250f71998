"""What the suite takes, in seconds of a processor: those differ little from run to run, however
busy the machine is, so that a test that has become dear shows at the end of any run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

#: The name under which a test's report carries its seconds.
PROPERTY = "cpu_seconds"

#: All cases of a quick test together may take so many before they are told of.
QUICK_SECONDS = 4.0

_SHOWN = 12


def cpu_seconds() -> float:
    """Of this process so far, and of those it started that have ended; forked servers are the
    children of another."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def lines_of(costs: Iterable[tuple[str, float]], quick: bool) -> list[str]:
    """What to say at the end of a run.

    Args:
        costs: node id and seconds of every test.
        quick: whether only quick tests ran, which are told of by name if they are not.
    """
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for node, seconds in costs:
        files[node.split("::")[0]] += seconds  # type: ignore[assignment]
        tests[node.split("[")[0]] += seconds  # type: ignore[assignment]
    told = [f"{files.total():.0f} s of a processor in all, without servers; most of it in"]
    told += [f"{seconds:7.1f} s  {file}" for file, seconds in files.most_common(_SHOWN)]
    dear = [(s, test) for test, s in tests.most_common() if s > QUICK_SECONDS] if quick else []
    told += [f"{s:7.1f} s  {test} is not quick; name it in tests/marking.py" for s, test in dear]
    return told
