"""What "auto" means for a device, a dtype, weights, and keys and values; and what cannot be had."""

from __future__ import annotations

import torch

from engine.errors import ConfigurationError
from engine.model.linear import has_native_bfloat16
from engine.model.native import NativeUnavailable, load_kernels

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """ "auto" is the first CUDA device if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device is cuda, but torch finds no CUDA device; use cpu.")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is bfloat16 where the device multiplies it natively, else float32."""
    if name == "auto":
        native = torch.cuda.is_bf16_supported() if device.type == "cuda" else has_native_bfloat16()
        name = "bfloat16" if native else "float32"
    if name not in DTYPES:
        raise ConfigurationError(f"dtype is {name!r}; choose one of auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def choose_weights(name: str, device: torch.device, runner: str = "auto") -> str:
    """What weights are kept in: "float", "file", "int8" or "int4"; see `read_model`. Blocks are
    kept where there are kernels for them: unpacking them in every pass would take longer."""
    if name == "auto":
        name = "file" if device.type == "cpu" and runner != "reference" and _kernels() else "float"
    if name in DTYPES:
        return "float"
    if name != "float" and device.type != "cpu":
        raise ConfigurationError(
            f"weights is {name}, but blocks of few bits are multiplied on CPUs only, and the "
            f"device is {device.type}; use bfloat16."
        )
    return name


def _kernels() -> bool:
    try:
        load_kernels()
    except NativeUnavailable:
        return False
    return True


def choose_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What keys and values are kept in; "auto" is the model's dtype."""
    if name == "auto":
        return dtype
    if device.type != "cpu":
        raise ConfigurationError(
            f"kv_dtype is {name}, but keys and values are kept in eight bits on CPUs only, and the "
            f"device is {device.type}; use auto."
        )
    return torch.int8
