"""The plan of the house, held by a machine: who may import whom, and how large things may be."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "server", "loadtest", "training")

#: Lowest first. A module imports its own layer's package, or what is in a layer below.
LAYERS = (
    {"engine.errors", "engine.grammar", "engine.model.paths", "engine.tree"},
    {"engine.types", "engine.config", "engine.stats"},
    {"engine.cache", "engine.sampling"},
    {"engine.sequence", "engine.rules", "engine.admission", "engine.flight", "engine.verification"}
    | {"engine.idle"},
    {"engine.laps", "engine.pace"},
    {"engine.budget"},
    {"engine.scheduler", "engine.batch"},
    {"engine.model", "engine.layout"},
    {"engine.draft"},
    {"engine.load", "engine.calibration", "engine.judge", "engine.statistics"}
    | {"engine.step_view"},
    {"engine.control.costs", "engine.sweep", "engine.commit", "engine.move"},
    {"engine.meter"},
    {"engine.control"},
    {"engine.status"},
    {"engine.core", "engine.calibrate"},
    {"engine.audit", "engine.prepare"},
    {"engine.build"},
    {"engine.async_engine", "engine.audit.run"},
    {"server"},
)

#: What the server may know of the engine.
SERVER_MAY = {
    "engine.types",
    "engine.stats",
    "engine.config",
    "engine.errors",
    "engine.grammar",
    "engine.async_engine",
}
#: ... and what single parts of it need besides: modules that are light, or imported on demand.
SERVER_MAY_ALSO = {
    ("server.cli.commands", "engine.model.sources"),
    ("server.cli.doctor", "engine.model.sources"),
    ("server.cli.doctor", "engine.draft"),
    ("server.cli.settings", "engine.draft.registry"),
    ("server.cli.values", "engine.draft.registry"),
    ("server.cli.train", "engine.model.sources"),
    ("server.cli.audit", "engine.audit"),
    ("server.cli.bench", "engine.draft.registry"),
    ("server.terminal.palette", "engine.draft.registry"),
}

#: Who of the server may know the load test, and why.
MAY_LOAD_TEST = {
    ("server.cli.chat", "loadtest.arguments"): "one reader of addresses",
    ("server.cli.bench", "loadtest"): "a bench is a run of it",
    ("server.terminal.link", "loadtest.sse"): "one reader of streams",
}

#: Modules that only move integers; they must work, and be quick to import, without torch.
WITHOUT_TORCH = (
    "engine.admission",
    "engine.budget",
    "engine.cache.pages",
    "engine.config",
    "engine.draft.automaton",
    "engine.draft.drafter",
    "engine.draft.entry",
    "engine.draft.grammar",
    "engine.draft.lookup",
    "engine.draft.portfolio",
    "engine.draft.prediction",
    "engine.draft.registry",
    "engine.draft.tree",
    "engine.errors",
    "engine.grammar",
    "engine.laps",
    "engine.pace",
    "engine.idle",
    "engine.model.paths",
    "engine.model.sources",
    "engine.rules",
    "engine.scheduler",
    "engine.sequence",
    "engine.statistics",
    "engine.stats",
    "engine.step_view",
    "engine.tree",
    "engine.types",
)

MAX_FILE, MAX_FUNCTION, MAX_ARGUMENTS = 300, 50, 6

#: What may be larger, and why.
LARGE_FILES: dict[str, str] = {
    "server/cli/settings.py": "a table of all settings; two tables would be two places to look",
}
LARGE_FUNCTIONS: dict[str, str] = {}
MANY_ARGUMENTS: dict[str, str] = {}


def python_files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in python_files(*PACKAGES)}


def imports(path: Path, *, at_run_time: bool = False) -> set[str]:
    """Every module that a file imports, wherever it does so.

    Args:
        at_run_time: leave out what is imported for type checkers only.
    """
    return set(_imports(parse(path), at_run_time))


def _imports(node: ast.AST, at_run_time: bool) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
            return
        case ast.ImportFrom(module=str(module), names=names, level=0):
            for alias in names:  # "from engine.model import sources" names a module, too
                inner = f"{module}.{alias.name}"
                yield inner if inner in modules() else module
            return
        case ast.ImportFrom():
            pytest.fail("relative imports hide what is imported")
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) if at_run_time:
            return
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, at_run_time)


def own(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in PACKAGES}


def part_of(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> tuple[int, str]:
    """The layer of a module, and the entry that puts it there: the longest that fits."""
    found = [
        (len(entry), i, entry)
        for i, entries in enumerate(LAYERS)
        for entry in entries
        if part_of(module, entry)
    ]
    assert found, f"{module} has no place in the layers; give it one"
    _, i, entry = max(found)
    return i, entry


# -- who imports whom ------------------------------------------------------------------------


@pytest.mark.parametrize("path", python_files("engine"), ids=module_name)
def test_imports_point_down(path: Path) -> None:
    module = module_name(path)
    if module == "engine":
        return
    mine, entry = layer(module)
    for name in own(imports(path)):
        theirs, other = layer(name)
        assert theirs < mine or other == entry, f"{module} must not import {name}"


def test_layers_name_what_exists() -> None:
    for entries in LAYERS:
        for entry in entries:
            assert entry in modules(), f"{entry} is gone; take it out of the layers"


def test_the_servers_exceptions_are_needed() -> None:
    for module, name in (*SERVER_MAY_ALSO, *MAY_LOAD_TEST):
        used = imports(modules()[module])
        assert any(part_of(other, name) for other in used), f"{module} no longer imports {name}"


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {name: own(imports(path)) & set(modules()) for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in graph[name] - {name}:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_server_knows_only_the_engines_surface() -> None:
    for path in python_files("server"):
        module = module_name(path)
        for name in imports(path):
            assert name.split(".")[0] != "torch", f"{module} imports {name}"
            if part_of(name, "loadtest"):
                may = [other for whose, other in MAY_LOAD_TEST if whose == module]
                assert any(part_of(name, other) for other in may), f"{module} imports {name}"
            if part_of(name, "engine") and name not in SERVER_MAY:
                also = [other for whose, other in SERVER_MAY_ALSO if whose == module]
                assert any(part_of(name, other) for other in also), f"{module} imports {name}"


def test_the_engine_knows_nothing_of_http_and_text() -> None:
    foreign = {"fastapi", "starlette", "pydantic", "prometheus_client", "uvicorn", "httpx", "yaml"}
    for path in python_files("engine"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & (foreign | {"server", "loadtest", "tests"}), path


def test_drafters_know_neither_scheduler_nor_core() -> None:
    for path in python_files("engine/draft"):
        for name in imports(path):
            assert name not in ("engine.scheduler", "engine.core"), path


def test_the_load_test_stands_alone() -> None:
    for path in python_files("loadtest"):
        for name in imports(path):
            assert name.split(".")[0] not in ("engine", "server", "torch", "tests"), path


def test_integers_need_no_torch() -> None:
    """Said by an interpreter that imports them: what they import in turn counts, too."""
    control = [name for name in modules() if part_of(name, "engine.control")]
    for module in (*WITHOUT_TORCH, *control):
        assert "torch" not in imports(modules()[module], at_run_time=True), module
    names = ", ".join((*WITHOUT_TORCH, *control))
    program = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0


def test_one_file_turns_integers_into_batches() -> None:
    makers = [
        module_name(path)
        for path in python_files("engine")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Batch"
    ]
    assert makers == ["engine.batch"]


# -- how large things are --------------------------------------------------------------------


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function and method of a file with its dotted name."""

    def walk(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{name}.{child.name}", child
                yield from walk(child, f"{name}.{child.name}")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{name}.{child.name}")
            else:
                yield from walk(child, name)

    return walk(parse(path), module_name(path))


def sizes(path: Path) -> dict[str, int]:
    """Lines of each function, without its docstring."""
    found = {}
    for name, node in functions(path):
        start, end = node.lineno, node.end_lineno or node.lineno
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
        found[name] = end - start + 1 - docstring
    return found


def argument_counts(path: Path) -> dict[str, int]:
    """Parameters of each function, not counting self and cls."""
    counts = {}
    for name, node in functions(path):
        if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue  # all that a kernel knows are its parameters
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        counts[name] = sum(a.arg not in ("self", "cls") for a in every)
    return counts


def sources() -> list[Path]:
    """Everything that is written by hand: Python and C++."""
    native = [p for kind in ("*.cpp", "*.h") for p in (ROOT / "engine").rglob(kind)]
    return python_files(*PACKAGES) + sorted(native)


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()
    }
    large = {name for name, length in lengths.items() if length > MAX_FILE}
    assert large == set(LARGE_FILES), {n: lengths[n] for n in large ^ set(LARGE_FILES)}


def test_functions_are_short() -> None:
    lengths = {n: size for path in python_files(*PACKAGES) for n, size in sizes(path).items()}
    large = {name for name, length in lengths.items() if length > MAX_FUNCTION}
    assert large == set(LARGE_FUNCTIONS), {n: lengths[n] for n in large ^ set(LARGE_FUNCTIONS)}


def test_functions_take_few_arguments() -> None:
    counts = {n: c for path in python_files(*PACKAGES) for n, c in argument_counts(path).items()}
    many = {name for name, count in counts.items() if count > MAX_ARGUMENTS}
    assert many == set(MANY_ARGUMENTS), {n: counts[n] for n in many ^ set(MANY_ARGUMENTS)}


def test_nothing_is_left_for_later() -> None:
    unfinished = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError\(")
    for path in sources():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            assert not unfinished.search(line), f"{path.relative_to(ROOT)}:{number}: {line}"


def test_every_module_says_what_it_is() -> None:
    for path in python_files(*PACKAGES):
        assert ast.get_docstring(parse(path)), path
