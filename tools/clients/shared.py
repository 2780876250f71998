"""What all frameworks are asked: forms so narrow that any model fills them, and tools to call."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from pydantic import BaseModel, Field

#: Answers in words are cut off here.
FEW = 12

QUESTION = "What will the weather be in Rome, and for how many days?"


class Weather(BaseModel):
    """A forecast for some days."""

    place: Literal["Rome", "Oslo", "Lima"]
    days: int = Field(ge=1, le=7)
    dry: bool


class Verdict(BaseModel):
    """What to wear."""

    wear: Literal["a coat", "a shirt"]


SYSTEM = "You are terse."
#: `Weather` as a plain schema, for those who send one.
SCHEMA: dict[str, Any] = {**Weather.model_json_schema(), "additionalProperties": False}


@dataclass(frozen=True)
class Server:
    """Where the server is.

    Args:
        url: with /v1.
        model: what it calls its model.
    """

    url: str
    model: str


Case = Callable[[Server], None]
CASES: list[tuple[str, str, Case]] = []


def case(package: str, what: str) -> Callable[[Case], Case]:
    """Adds a case to the table.

    Args:
        package: its name in the package index.
        what: what is run.
    """

    def add(run: Case) -> Case:
        CASES.append((package, what, run))
        return run

    return add


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    package: str
    version: str
    what: str
    fault: str
    seconds: float

    def row(self) -> str:
        """As Markdown."""
        outcome = self.fault or "passes"
        return (
            f"| {self.package} | {self.version} | {self.what} | {outcome} | {self.seconds:.1f} s |"
        )


def run_case(package: str, what: str, run: Case, server: Server) -> Result:
    """Runs a case; whatever it raises is its fault."""
    started, fault = time.perf_counter(), ""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Result(package, "-", what, "not installed", 0.0)
    try:
        run(server)
    except Exception as error:  # whatever a framework makes of an answer
        traceback.print_exc()
        fault = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Result(package, version, what, fault, time.perf_counter() - started)
