"""What containers may compute with, from trees of control groups as they are found there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.model.cores import Cores, cpu_quota, find_cores

SYS = "sys/fs/cgroup"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


CASES: dict[str, tuple[dict[str, str], float | None]] = {
    "no groups at all": ({}, None),
    "version 2, in a container": (
        {"proc/self/cgroup": "0::/\n", f"{SYS}/cpu.max": "150000 100000\n"},
        1.5,
    ),
    "version 2, without a limit": (
        {"proc/self/cgroup": "0::/\n", f"{SYS}/cpu.max": "max 100000\n"},
        None,
    ),
    "version 2, a service": (
        {
            "proc/self/cgroup": "0::/system.slice/serve.service\n",
            f"{SYS}/system.slice/serve.service/cpu.max": "400000 100000\n",
        },
        4.0,
    ),
    "version 2, the group above is tighter": (
        {
            "proc/self/cgroup": "0::/pods/pod/box\n",
            f"{SYS}/pods/pod/box/cpu.max": "max 100000\n",
            f"{SYS}/pods/pod/cpu.max": "200000 100000\n",
            f"{SYS}/pods/cpu.max": "6400000 100000\n",
        },
        2.0,
    ),
    "version 1, in a container": (
        {
            "proc/self/cgroup": "5:memory:/docker/ab\n4:cpu,cpuacct:/docker/ab\n",
            f"{SYS}/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
            f"{SYS}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        2.5,
    ),
    "version 1, on the host": (
        {
            "proc/self/cgroup": "2:cpuacct:/\n1:cpu:/a/b\n",
            f"{SYS}/cpu/cpu.cfs_quota_us": "-1\n",
            f"{SYS}/cpu/cpu.cfs_period_us": "100000\n",
            f"{SYS}/cpu/a/b/cpu.cfs_quota_us": "50000\n",
            f"{SYS}/cpu/a/b/cpu.cfs_period_us": "50000\n",
        },
        1.0,
    ),
    "version 1, without a limit": (
        {
            "proc/self/cgroup": "1:cpu:/\n0::/\n",
            f"{SYS}/cpu/cpu.cfs_quota_us": "-1\n",
            f"{SYS}/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "both, the limit in version 1": (
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/\n0::/box\n",
            f"{SYS}/cpu,cpuacct/cpu.cfs_quota_us": "300000",
            f"{SYS}/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
        3.0,
    ),
    "a group named outside of what is mounted": (
        {"proc/self/cgroup": "0::/../../elsewhere\n", f"{SYS}/cpu.max": "100000 100000"},
        1.0,
    ),
    "nonsense": (
        {"proc/self/cgroup": "what\n0::/\n::\n", f"{SYS}/cpu.max": "9 0\n"},
        None,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_quotas(name: str, tmp_path: Path) -> None:
    files, expected = CASES[name]
    assert cpu_quota(tree(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [(8, None, 8), (8, 2.0, 2), (8, 2.9, 2), (8, 0.5, 1), (2, 16.0, 2), (1, 1.0, 1)],
)
def test_threads_are_those_that_can_compute_all_the_time(
    affinity: int, quota: float | None, usable: int
) -> None:
    assert Cores(affinity, quota).usable == usable


def test_what_is_found_is_said(tmp_path: Path) -> None:
    files, _ = CASES["version 2, in a container"]
    found = find_cores(tree(tmp_path, files))
    assert found == Cores(len(os.sched_getaffinity(0)), 1.5)
    assert "1 usable" in str(found)
    assert "a CPU quota of 1.5" in str(found)
    assert "no CPU quota" in str(Cores(4, None))
