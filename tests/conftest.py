"""What every test runs under: marks, one thread, and workers that do not get into each other's
way. `CONTRIBUTING.md` says how the parts of the suite are run."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from filelock import FileLock

from tests import costs
from tests.marking import SLOW_MARKS, is_slow, marks_of
from tests.workers import Turns, printable

# Imports make millions of objects that stay; looking through them again and again for garbage
# takes a fifth of the time of collecting the tests, and much of every later collection.
gc.disable()

# How fast examples are made is no claim of any test, and differs from machine to machine.
# Examples are the same in every run: what fails fails for everybody, and what passes stays so.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")

# Without a GPU its kernels are interpreted; Triton asks once, and others may import it first.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_TURNS = pytest.StashKey[Turns]()
_BEGUN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out what starts processes, loads the real model, simulates, or takes long; "
        "such files are not even imported",
    )


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        place = Path(tempfile.gettempdir(), f"specserve-tests-{worker['testrunuid']}")
        config.stash[_TURNS] = Turns(place)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _TURNS in config.stash:
        config.stash[_TURNS].close()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--quick") or not collection_path.match("test_*.py"):
        return None
    return True if marks_of(collection_path) & SLOW_MARKS else None


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for mark in marks_of(item.path):
            item.add_marker(mark)
        if is_slow(item.path, getattr(item, "originalname", item.name)):
            item.add_marker("slow")
    if config.getoption("--quick"):
        slow = {item for item in items if any(m.name in SLOW_MARKS for m in item.iter_markers())}
        config.hook.pytest_deselected(items=list(slow))
        items[:] = [item for item in items if item not in slow]


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    _use_one_thread()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around timeouts: waiting is not the test's time
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if _TURNS not in item.config.stash:
        return (yield)
    with item.config.stash[_TURNS].taken(alone=item.get_closest_marker("quiet") is not None):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any], dict[str, Any]]:
    """Reports travel from worker to master as UTF-8, whatever a test has logged."""
    return printable((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGUN] = costs.cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:  # reports carry properties from worker to master
        seconds = costs.cpu_seconds() - item.stash[_BEGUN]
        item.user_properties.append((costs.PROPERTY, round(seconds, 3)))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = [
        (report.nodeid, value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "teardown"
        for name, value in report.user_properties
        if name == costs.PROPERTY
    ]
    if len(found) > 1:
        terminalreporter.section("cost")
        for line in costs.lines_of(found, config.getoption("--quick")):
            terminalreporter.write_line(line)


def _use_one_thread() -> None:
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and lose much where cores are shared. Set before
    each test, since building an engine sets it, too."""
    _use_one_thread()


@pytest.fixture(scope="session", autouse=True)
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compiled once, before workers and the servers of their tests all do so at the same time."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from engine.model.native import NativeUnavailable, load_kernels

        lock = tmp_path_factory.getbasetemp().parent / "kernels.lock"
        with FileLock(lock), contextlib.suppress(NativeUnavailable):
            load_kernels()
