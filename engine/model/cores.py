"""How many processor cores this process may keep busy: its affinity and its container's quota."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cores:
    """What the system allows.

    Attributes:
        affinity: cores that the process may run on.
        quota: CPU seconds a second that its control group grants; None = no limit.
    """

    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """Threads that can compute all the time. A fraction of a core is left out: a thread that
        gets half of one holds up all that wait for it."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))

    def __str__(self) -> str:
        quota = "no CPU quota" if self.quota is None else f"a CPU quota of {self.quota:g}"
        return f"{self.usable} usable ({self.affinity} by affinity, {quota})"


def find_cores(root: Path = Path("/")) -> Cores:
    """Asks the system.

    Args:
        root: where /proc and /sys are.
    """
    if hasattr(os, "sched_getaffinity"):
        affinity = len(os.sched_getaffinity(0))
    else:
        affinity = os.cpu_count() or 1
    return Cores(affinity, cpu_quota(root))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU seconds a second that control groups grant this process, version 1 or 2; None = no limit.

    A group is limited by those above it, too, so the tightest counts. In a container the group may
    be named as the host sees it; then its own is what is mounted.
    """
    found = [
        quota
        for directory in _groups(root)
        for quota in (_version_2(directory), _version_1(directory))
        if quota is not None
    ]
    return min(found, default=None)


def _groups(root: Path) -> Iterator[Path]:
    """Directories of the groups this process is in, and of those above them."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, name = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            bases = [mount, mount / "unified"]
        elif "cpu" in controllers.split(","):
            bases = [mount / controllers, mount / "cpu"]
        else:
            continue
        for base in bases:
            group = Path(os.path.normpath("/" + name.lstrip("/")))
            yield from (base / above.relative_to("/") for above in (group, *group.parents))


def _version_2(directory: Path) -> float | None:
    """``cpu.max``: microseconds or "max", and the period they are granted for."""
    quota, period = [*_read(directory / "cpu.max").split(), "", ""][:2]
    return _ratio(quota, period)


def _version_1(directory: Path) -> float | None:
    """The same as two files; -1 = no limit."""
    quota = _read(directory / "cpu.cfs_quota_us").strip()
    return _ratio(quota, _read(directory / "cpu.cfs_period_us").strip())


def _ratio(quota: str, period: str) -> float | None:
    if not (quota.isdecimal() and period.isdecimal()) or int(period) == 0:
        return None  # no such file, "max", or "-1"
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
