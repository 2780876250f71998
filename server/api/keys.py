"""API keys: told apart in constant time, kept only as digests, never shown."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECRET = re.compile(r"[!-~]{16,512}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key that the server accepts.

    Args:
        name: what logs call its holder; never secret.
        digest: SHA-256 of the key itself.
    """

    name: str
    digest: bytes = field(repr=False)

    @property
    def tenant(self) -> str:
        """Separates what this key's holder leaves in caches from everybody else's."""
        return self.digest.hex()


def read_keys(entries: Iterable[str], file: Path | None = None) -> tuple[ApiKey, ...]:
    """Keys from settings and from a file: ``KEY`` or ``NAME:KEY`` each.

    Args:
        entries: as set in the YAML file, the environment or by flag.
        file: one entry a line; empty lines and those that start with # are skipped.

    Raises:
        ConfigurationError: a key is too short or a name is taken; no message holds a key.
    """
    places = [(f"api_keys, entry {number}", entry) for number, entry in enumerate(entries, 1)]
    if file is not None:
        places += _lines(file)
    keys: list[ApiKey] = []
    for place, entry in places:
        key = _parse(entry, place, len(keys) + 1)
        if any(key.name == other.name or key.digest == other.digest for other in keys):
            raise ConfigurationError(f"{place}: the name or the key is there twice.")
        keys.append(key)
    if file is not None and not keys:
        raise ConfigurationError(f"api_key_file {file} holds no key; write one a line.")
    return tuple(keys)


def find_key(keys: Sequence[ApiKey], secret: bytes) -> ApiKey | None:
    """The key that equals `secret`. Takes equally long whichever it is, or none."""
    digest = hashlib.sha256(secret).digest()
    found = None
    for key in keys:
        if secrets.compare_digest(digest, key.digest):
            found = key  # no early exit: the time must not tell which one it was
    return found


def _lines(file: Path) -> list[tuple[str, str]]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"api_key_file {file} cannot be read: {reason}.") from None
    return [
        (f"api_key_file {file}, line {number}", line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]


def _parse(entry: str, place: str, number: int) -> ApiKey:
    name, colon, secret = entry.partition(":")
    if not colon:
        name, secret = f"key-{number}", entry
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{place}: the name before the colon must be 1 to 64 of A-Z, a-z, 0-9, '.', '_', '-'."
        )
    if not _SECRET.fullmatch(secret):
        raise ConfigurationError(
            f"{place}: a key must be 16 to 512 printable ASCII characters without spaces, but "
            f"this one has {len(secret)}; make one with: openssl rand -hex 24"
        )
    return ApiKey(name, hashlib.sha256(secret.encode()).digest())
