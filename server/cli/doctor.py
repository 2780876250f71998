"""`specserve doctor`: what this machine offers, and whether the settings fit it."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.config import NO_DRAFTER, EngineConfig
from engine.draft import registry
from engine.draft.entry import OwnModel
from engine.errors import EngineError
from server.cli.settings import Settings
from server.version import version

_PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "pydantic")
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16")

#: (name, what was found, whether it stops the server)
Finding = tuple[str, str, bool]


def doctor(settings: Settings, say: Callable[[str], None] = print) -> int:
    """Prints what was found; fetches nothing.

    Returns:
        0, or 1 if the server cannot start with these settings on this machine.
    """
    failed = False
    for check in (_software, _machine, _kernels, _model, _numerics):
        for name, found, bad in check(settings):
            say(f"{'FAIL' if bad else 'ok':<6}{name:<20}{found}")
            failed |= bad
    say("something must be mended before the server can start" if failed else "ready to serve")
    return int(failed)


def _software(_: Settings) -> Iterator[Finding]:
    yield "specserve", version(), False
    yield "Python", platform.python_version(), False
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name), False
        except metadata.PackageNotFoundError:
            yield name, "not installed", True


def _machine(settings: Settings) -> Iterator[Finding]:
    choices, memory = _engine("choices"), _engine("memory")
    try:
        device = choices.choose_device(settings.device)
        dtype = str(choices.choose_dtype(settings.dtype, device)).removeprefix("torch.")
    except EngineError as error:
        yield "device", str(error), True
        return
    native = "yes" if _engine("linear").has_native_bfloat16() else "no"
    yield "device", f"{device} ({platform.machine()})", False
    for name, found, bad in _engine("cuda.machine").look(device):
        yield name, found, bad and settings.runner == "cuda"
    yield "dtype", f"{dtype} (bfloat16 native to the CPU: {native})", False
    cores = _engine("cores").find_cores()
    yield "cores", str(cores), False
    threads, waiting = _engine("threads").try_out(settings.threads or cores.usable)
    found = "not known" if waiting is None else f"{waiting:.1f} of them at a time"
    yield "compute threads", f"{threads} just now; without a core: {found}", False
    yield "free memory", f"{memory.available_memory(device) / 2**30:.1f} GiB on {device}", False
    flags = _cpu_flags()
    have = [feature for feature in _CPU_FEATURES if feature in flags]
    yield "CPU features", ", ".join(have) or "none of those that kernels use", False


def _kernels(settings: Settings) -> Iterator[Finding]:
    compiler = _engine("native").find_compiler()
    yield "C++ compiler", compiler or "none: falls back to slow torch code", False
    needed = settings.runner in ("native", "torch")
    try:
        _engine("attention.cpu").CpuAttention()
    except RuntimeError as error:
        yield "kernels", str(error), needed
    else:
        unit = _engine("native").tile_unit(_engine("native").load_kernels())
        yield "kernels", f"compiled for this CPU; bfloat16 with {unit}", False
    directory = _engine("paths").cache_directory()
    writable = _can_write(directory)
    yield "cache", f"{directory}{'' if writable else ' cannot be written'}", not writable


def _model(settings: Settings) -> Iterator[Finding]:
    from engine.model import sources

    try:
        directory = sources.cached(settings.model)
        if directory is None:
            yield "model", f"{settings.model}: not here yet; `specserve pull` fetches it", False
        else:
            yield "model", f"{settings.model} in {directory}", False
            plan = _memory_plan(settings.engine_config(str(directory)), directory)
            yield "memory plan", plan, False
    except EngineError as error:
        yield "model", str(error), True
        return
    yield from _drafter(settings, directory)


def _numerics(settings: Settings) -> Iterator[Finding]:
    """Whether a row's logits depend on who shares its pass; loads the model if it is here."""
    from engine.model import sources

    try:
        directory = sources.cached(settings.model)
    except EngineError:
        return  # that has been said
    if directory is None:
        yield "numerics", "known once the model is here", False
        return
    try:
        config = settings.engine_config(str(directory)).model
        loaded, invariance = _engine("selftest").check_model(directory, config)
        kept = str(loaded.shape.dtype).removeprefix("torch.")
        size = loaded.shape.bytes_per_token
        yield "weights", str(loaded.weights), False
        yield "keys and values", f"{kept}, {size / 2**10:.1f} KiB a token", False
        yield "model check", loaded.checked, False
        yield "numerics", str(invariance), False
    except EngineError as error:
        yield "numerics", str(error), True


def _drafter(settings: Settings, directory: Path | None) -> Iterator[Finding]:
    """Whether the drafters fit the model."""
    try:
        speculation = settings.engine_config(str(directory)).speculation
    except EngineError as error:
        yield "drafter", str(error), True
        return
    for name in registry.default_drafters(speculation):
        if name == NO_DRAFTER:
            yield "drafter", f"{name}: nobody drafts", False
            continue
        entry = registry.get(name)
        if entry.model is None:
            yield "drafter", f"{name}: {entry.summary}", False
            continue
        own = entry.model.config(speculation)
        if own is None:
            yield "drafter", f"{name}, but no {entry.model.setting} is named", True
            continue
        yield _fit(f"{name}: {entry.summary}", entry.model, own.path, directory)


def _fit(what: str, model: OwnModel, path: str, directory: Path | None) -> Finding:
    """Whether the model that a drafter runs fits the target in a directory."""
    from engine.model import sources

    if model.setting == "draft_head":  # a head has no tokenizer, and what is not here stays away
        draft = Path(path) if Path(path).is_dir() else None
    else:
        draft = sources.cached(path)
    if directory is None or draft is None:
        return "drafter", f"{path}: known once both models are here", False
    try:
        model.check(directory, draft)
    except EngineError as error:
        return "drafter", str(error), True
    return "drafter", f"{what}: {path} fits", False


def _memory_plan(config: EngineConfig, directory: Path) -> str:
    files = [*directory.glob("*.safetensors")] or [*directory.glob("*.gguf")]
    size = sum(file.stat().st_size for file in files)
    wish = config.cache.memory_bytes
    cache = (
        f"{wish / 2**30:.1f} GiB" if wish else f"{config.cache.memory_share:.0%} of what is left"
    )
    return f"weights {size / 2**30:.2f} GiB on disk, KV cache {cache}"


def _engine(name: str) -> Any:
    """A module below engine.model: only here, and only when asked, does the server look inside."""
    return importlib.import_module(f"engine.model.{name}")


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.split())


def _can_write(directory: Path) -> bool:
    while not directory.exists():
        directory = directory.parent
    return os.access(directory, os.W_OK | os.X_OK)
