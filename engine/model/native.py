"""Compiles the C++ kernels on the machine they run on, once, and caches the result."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from engine.model.files import MAKING, place, sha256
from engine.model.paths import cache_directory

logger = logging.getLogger(__name__)

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-w")


#: Hexadecimal digits of a hash in a file's name.
_HASH = 24


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


def load_kernels() -> ctypes.CDLL:
    """The kernels of `engine.model.kernels`, compiled for this machine.

    Raises:
        NativeUnavailable: they cannot be compiled or loaded.
    """
    return compile_library(Path(__file__).parent / "kernels" / "kernels.cpp")


def compile_library(source: Path) -> ctypes.CDLL:
    """Compiles one C++ file into a shared library, unless that was done before, and loads it.

    The name in the cache covers source, headers beside it, flags, torch and this machine's CPU
    flags, since `-march=native` code may not run elsewhere; then the compiler; then the library's
    own content: a damaged one, which could end the process, is compiled anew. Where there is no
    compiler any more, what any compiler made before is used.

    Raises:
        NativeUnavailable: it cannot be compiled or loaded.
    """
    compiler = find_compiler()
    maker = "*" if compiler is None else _hash(_run([compiler, "--version"]))
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = _hash(*texts, " ".join(_FLAGS), torch.__version__, _cpu_flags())
    directory, stem = cache_directory() / "native", f"{source.stem}-{key}-{maker}"
    library = _find(directory, stem)
    if library is None:
        if compiler is None:
            raise NativeUnavailable("no C++ compiler found (set CXX, or install g++)")
        library = _make(directory, stem, compiler, source)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailable(f"{library} cannot be loaded: {error}") from error


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:_HASH]


def _find(directory: Path, stem: str) -> Path | None:
    """A library whose content is what its name says; damaged ones are removed."""
    for path in sorted(directory.glob(f"{stem}-*.so")):
        with contextlib.suppress(OSError):
            if sha256(path)[:_HASH] == path.stem.rpartition("-")[2]:
                return path
            logger.warning("%s is damaged and not used", path)
            path.unlink()
    return None


def _make(directory: Path, stem: str, compiler: str, source: Path) -> Path:
    """Compiles into the cache, unless another process did so meanwhile."""
    from filelock import FileLock

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lock"):
            for left in directory.glob(f"{MAKING}*"):  # of a process that ended meanwhile
                shutil.rmtree(left, ignore_errors=True)
            return _find(directory, stem) or _build(directory, stem, compiler, source)
    except OSError as error:
        raise NativeUnavailable(f"{directory} cannot be written: {error}") from error


def _build(directory: Path, stem: str, compiler: str, source: Path) -> Path:
    logger.info("compiling %s with %s", source.name, compiler)
    with tempfile.TemporaryDirectory(dir=directory, prefix=MAKING) as work:
        objects, library = Path(work, "kernel.o"), Path(work, "kernel.so")
        _run([compiler, *_FLAGS, "-c", str(source), "-o", str(objects)])
        _run([compiler, "-shared", str(objects), *_openmp(), "-o", str(library)])
        target = directory / f"{stem}-{sha256(library)[:_HASH]}.so"
        place(library, target)
    return target


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
