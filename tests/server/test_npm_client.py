"""The official client for JavaScript, as people use it: needs node, and npm once."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from server.api.keys import read_keys
from tests.server.support import MODEL, TEXT, FakeEngine, ids, make_app, serving, wait_until

SCRIPT = Path(__file__).with_name("openai_client.mjs")
KEY = "key-for-the-npm-client"


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package in it."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, timeout=30)
    if int(version.stdout.lstrip("v").split(".")[0]) < 20:
        pytest.skip(f"node is {version.stdout.strip()}; the client needs 20 or newer")
    directory = tmp_path_factory.mktemp("npm")
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai@^7"]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm cannot fetch the package openai in time")
    if done.returncode:
        pytest.skip(f"npm cannot fetch the package openai: {done.stderr.strip()[-200:]}")
    return directory


def test_the_npm_client(package: Path) -> None:
    engine = FakeEngine(blocks=(3, 1), delay=0.002)
    with serving(make_app(engine, keys=read_keys([f"npm:{KEY}"]))) as url:
        command = ["node", str(SCRIPT), str(package), f"{url}/v1", MODEL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        wait_until(lambda: not engine.running)  # the stream it left
    result = json.loads(done.stdout)
    assert result.pop("requestId")
    assert result == {
        "completion": TEXT,
        "chat": TEXT,
        "accepted": len(ids("Once upon")),
        "streamed": TEXT,
        "streamedTokens": len(ids(TEXT)) + 1,
        "helper": TEXT,
        "models": [MODEL],
        "errors": {
            "bad": ["BadRequestError", 400, None, "temperature"],
            "missing": ["NotFoundError", 404, "model_not_found", "model"],
            "stranger": ["AuthenticationError", 401, "invalid_api_key", None],
        },
    }
