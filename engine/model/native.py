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

_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=fast", "-w")
_KERNELS = Path(__file__).parent / "kernels" / "kernels.cpp"


#: As `TileUnit` in kernels/tiles.h counts them.
_TILE_UNITS = (
    "no tile unit (AMX) on this CPU",
    "a tile unit (AMX) that the operating system does not grant",
    "a tile unit (AMX)",
    "an emulated tile unit",
)

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


def load_kernels(instructions: str = "native", emulate_tiles: bool = False) -> ctypes.CDLL:
    """The kernels of `engine.model.kernels`.

    Args:
        instructions: what to compile for, as in the compiler's `-march`; the CPU must have it.
        emulate_tiles: computes bfloat16 layers as a CPU with AMX does, by plain code.

    Raises:
        NativeUnavailable: they cannot be compiled or loaded.
    """
    definitions = ("-DSPECSERVE_EMULATE_TILES",) if emulate_tiles else ()
    return compile_library(_KERNELS, instructions, definitions)


def tile_unit(library: ctypes.CDLL) -> str:
    """What multiplies bfloat16 tiles in these kernels, in words."""
    return _TILE_UNITS[library.specserve_tile_unit()]


def build_kernels(instructions: str, flags: tuple[str, ...] = ()) -> Path:
    """The file of the kernels, compiled for any instruction set; it need not run here.

    Args:
        instructions: what to compile for.
        flags: further ones, such as a lower level of optimisation, which is quicker.

    Raises:
        NativeUnavailable: they cannot be compiled.
    """
    return _compiled(_KERNELS, instructions, flags)


def compile_library(
    source: Path, instructions: str = "native", definitions: tuple[str, ...] = ()
) -> ctypes.CDLL:
    """Compiles one C++ file into a shared library, unless that was done before, and loads it.

    Args:
        source: the file.
        instructions: what to compile for.
        definitions: further flags for the compiler.

    Raises:
        NativeUnavailable: it cannot be compiled or loaded.
    """
    library = _compiled(source, instructions, definitions)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeUnavailable(f"{library} cannot be loaded: {error}") from error


def _compiled(source: Path, instructions: str, definitions: tuple[str, ...] = ()) -> Path:
    """The library in the cache, made if it is not there.

    Its name covers source, headers beside it, flags, torch and this machine's CPU flags, since
    `-march=native` code may not run elsewhere; then the compiler; then the library's own content:
    a damaged one, which could end the process, is compiled anew. Where there is no compiler any
    more, what any compiler made before is used.
    """
    flags = (*_FLAGS, *definitions, f"-march={instructions}")
    compiler = find_compiler()
    maker = "*" if compiler is None else _hash(_run([compiler, "--version"]))
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = _hash(*texts, " ".join(flags), torch.__version__, _cpu_flags())
    directory, stem = cache_directory() / "native", f"{source.stem}-{key}-{maker}"
    library = _find(directory, stem)
    if library is not None:
        return library
    if compiler is None:
        raise NativeUnavailable("no C++ compiler found (set CXX, or install g++)")
    return _make(directory, stem, [compiler, *flags], source)


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


def _make(directory: Path, stem: str, command: list[str], source: Path) -> Path:
    """Compiles into the cache, unless another process did so meanwhile."""
    from filelock import FileLock

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / ".lock"):
            for left in directory.glob(f"{MAKING}*"):  # of a process that ended meanwhile
                shutil.rmtree(left, ignore_errors=True)
            return _find(directory, stem) or _build(directory, stem, command, source)
    except OSError as error:
        raise NativeUnavailable(f"{directory} cannot be written: {error}") from error


def _build(directory: Path, stem: str, command: list[str], source: Path) -> Path:
    logger.info("compiling %s with %s", source.name, command[0])
    with tempfile.TemporaryDirectory(dir=directory, prefix=MAKING) as work:
        objects, library = Path(work, "kernel.o"), Path(work, "kernel.so")
        _run([*command, "-c", str(source), "-o", str(objects)])
        _run([command[0], "-shared", str(objects), *_openmp(), "-o", str(library)])
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
