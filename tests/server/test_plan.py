"""`specserve plan`."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from engine.errors import InvalidRequest
from server.cli.plan import add_arguments, run


def plan(*flags: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    lines: list[str] = []
    assert run(parser.parse_args(flags), lines.append) == 0
    return lines


def test_a_table_by_batch_size() -> None:
    lines = plan("--acceptance", "0.7", "--draft-cost", "0.05", "--batch", "8,16,32,48,64")
    rows = [(int(a), int(b), float(d)) for a, b, _, d in map(str.split, lines[1:-1])]
    assert rows == [(8, 6, 2.35), (16, 3, 2.2), (32, 1, 1.62), (48, 1, 1.1), (64, 0, 1.0)]
    assert lines[-1] == "Speculation stops paying beyond 52 decoding sequences."


def test_the_knee_is_the_machine() -> None:
    assert "beyond 3 " in plan("--acceptance", "0.7", "--knee", "4")[-1]
    assert "at no batch size" in plan("--acceptance", "0.1", "--draft-cost", "0.5")[-1]
    assert "at every batch size" in plan("--acceptance", "0.9", "--knee", "100000")[-1]


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (("--acceptance", "1.5"), "acceptance"),
        (("--acceptance", "nan"), "acceptance"),
        (("--acceptance", "0.5", "--draft-cost", "-1"), "draft-cost"),
        (("--acceptance", "0.5", "--knee", "0"), "knee"),
        (("--acceptance", "0.5", "--batch", "1,x"), "batch"),
        (("--acceptance", "0.5", "--batch", "0"), "batch"),
        (("--acceptance", "0.5", "--batch", ""), "batch"),
    ],
)
def test_what_is_wrong_is_named(flags: tuple[str, ...], name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"--{name} is") as caught:
        plan(*flags)
    assert caught.value.param == name


def test_it_needs_no_torch() -> None:
    code = "import sys, server.cli.plan; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
