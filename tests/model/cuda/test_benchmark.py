"""The measurements on a GPU: all of their ways, on tiny shapes, where there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("engine.model.cuda.kernels")

from benchmarks import gpu


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([]) == 2
    assert "There is no CUDA device here" in capsys.readouterr().err


def test_a_dry_run_walks_through_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "gpu.md").write_text(f"# Written by hand\n\n{gpu.MARK}\n\nold figures\n")
    assert gpu.main(["--dry-run", "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert len(found["steps"]) == 2 * len(gpu.TINY_CASES)
    assert all(step["ms"] > 0 and step["floors"] > 0 for step in found["steps"])
    assert all(one["equal"] for one in found["gains"])
    assert "1 passed" in found["tests"]["said"]
    page = (tmp_path / "gpu.md").read_text()
    assert page.startswith("# Written by hand")
    assert "old figures" not in page
    assert "| tiny | 2 x 2, 20 |" in page


def test_what_fails_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_dry: bool) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu, "_steps", fail)
    monkeypatch.setattr(gpu, "_gains", lambda _dry: [])
    monkeypatch.setattr(gpu, "_tests", lambda _dry: {"said": "3 passed"})
    assert gpu.main(["--dry-run", "--output", str(tmp_path)]) == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "steps failed: RuntimeError: no such kernel" in page
    assert "3 passed" in page
