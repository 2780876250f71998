"""Compiling on the machine it runs on: once, and with a reason where it cannot be."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.errors import ConfigurationError
from engine.model import native
from engine.model.files import sha256
from engine.model.loader import adopt_model
from engine.model.native import (
    NativeUnavailable,
    check_layouts,
    compile_library,
    fields,
    find_compiler,
    load_kernels,
)
from tests.tiny_models import make_model

SOURCE = 'extern "C" int answer() { return ANSWER; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of one function; its answer is defined in a header beside it."""
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "home"))
    (tmp_path / "answer.h").write_text("#define ANSWER 42\n")
    path = tmp_path / "lib.cpp"
    path.write_text('#include "answer.h"\n' + SOURCE)
    return path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that compile, as they are run."""
    commands: list[list[str]] = []
    real = native._run

    def spy(command: list[str]) -> str:
        if "-c" in command:
            commands.append(command)
        return real(command)

    monkeypatch.setattr(native, "_run", spy)
    return commands


def libraries(source: Path) -> list[Path]:
    return list((source.parent / "home" / "native").glob("*.so"))


def truncate(path: Path) -> None:
    """As a power cut may leave it: loading it would end the process with SIGBUS."""
    os.truncate(path, path.stat().st_size // 2)


def change_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE: list[Callable[[Path], None]] = [
    truncate, change_a_byte, lambda path: path.write_bytes(b""),
]  # fmt: skip


def test_compiles_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compilations(monkeypatch)
    for _ in range(2):
        assert compile_library(source).answer() == 42
    assert len(commands) == 1
    assert len(libraries(source)) == 1
    assert not list((source.parent / "home" / "native").glob(".making-*"))  # no leftovers


def test_a_changed_header_is_compiled_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compilations(monkeypatch)
    assert compile_library(source).answer() == 42
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    assert compile_library(source).answer() == 43
    (source.parent / "answer.h").write_text("#define ANSWER 42\n")
    assert compile_library(source).answer() == 42
    assert len(commands) == 2


def test_another_machine_compiles_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compilations(monkeypatch)
    compile_library(source)
    monkeypatch.setattr(native, "_cpu_flags", lambda: "flags : other")
    compile_library(source)
    assert len(commands) == 2


def test_a_source_that_does_not_compile(source: Path) -> None:
    source.write_text("this is no C++")
    with pytest.raises(NativeUnavailable, match=r"failed: .*error"):
        compile_library(source)
    assert not list((source.parent / "home" / "native").glob("*.so"))


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_compiled_anew(
    source: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    commands = compilations(monkeypatch)
    compile_library(source)
    [library] = libraries(source)
    intact = library.read_bytes()
    copy = library.with_name("copy")  # the process has the old one mapped
    copy.write_bytes(intact)
    copy.replace(library)
    damage(library)
    assert compile_library(source).answer() == 42
    assert len(commands) == 2
    [library] = libraries(source)
    assert sha256(library)[:24] in library.name


def test_a_library_that_cannot_be_loaded_is_named(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = native._run

    def run(command: list[str]) -> str:
        if "-shared" in command:
            Path(command[-1]).write_bytes(b"not a library")
            return ""
        return real(command)

    monkeypatch.setattr(native, "_run", run)
    with pytest.raises(NativeUnavailable, match=r"\.so cannot be loaded"):
        compile_library(source)


def test_what_a_killed_compilation_left_is_removed(source: Path) -> None:
    left = source.parent / "home" / "native" / ".making-killed"
    left.mkdir(parents=True)
    (left / "kernel.o").write_bytes(b"x" * 1000)
    compile_library(source)
    assert not left.exists()


def test_a_full_disk_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(native, "place", full)
        with pytest.raises(NativeUnavailable, match="No space left"):
            compile_library(source)
    left = [path.name for path in (source.parent / "home" / "native").iterdir()]
    assert left in ([], [".lock"])
    assert compile_library(source).answer() == 42


def test_a_cache_that_cannot_be_written(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source.parent / "file").write_text("")
    monkeypatch.setenv("SPECSERVE_HOME", str(source.parent / "file"))
    with pytest.raises(NativeUnavailable, match="cannot be written"):
        compile_library(source)


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler(source: Path) -> None:
    assert find_compiler() is None
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler found \(set CXX"):
        compile_library(source)


def test_what_was_compiled_is_used_where_the_compiler_has_gone(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_library(source)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() is None
    assert compile_library(source).answer() == 42
    monkeypatch.setattr(native, "_cpu_flags", lambda: "flags : other")  # but not elsewhere
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
        compile_library(source)


def test_a_damaged_library_is_not_used_without_a_compiler_either(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compile_library(source)
    [library] = libraries(source)
    library.unlink()
    library.write_bytes(b"")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler"):
        compile_library(source)


@pytest.mark.usefixtures("no_compiler")
def test_a_model_without_a_compiler_runs_on_the_reference(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "empty"))
    with caplog.at_level(logging.INFO):
        assert adopt_model(make_model(), ModelConfig("tiny")).runner_name == "reference"
    assert "the native runner does not apply: no C++ compiler" in caplog.text
    assert "attention falls back to slow torch code: no C++ compiler" in caplog.text
    for runner in ("native", "torch"):
        with pytest.raises(ConfigurationError, match=rf"runner is {runner}, but no C\+\+ compiler"):
            adopt_model(make_model(), ModelConfig("tiny", runner=runner))


def test_the_compiler_of_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("#!/bin/sh\nexit 1\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", str(mine))
    assert find_compiler() == str(mine)
    with pytest.raises(NativeUnavailable, match="mine failed"):
        load_kernels()


def test_a_structure_that_python_mirrors_otherwise_is_named() -> None:
    short = type("_Linear", (ctypes.Structure,), {"_fields_": fields(ctypes.c_void_p, "packed")})
    with pytest.raises(RuntimeError, match=r"_Linear has 8 bytes, but Linear .* is 32 bytes"):
        check_layouts(load_kernels(), short)
    other = type("_Unheard", (ctypes.Structure,), {"_fields_": []})
    with pytest.raises(RuntimeError, match="Unheard in the kernels is unknown"):
        check_layouts(load_kernels(), other)
