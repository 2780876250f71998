"""The command as people run it: real processes for `serve`, its signals and its end."""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from server.cli import main
from server.cli.settings import Settings
from tests.caches import own_cache
from tests.server.processes import PATIENCE, model, serving, small, streaming
from tests.tiny import CONTEXT

__all__ = ["model"]  # a fixture


@pytest.fixture(autouse=True)
def _keep_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


# -- mistakes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--prot", "1"], "there is no --prot here; did you mean --port?"),
        (["serve", "--port=x"], "--port is 'x'"),
        (["serve", "--host", "0.0.0.0"], "--insecure"),
        (["serve", "a/b", "--model", "c/d"], "name one"),
        (["serve", "--max-batch-tokens", "2", "--max-sequences", "3", "."], "no config.json"),
        (["srve"], "invalid choice: 'srve'"),
        ([], "required: COMMAND"),
        (["pull", "/no/such"], "neither a directory"),
        (["pull", "--config", "/no/such.yaml"], "/no/such.yaml cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.startswith("specserve: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err
    assert captured.out == ""


def test_a_taken_port_is_told_before_the_model_is_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--model", "/no/such"]) == 2
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["help", "serve"])
def test_help_and_a_taken_port_wait_for_no_heavy_import(command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = {
            "help": ["serve", "--help"],
            "serve": ["serve", "--port", str(taken.getsockname()[1]), "--model", "/no/such"],
        }[command]
        program = (
            f"import contextlib, sys, server.cli\n"
            f"with contextlib.suppress(SystemExit): server.cli.main({arguments})\n"
            f"heavy = {{'torch', 'transformers', 'fastapi', 'uvicorn', 'prometheus_client'}}\n"
            f"heavy |= {{'prompt_toolkit', 'httpx', 'loadtest.session', 'matplotlib'}}\n"
            f"sys.exit(str(heavy & set(sys.modules)))"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.stderr.splitlines()[-1] == b"set()"
    assert b"Address already in use" in done.stderr or command == "help"


def test_print_config_shows_what_is_in_force(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSERVE_MAX_DRAFT", "2")
    assert main(["serve", "a/b", "--print-config", "--no-prefix-reuse"]) == 0
    shown = capsys.readouterr().out
    assert "\nmodel: a/b\n" in f"\n{shown}"
    assert "\nmax_draft: 2\n" in shown
    assert "\nprefix_reuse: false\n" in shown
    assert len(re.findall(r"^\w+:", shown, re.MULTILINE)) == len(Settings.model_fields)


# -- pull, doctor, generate ----------------------------------------------------------------


def test_pull_prints_the_directory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", str(model)]) == 0
    assert capsys.readouterr().out == f"{model}\n"


def test_doctor_says_what_fits(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path))  # without kernels
    monkeypatch.setenv("CXX", "/no/such")
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["doctor", *small(model)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ok +cores +\d+ usable \(\d+ by affinity, ", shown, re.MULTILINE)
    assert re.search(r"^ok +compute threads +\d+ just now; without a core: ", shown, re.MULTILINE)
    for words in ("torch", "free memory", "no C++ compiler found", "ready to serve", str(model)):
        assert words in shown
    assert re.search(r"^ok +weights +float32: 32\.0 bits a weight, \d+ MiB$", shown, re.MULTILINE)
    assert re.search(r"^ok +keys and values +float32, 0\.2 KiB a token$", shown, re.MULTILINE)
    assert main(["doctor", *small(model), "--weights", "file"]) == 0
    assert re.search(r"^ok +weights +Q8_0: 8\.\d bits", capsys.readouterr().out, re.MULTILINE)
    assert main(["doctor", *small(model), "--weights", "bfloat16"]) == 1
    assert "weights is bfloat16, but dtype is float32" in capsys.readouterr().out
    assert main(["doctor", "--model", "/no/such", "--runner", "native"]) == 1
    shown = capsys.readouterr().out
    assert re.findall(r"^FAIL +([\w ]+?)  ", shown, re.MULTILINE) == ["kernels", "model"]


def test_doctor_does_not_fetch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(own_cache(tmp_path)))
    main(["doctor", "--runner", "reference"])
    assert "not here yet; `specserve pull` fetches it" in capsys.readouterr().out


def test_generate_answers_on_stdout_and_reports_on_stderr(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for more in ([], ["--drafter", "none"], ["--raw"]):
        assert main(["generate", "abc", "--max-tokens", "24", *small(model), *more]) == 0
        captured = capsys.readouterr()
        answers.append(captured.out)
        assert re.search(r"^\d+ tokens.* passes of the model", captured.err, re.MULTILINE)
    assert answers[0] == answers[1] != answers[2]  # speculation changes nothing, the template does


def test_generate_refuses_what_does_not_fit(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a" * (CONTEXT + 1), *small(model)]) == 2
    assert f"holds {CONTEXT}; shorten it" in capsys.readouterr().err
    assert main(["generate", "a", "--temperature", "9", *small(model)]) == 2
    assert "temperature is 9.0" in capsys.readouterr().err


# -- serve ---------------------------------------------------------------------------------


def test_a_signal_lets_running_requests_finish(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", small(model), cwd=tmp_path) as served:  # started from nothing
        served.wait_until_ready()
        assert "Tiny (float32 on cpu, reference runner, 4096 tokens of context)" in served.said()
        with streaming(served, 400) as chunks:
            served.process.send_signal(signal.SIGTERM)
            received = list(chunks)
        assert received[-1] == "[DONE]"
        assert received[-2]["choices"][0]["finish_reason"] == "length"
        assert served.exit_code() == 0
    assert "Traceback" not in served.said()


#: Its steps are so slow that no long answer ends before the test is through with it.
SLOW_ENGINE = """
from engine.core import Engine
import time
step = Engine.step
def slow(self):
    if self.parts.scheduler.running:
        time.sleep(0.05)
    return step(self)
Engine.step = slow
"""


def test_a_drain_ends_in_time_and_says_so_in_the_stream(model: Path, tmp_path: Path) -> None:
    flags = [*small(model), "--drain-seconds", "0.3"]
    with serving(tmp_path / "log", flags, SLOW_ENGINE) as served:
        served.wait_until_ready()
        with streaming(served, CONTEXT - 16) as chunks:
            served.process.send_signal(signal.SIGINT)
            received = list(chunks)
        assert received[-1] == "[DONE]"
        assert received[-2]["error"]["code"] == "server_shutting_down"
        assert served.exit_code() == 0
    assert "Traceback" not in served.said()


@pytest.mark.bad_input(56)
def test_a_second_signal_ends_at_once(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", small(model), SLOW_ENGINE) as served:
        served.wait_until_ready()
        with streaming(served, CONTEXT - 16) as chunks:
            served.process.send_signal(signal.SIGTERM)
            while "no new requests" not in served.said():
                next(chunks)
            assert httpx.get(f"{served.url}/readyz").status_code == 503
            served.process.send_signal(signal.SIGTERM)
            assert served.exit_code() == 128 + signal.SIGTERM
            with pytest.raises(httpx.TransportError):
                list(chunks)


#: Breaks once six requests are there; until then steps are slow, so that none ends before.
BREAK_ENGINE = """
from engine.core import Engine
import time
step = Engine.step
def broken(self):
    scheduler = self.parts.scheduler
    if len(scheduler.running) + len(scheduler.waiting) == 6:
        raise RuntimeError("cosmic ray")
    if scheduler.running:
        time.sleep(0.05)
    return step(self)
Engine.step = broken
"""


@pytest.mark.bad_input(55)
def test_a_dead_engine_ends_the_process_after_its_requests_know(
    model: Path, tmp_path: Path
) -> None:
    with serving(tmp_path / "log", small(model), BREAK_ENGINE) as served:
        served.wait_until_ready()
        url = served.url + "/v1/completions"
        body = {"prompt": "b", "max_tokens": CONTEXT - 16, "ignore_eos": True}
        with streaming(served, CONTEXT - 16) as chunks, ThreadPoolExecutor(5) as pool:
            # Three run with it, two wait.
            ask = functools.partial(httpx.post, url, json=body, timeout=PATIENCE)
            whole = [pool.submit(ask) for _ in range(5)]
            received = list(chunks)
            assert received[-1] == "[DONE]"
            assert received[-2]["error"]["type"] == "server_error"
            for answer in whole:
                assert answer.result().status_code == 503
                assert answer.result().json()["error"]["type"] == "server_error"
        with contextlib.suppress(httpx.TransportError):  # it may be gone already
            health = httpx.get(served.url + "/health", timeout=PATIENCE)
            assert (health.status_code, health.json()) == (503, {"status": "dead"})
        assert served.exit_code() == 1
    assert "cosmic ray" in served.said()
    assert "the engine has died" in served.said()


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._marker,)


@pytest.mark.bad_input(43)
@pytest.mark.parametrize("how", ["code", "code in the tokenizer", "pickle", "huge header"])
def test_a_hostile_model_is_refused_and_its_code_never_run(
    how: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    evil, marker = tmp_path / "evil", tmp_path / "it ran"
    shutil.copytree(model, evil)
    weights = evil / "model.safetensors"
    (evil / "model.gguf").unlink()
    if how.startswith("code"):
        name = "tokenizer_config.json" if "tokenizer" in how else "config.json"
        config = json.loads((evil / name).read_text())
        maps = {"AutoTokenizer": ["evil.E", None], "AutoModelForCausalLM": "evil.E"}
        (evil / name).write_text(json.dumps({**config, "auto_map": maps}))
        (evil / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass E: ...\n")
    elif how == "pickle":
        (evil / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(marker)))
    else:
        weights.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    assert main(["serve", "--model", str(evil), *small(model)[2:], "--port", "0"]) == 2
    said = capsys.readouterr().err + caplog.text
    assert {"code": "auto_map", "pickle": "pickle", "huge": "header"}[how.split()[0]] in said
    assert "Traceback" not in said
    assert not marker.exists()


def test_an_engine_that_cannot_start_is_one_line_and_code_2(model: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", [*small(model), "--max-model-len", "99999"]) as served:
        assert served.exit_code() == 2
    assert "max_model_len is 99999, but the model was made for 4096 tokens" in served.said()
    assert "Traceback" not in served.said()
