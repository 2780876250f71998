"""The whole tool against a server on a real port."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loadtest.__main__ import main
from tests.loadtest.fake_server import FakeServer


def run(server: FakeServer, *arguments: str) -> int:
    return main(["run", "--target", server.url, "--warmup", "1", *arguments])


def test_a_plain_run(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(server, "--concurrency", "1,2", "--requests", "4") == 0
    out, err = capsys.readouterr()
    assert "concurrency 2" in out
    assert "[2/2] concurrency 2, round 1, server: " in err
    assert "0 failed" in err


def test_ab_of_speculation(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--ab", "speculation", "--rounds", "4", "--requests", "16", "--max-turns", "1"]
    status = run(
        server, *arguments, "--check-equal", "--slo-ttft-ms", "9", "--output", f"{tmp_path}"
    )
    assert status == 0
    data = json.loads((tmp_path / "results.json").read_text())
    assert [block["lane"] for block in data["blocks"]][:4] == [
        "speculation off",
        "speculation on",
        "speculation on",
        "speculation off",
    ]
    assert [summary["output_tokens"] for summary in data["summaries"]] == [16 * 8, 16 * 8]
    assert data["summaries"][0]["tokens_per_chunk"] == pytest.approx(8 / 3)
    assert data["ratios"][0]["low"] <= data["ratios"][0]["ratio"] <= data["ratios"][0]["high"]
    assert data["equality"] == {"compared": 16, "skipped": 0, "mismatches": []}
    assert data["settings"]["models"] == {"server": "fake-model"}
    assert (tmp_path / "ratios.png").exists()
    assert "16 pairs compared, 0 different" in capsys.readouterr().out


def test_different_answers_fail_the_run(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script.arm_marks = True
    status = run(server, "--ab", "speculation", "--rounds", "2", "--requests", "4", "--check-equal")
    assert status == 3
    assert "Different answers" in capsys.readouterr().out


def test_several_targets_are_interleaved(server: FakeServer, tmp_path: Path) -> None:
    with FakeServer() as other:
        other.script.usage = "strict"
        targets = ["--target", f"a={server.url}", "--target", f"b={other.url}/v1"]
        load = ["--rounds", "2", "--requests", "4", "--workload", "repetitive", "--warmup", "0"]
        asking = ["--endpoint", "completions", "--template", "chatml"]
        status = main(["run", *targets, *load, *asking, "--output", str(tmp_path)])
        assert other.seen[-1].body["prompt"].startswith("<|im_start|>user\nList ")
    assert status == 0
    data = json.loads((tmp_path / "results.json").read_text())
    assert [block["lane"] for block in data["blocks"]] == ["a", "b", "b", "a"]
    assert any(note.startswith("b sent no running usage") for note in data["notes"])


def test_too_many_errors_fail_the_run(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script.fail = "error"
    server.script.fail_when = 6  # preparation, warm-up and the first four requests are well
    arguments = ["--requests", "8", "--workload", "random"]
    assert run(server, *arguments) == 1
    assert "50.0 % of the requests failed" in capsys.readouterr().err
    server.seen.clear()
    assert run(server, *arguments, "--max-error-rate", "0.5") == 0


def test_what_cannot_start_says_why(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--target", "http://127.0.0.1:1"]) == 2
    assert "Is the server running" in capsys.readouterr().err
    assert run(server, "--api-key-env", "SURELY_NOT_SET") == 2
    assert "SURELY_NOT_SET" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert run(server, "--output", str(tmp_path / "file")) == 2
    assert run(server, "--concurrency", "8", "--requests", "4") == 2
    assert "at least 8 requests" in capsys.readouterr().err


def test_the_key_is_nowhere_in_the_results(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "very-secret")
    assert (
        run(server, "--api-key-env", "SOME_KEY", "--requests", "1", "--output", f"{tmp_path}") == 0
    )
    assert server.seen[0].headers["authorization"] == "Bearer very-secret"
    for path in tmp_path.iterdir():
        assert b"very-secret" not in path.read_bytes()


def test_ctrl_c_reports_what_was_measured(server: FakeServer, tmp_path: Path) -> None:
    server.script.delay = 0.02
    command = [sys.executable, "-m", "loadtest", "run", "--target", server.url]
    process = subprocess.Popen(
        [*command, "--duration", "60", "--concurrency", "2", "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    while len(server.seen) < 12:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Interrupted" in err
    assert "concurrency 2" in out
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["summaries"][0]["requests"] >= 4
    assert data["summaries"][0]["failed"] == 0
    assert not data["blocks"][0]["complete"]
    assert any("interrupted" in note for note in data["notes"])
