"""The command as the image runs it: as nobody in particular, who can write next to nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.processes import PATIENCE, ROOT, serving, small
from tests.tiny import write_gguf

UID, KEY = 10001, "0123456789abcdef"


def python_for(how: dict[str, Any]) -> str:
    """An interpreter like this one that another user may start; skips if there is none."""
    same = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (sys.executable, same):
        try:
            subprocess.run(
                [candidate, "-c", "import server.cli"], check=True, timeout=PATIENCE, **how
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip("no Python here lies where another user can read it")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_command_runs_as_nobody_in_a_read_only_directory(tmp_path: Path) -> None:
    models, weights, nowhere = (tmp_path / name for name in ("models", "weights", "nowhere"))
    for directory, mode in ((models, 0o755), (weights, 0o755), (nowhere, 0o555)):
        directory.mkdir()
        directory.chmod(mode)
    for parent in (tmp_path, *tmp_path.parents[:3]):  # a worker's folder lies one level deeper
        parent.chmod(parent.stat().st_mode | 0o011)
    os.chown(models, UID, UID)
    gguf = write_gguf(weights / "Tiny.gguf")
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    environment = {
        "PATH": os.environ["PATH"], "PYTHONPATH": ":".join(paths), "PYTHONDONTWRITEBYTECODE": "1",
        "SPECSERVE_HOME": str(models), "HF_HOME": str(models / "huggingface"),
        "SPECSERVE_API_KEYS": f"test:{KEY}",
    }  # fmt: skip
    how: dict[str, Any] = {
        "user": UID, "group": UID, "extra_groups": [], "cwd": nowhere, "env": environment,
    }  # fmt: skip
    how["executable"] = python_for(how)
    with serving(tmp_path / "log", [*small(gguf)], **how) as served:
        served.wait_until_ready()
        status = Path(f"/proc/{served.process.pid}/status").read_text()
        assert f"Uid:\t{UID}\t{UID}" in status
        body, url = {"prompt": "a", "max_tokens": 4}, f"{served.url}/v1/completions"
        assert httpx.get(f"{served.url}/health").status_code == 200
        assert httpx.post(url, json=body).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        assert httpx.post(url, json=body, headers=headers, timeout=PATIENCE).status_code == 200
        served.process.send_signal(signal.SIGTERM)
        assert served.exit_code() == 0
        said = served.said()
        assert "this machine only, with the API key\n" in said
        assert re.search(r"request request_id=\w+ method=POST .* status=200 .* caller=test ", said)
        assert KEY not in said
    assert list(nowhere.iterdir()) == []
    assert {path.lstat().st_uid for path in models.rglob("*")} == {UID}
