"""Compiles the C++ kernels on the machine they run on, once, and caches the result."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from engine.model.paths import cache_directory

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-w")
_KERNELS = Path(__file__).parent / "kernels" / "kernels.cpp"


class NativeUnavailable(RuntimeError):
    """No C++ compiler, or it failed; the message says which. Slower torch code does the work."""


def find_compiler() -> str | None:
    """The C++ compiler to use: $CXX, else the first of g++, clang++ and c++ on the PATH."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def fields(kind: type, names: str) -> list[tuple[str, type]]:
    """Fields of a `ctypes.Structure`: all of one kind, names separated by blanks."""
    return [(name, kind) for name in names.split()]


def check_layouts(library: ctypes.CDLL, *structures: type[ctypes.Structure]) -> None:
    """Compares the sizes of structures that Python mirrors with those that C++ compiled.

    Args:
        library: the kernels.
        structures: each is called as its counterpart, with a leading underscore.

    Raises:
        RuntimeError: one differs, so that the kernels would read other numbers than were meant.
    """
    size_of = library.specserve_size_of
    size_of.argtypes, size_of.restype = [ctypes.c_char_p], ctypes.c_int64
    for structure in structures:
        name = structure.__name__.lstrip("_")
        theirs, ours = size_of(name.encode()), ctypes.sizeof(structure)
        if theirs != ours:
            known = f"{theirs} bytes" if theirs >= 0 else "unknown"
            raise RuntimeError(
                f"{structure.__module__}.{structure.__name__} has {ours} bytes, but {name} in the "
                f"kernels is {known}; change both together."
            )


def load_kernels(instructions: str = "native") -> ctypes.CDLL:
    """The kernels of `engine.model.kernels`.

    Args:
        instructions: what to compile for, as in the compiler's `-march`; the CPU must have it.

    Raises:
        NativeUnavailable: they cannot be compiled or loaded.
    """
    return compile_library(_KERNELS, instructions)


def build_kernels(instructions: str) -> Path:
    """The file of the kernels, compiled for any instruction set; it need not run here.

    Raises:
        NativeUnavailable: they cannot be compiled.
    """
    return _compiled(_KERNELS, instructions)


def compile_library(source: Path, instructions: str = "native") -> ctypes.CDLL:
    """Compiles one C++ file into a shared library, unless that was done before, and loads it.

    Raises:
        NativeUnavailable: it cannot be compiled or loaded.
    """
    target = _compiled(source, instructions)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeUnavailable(f"{target} cannot be loaded: {error}") from error


def _compiled(source: Path, instructions: str) -> Path:
    """The library in the cache, made if it is not there.

    The cache key covers source, headers beside it, flags, compiler, torch and this machine's
    CPU flags, since `-march=native` code may not run elsewhere.
    """
    flags = (*_FLAGS, f"-march={instructions}")
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable("no C++ compiler found (set CXX, or install g++)")
    version = _run([compiler, "--version"])
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    parts = (*texts, " ".join(flags), version, torch.__version__, _cpu_flags())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    target = cache_directory() / "native" / f"{source.stem}-{key}.so"
    if not target.exists():
        logger.info("compiling %s with %s", source.name, compiler)
        _build([compiler, *flags], source, target)
    return target


def _build(command: list[str], source: Path, target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as directory:
            objects, library = Path(directory, "kernel.o"), Path(directory, "kernel.so")
            _run([*command, "-c", str(source), "-o", str(objects)])
            _run([command[0], "-shared", str(objects), *_openmp(), "-o", str(library)])
            library.replace(target)  # atomic: a second process sees all of it or nothing
    except OSError as error:
        raise NativeUnavailable(f"{target.parent} cannot be written: {error}") from error


def _openmp() -> list[str]:
    """Links the OpenMP runtime that torch carries, so that both share one pool of threads."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return [str(bundled[0])] if bundled else ["-fopenmp"]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    except subprocess.CalledProcessError as error:
        raise NativeUnavailable(f"{command[0]} failed: {error.stderr.strip()[:500]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} cannot be run: {error}") from error
    return done.stdout


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
