"""Files of the cache: whole or absent when written, checked when read.

What is written goes to a temporary name first, reaches the disk, and is then renamed. So neither
a full disk nor the end of the process or of the power leaves half a file under its own name; and
what was damaged later is noticed, so that whoever made it can make it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from pathlib import Path

#: Temporary names begin so; what bears one for long was left behind by a process that ended.
MAKING = ".making-"

#: What a GGUF file is called in a model's directory, where it takes the place of safetensors.
WEIGHTS_FILE = "model.gguf"

_SEAL = ".seal.json"
_STALE_SECONDS = 3600.0
#: Files up to this size are read whole when they are checked; of larger ones, which are weights,
#: only the two ends: reading them all would take longer than the start.
_WHOLE_BYTES = 64 << 20
_EDGE_BYTES = 1 << 20


def sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_sealed(path: Path, text: str) -> None:
    """Keeps a short text with its checksum, for `read_sealed`.

    Raises:
        OSError: it cannot be written; nothing of it is left.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(path.parent)
    part = path.parent / f"{MAKING}{secrets.token_hex(8)}"
    try:
        part.write_bytes(text.encode() + b"\n" + _checksum(text).encode())
        place(part, path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def read_sealed(path: Path) -> str | None:
    """What `write_sealed` kept; None if there is nothing, or it is damaged."""
    try:
        text, _, checksum = path.read_bytes().decode().rpartition("\n")
    except (OSError, ValueError):
        return None
    return text if checksum == _checksum(text) else None


def place(part: Path, target: Path) -> None:
    """Renames a finished file or directory once all of it is on the disk."""
    for path in (*part.rglob("*"), part):
        _sync(path)
    part.replace(target)
    _sync(target.parent)


def seal(directory: Path) -> None:
    """Notes sizes and checksums of a directory's files, for `is_whole`."""
    (directory / _SEAL).write_text(json.dumps(_contents(directory)), encoding="utf-8")


def is_whole(directory: Path) -> bool:
    """Whether a directory holds what it held when it was sealed; one that never was is taken as
    it is, and sealed."""
    try:
        noted = json.loads((directory / _SEAL).read_text(encoding="utf-8"))
        return bool(noted == _contents(directory))
    except FileNotFoundError:
        if not directory.is_dir():
            return False
        with contextlib.suppress(OSError):
            seal(directory)
        return True
    except (OSError, ValueError):
        return False


def _contents(directory: Path) -> dict[str, list[object]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): [path.stat().st_size, _digest(path)]
        for path in files
        if path.name != _SEAL
    }


def _digest(path: Path) -> str:
    if (size := path.stat().st_size) <= _WHOLE_BYTES:
        return sha256(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_EDGE_BYTES))
        file.seek(size - _EDGE_BYTES)
        digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(directory: Path) -> None:
    """Removes temporary files of processes that ended while they wrote."""
    with contextlib.suppress(OSError):
        for path in directory.glob(f"{MAKING}*"):
            if path.is_file() and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink(missing_ok=True)
