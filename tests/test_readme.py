"""What the documentation tells people to type works."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.arguments import make_parser as loadtest_parser
from loadtest.options import parse as parse_loadtest
from server.cli.parser import make_parser
from tests.end_to_end.serving import PATIENCE, Server, serving_tiny
from tests.forks import Forked

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
}

ADDRESS = "http://127.0.0.1:8000"
MODEL = "SmolLM2-135M-Instruct"

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_TOOL = re.compile(r"tools/\w+\.py|(?<=-m )tools\.\w+")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks in one language."""
    return [text for kind, text in _BLOCK.findall(page) if kind == language]


def commands(page: str, *languages: str) -> list[str]:
    """The commands of shell blocks, one each, without comments."""
    lines = "".join(text for kind in languages for text in blocks(page, kind))
    joined = lines.replace("\\\n", " ").splitlines()
    return [line for command in joined if (line := command.split("#")[0].strip())]


def flags_of(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Command -> flags."""
    [found] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return {name: set(sub._option_string_actions) for name, sub in found.choices.items()}


def flags_of_tool(name: str) -> set[str]:
    """Flags that the source of a script, or of a module that is run, defines."""
    path = ROOT / (name if name.endswith(".py") else name.replace(".", "/"))
    source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    return set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source))


SPECSERVE = flags_of(make_parser())
LOADTEST = flags_of(loadtest_parser())["run"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """What `make serve` starts, but for the model behind the name."""
    with serving_tiny(tmp_path_factory.mktemp("readme"), "--served-model-name", MODEL) as made:
        yield made


def run(command: list[str], **environment: str) -> str:
    """Its standard output; it must succeed."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_specserve(arguments: list[str], log: Path, **environment: str) -> str:
    """What the command writes; it must succeed."""
    process = Forked(arguments, os.environ | environment, log)
    assert process.wait(PATIENCE) == 0, log.read_text()
    return log.read_text()


# -- what the README says ------------------------------------------------------------------


def test_the_readme_has_no_command_that_nobody_tries() -> None:
    kinds = {shlex.split(command)[0] for command in commands(README, "bash", "")}
    assert kinds == {"make", "curl", "specserve", "python"}


@pytest.mark.parametrize(
    "command",
    sorted(
        {
            command
            for page in PAGES.values()
            for command in commands(page, "bash")
            if command.startswith("make")
        }
    ),
)
def test_make_targets(command: str) -> None:
    assert run([*shlex.split(command), "--dry-run"])


@pytest.mark.parametrize("number", range(len(blocks(README, "python"))))
def test_python(server: Server, number: int) -> None:
    code = blocks(README, "python")[number].replace(ADDRESS, server.url)
    assert run([sys.executable, "-W", "error", "-c", code])


@pytest.mark.parametrize("command", [c for c in commands(README, "bash") if c.startswith("curl")])
def test_curl(server: Server, command: str) -> None:
    assert ADDRESS in command
    answer = json.loads(run(["bash", "-c", command.replace(ADDRESS, server.url) + " -sS"]))
    assert answer["model"] == MODEL
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert set(answer["speculation"]) >= {"drafted", "accepted", "target_passes"}


@pytest.mark.parametrize("line", "".join(blocks(README, "json")).splitlines())
def test_fields_of_a_request(server: Server, line: str) -> None:
    prompt = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    for path, field in (("completions", "prompt"), ("chat/completions", "messages")):
        body = {field: prompt[field], "max_tokens": 4, **json.loads(line)}
        response = server.post(body, f"/v1/{path}")
        assert response.status_code == 200, response.text
        assert "x-ignored-params" not in response.headers


@pytest.mark.parametrize(
    "command", [c for c in commands(README, "bash") if c.startswith("specserve")]
)
def test_specserve(server: Server, command: str, tmp_path: Path) -> None:
    """With the tiny model, unless the command only shows settings or looks around."""
    arguments = shlex.split(command)[1:]
    assert arguments[0] != "serve" or "--print-config" in arguments
    if arguments[0] in ("generate", "audit"):
        [model] = server.log.parent.glob("*.gguf")
        arguments += ["--model", str(model), "--threads", "1"]
    home = {"SPECSERVE_HOME": str(server.log.parent)} if "--model" in arguments else {}
    assert run_specserve(arguments, tmp_path / "log", **home)


def test_commands() -> None:
    """All of them are in the README, and it knows no others."""
    named = set(re.findall(r"`specserve ([a-z-]+)", README))
    assert named == set(SPECSERVE)


def test_defaults_in_the_table_of_flags(tmp_path: Path) -> None:
    shown = run_specserve(["serve", "--print-config"], tmp_path / "log")
    rows = re.findall(r"^\| (`--.*?`) \| (.*?) \|", README, re.MULTILINE)
    assert len(rows) > 5
    for flags, defaults in rows:
        names = [flag.strip(" `-").replace("-", "_") for flag in flags.split(",")]
        for name, default in zip(names, defaults.split(", "), strict=True):
            if default.strip("`").replace(".", "").isalnum() and name != "model":
                assert f"\n{name}: {default.strip('`')}\n" in shown


# -- what all pages say --------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_flags_exist(name: str) -> None:
    """In text they are those of specserve, the load test, or a tool that the page names; in a
    command, that command's own."""
    known = set().union(
        *SPECSERVE.values(), LOADTEST, *map(flags_of_tool, _TOOL.findall(PAGES[name]))
    )
    text = re.sub(_BLOCK, "", PAGES[name])
    assert {flag for flag in _FLAG.findall(text) if flag not in known} == set()
    for command in commands(PAGES[name], "bash", "sh", ""):
        words = command.removeprefix(".venv/bin/").split()
        if words[0] == "specserve" and words[1] in SPECSERVE:
            assert set(_FLAG.findall(command)) <= SPECSERVE[words[1]], command


@pytest.mark.parametrize(
    "command",
    sorted(
        command
        for page in PAGES.values()
        for command in commands(page, "bash", "sh", "")
        if command.startswith("python -m loadtest run")
    ),
)
def test_load_test_commands(command: str) -> None:
    parse_loadtest(shlex.split(command)[3:])


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    base = (ROOT / name).parent
    missing = [link for link in _LINK.findall(PAGES[name]) if not (base / link).exists()]
    assert missing == []
