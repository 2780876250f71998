"""What is said of a GPU, and of a machine without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("engine.model.cuda.kernels")

from engine.model.cuda import machine
from engine.model.cuda.kernels import rows

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:16:29 UTC 2025\n"
CPU = torch.device("cpu")


def test_a_machine_without_a_gpu_has_nothing_to_say(tmp_path: Path) -> None:
    assert machine.look(CPU, tmp_path / "missing") == []


def test_a_driver_that_torch_does_not_use_is_told(tmp_path: Path) -> None:
    (tmp_path / "version").write_text(DRIVER)
    ((name, found, bad),) = machine.look(CPU, tmp_path / "version")
    assert name == "GPU"
    assert "driver 580.65.06 is there, but torch" in found
    assert not bad


def test_kernels_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert machine.kernels(device) == ("GPU kernels", "compiled, and right", False)
    monkeypatch.setattr(rows, "silu_gate", lambda _gate_up, out: out.zero_())
    assert machine.kernels(device)[2]

    def fail(*_: torch.Tensor) -> None:
        raise RuntimeError("no ptxas")

    monkeypatch.setattr(rows, "silu_gate", fail)
    assert machine.kernels(device)[1] == "do not compile: RuntimeError: no ptxas"


class _Old:
    name, major, minor, total_memory = "Tesla T4", 7, 5, 16 << 30


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Old)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 << 30, 16 << 30))
    monkeypatch.setattr(machine, "kernels", lambda _: ("GPU kernels", "", False))
    (tmp_path / "version").write_text(DRIVER)
    found = machine.look(torch.device("cuda"), tmp_path / "version")
    assert [name for name, _, bad in found if bad] == ["GPU"]
    assert "compute capability 7.5: bfloat16 wants 8.0" in found[1][1]
    assert found[2][1] == "8.0 of 16.0 GiB free"
    assert "580.65.06" in found[0][1]
