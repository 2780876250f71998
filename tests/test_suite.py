"""The suite's own machinery: what is slow is marked, and workers share a machine."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from tests.costs import QUICK_SECONDS, lines_of
from tests.marking import PLACES, QUICK, ROOT, SLOW_TESTS, is_slow, marks_of
from tests.workers import Turns, printable


def test_places_exist() -> None:
    for place in (*PLACES, *QUICK, *SLOW_TESTS):
        assert (ROOT / place).exists(), f"{place} is gone; tests/marking.py names it"
    for file, tests in SLOW_TESTS.items():
        text = (ROOT / file).read_text("utf-8")
        for test in tests:
            assert f"def {test}(" in text, f"{file}::{test} is gone; tests/marking.py names it"


def test_marks_follow_places_and_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.marking.ROOT", tmp_path)
    (tmp_path / "tests" / "end_to_end").mkdir(parents=True)

    def marks(name: str, text: str) -> set[str]:
        path = tmp_path / "tests" / name
        path.write_text(text)
        return set(marks_of(path))

    assert marks("test_a.py", "import os\n\nTEXT = 'import subprocess'\n") == set()
    assert marks("test_b.py", "import os\nimport subprocess\n") == {"process"}
    assert marks("test_c.py", "from tests.server.processes import serving\n") == {"process"}
    assert marks("test_d.py", "from tests.control.simulator import World\n") == {"simulation"}
    assert marks("end_to_end/test_e.py", "") == {"process"}
    assert marks("end_to_end_test.py", "") == set()  # a name that begins like a folder's


def test_every_test_here_has_its_marks(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        marks = {mark.name for mark in item.iter_markers()}
        assert marks_of(item.path) <= marks, item.nodeid
        if is_slow(item.path, item.nodeid.split("::")[-1].split("[")[0]):
            assert "slow" in marks, item.nodeid


def test_who_wants_to_be_alone_waits_for_others_and_keeps_them_out(tmp_path: Path) -> None:
    turns = [Turns(tmp_path / "turns") for _ in range(4)]
    log: list[str] = []
    begin, end = threading.Event(), threading.Event()

    def alone() -> None:
        with turns[2].taken(alone=True):
            log.append("alone")
            begin.set()
            assert end.wait(20)
            log.append("alone no more")

    def late() -> None:
        with turns[3].taken(alone=False):
            log.append("late")

    threads = [threading.Thread(target=alone), threading.Thread(target=late)]
    with turns[0].taken(alone=False):
        with turns[1].taken(alone=False):  # the others share the machine
            threads[0].start()
            assert not begin.wait(0.05)
        assert not begin.wait(0.05)
        log.append("others end")
    assert begin.wait(20)
    threads[1].start()
    threads[1].join(0.05)
    end.set()
    for thread in threads:
        thread.join(20)
    assert log == ["others end", "alone", "alone no more", "late"]
    for each in turns:
        each.close()
    assert list(tmp_path.iterdir()) == []


def test_reports_can_always_be_sent() -> None:
    nasty = {"sections": [("log", "a\ud800é")], "longrepr": {"lines": ["\udfff", None, 1.5]}}
    escaped = {"sections": [("log", "a\\ud800é")], "longrepr": {"lines": ["\\udfff", None, 1.5]}}
    assert printable(nasty) == escaped
    json.dumps(printable(nasty), ensure_ascii=False).encode("utf-8")


def test_what_is_dear_is_told_at_the_end() -> None:
    """By file, dearest first; of quick runs also the tests that are not quick."""
    half = QUICK_SECONDS / 2 + 0.1
    found = [("a.py::x[1]", half), ("a.py::x[2]", half), ("b.py::y", 3.0), ("a.py::z", 0.1)]
    told = lines_of(found, quick=False)
    assert told[0].startswith(f"{2 * half + 3.1:.0f} s of a processor in all")
    assert [line.split()[-1] for line in told[1:]] == ["a.py", "b.py"]
    dear = lines_of(found, quick=True)[len(told) :]
    assert ["a.py::x is not quick" in line for line in dear] == [True]
