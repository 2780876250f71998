"""What a GPU offers, and whether the kernels run on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

#: (name, what was found, whether the runner "cuda" cannot work)
Finding = tuple[str, str, bool]

#: Ampere; before it tensor cores know no bfloat16.
_LEAST_CAPABILITY = (8, 0)


def look(device: torch.device, driver: Path = Path("/proc/driver/nvidia/version")) -> list[Finding]:
    """What there is to say of a device; little of a CPU.

    Args:
        device: that the server would use.
        driver: where Linux tells the driver's version.
    """
    version = _driver_version(driver)
    if device.type != "cuda":
        if version is None:
            return []
        built = torch.version.cuda
        why = f"built for CUDA {built}" if built else "a build for CPUs"
        return [("GPU", f"driver {version} is there, but torch ({why}) is not to use it", False)]
    return list(_look_at_gpu(device, version))


def _look_at_gpu(device: torch.device, version: str | None) -> Iterator[Finding]:
    found = torch.cuda.get_device_properties(device)
    capability = found.major, found.minor
    yield (
        "GPU driver",
        f"{version or 'unknown'}; torch is built for CUDA {torch.version.cuda}",
        False,
    )
    weak = capability < _LEAST_CAPABILITY
    limit = "" if not weak else f": bfloat16 wants {'.'.join(map(str, _LEAST_CAPABILITY))}"
    yield "GPU", f"{found.name}, compute capability {found.major}.{found.minor}{limit}", weak
    free, total = torch.cuda.mem_get_info(device)
    yield "GPU memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free", False
    yield kernels(device)


def kernels(device: torch.device) -> Finding:
    """Compiles the smallest of the kernels and compares what it says."""
    if importlib.util.find_spec("triton") is None:
        return "GPU kernels", "Triton is not installed: pip install 'specserve[gpu]'", True
    try:
        from engine.model.cuda.kernels.rows import silu_gate

        gate_up = torch.linspace(-3, 3, 64, device=device).view(2, 32)
        out = torch.empty(2, 16, device=device)
        silu_gate(gate_up, out)
        gate, up = gate_up[:, :16], gate_up[:, 16:]
        error = float((out - torch.nn.functional.silu(gate) * up).abs().max())
    except Exception as error_:  # a compiler has many ways to fail
        return "GPU kernels", f"do not compile: {type(error_).__name__}: {error_}", True
    if error > 1e-5:
        return "GPU kernels", f"compute something else, by {error:.2g}", True
    return "GPU kernels", "compiled, and right", False


def _driver_version(place: Path) -> str | None:
    """From "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  ..."."""
    try:
        words = place.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), "of no version")
