"""How settings are written: sizes with units, lists with commas, addresses, drafters."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from engine.draft import registry

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?", re.IGNORECASE)
_UNITS = {
    prefix + unit: factor**power
    for unit, factor in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate(("", "k", "m", "g", "t"))
}


def parse_size(value: object) -> object:
    """Bytes of "2GiB" (1024s), "500MB" (1000s) or a plain number; anything else is left alone.

    Raises:
        ValueError: it is text, but no size.
    """
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is no size; write a number of bytes, or such as 2GiB or 500MB")
    return int(float(match[1]) * _UNITS[(match[2] or "b").lower()])


def split(value: object) -> object:
    """The parts of a text with commas; anything else is left alone."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than localhost counts as open."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _known_drafter(name: str) -> str:
    if name not in registry.choices():
        raise ValueError(f"choose from {', '.join(registry.choices())}")
    return name


DrafterName = Annotated[str, AfterValidator(_known_drafter)]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]
SizeOrNone = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Words = Annotated[tuple[str, ...], BeforeValidator(split)]
Secrets = Annotated[tuple[SecretStr, ...], BeforeValidator(split)]
