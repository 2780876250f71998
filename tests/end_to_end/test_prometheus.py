"""A real Prometheus, with the configuration and rules that are shipped, scrapes a real server; and
every query of every dashboard has an answer."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.configs.test_monitoring import CONFIGS, DASHBOARDS, expressions, rules
from tests.end_to_end.conftest import ALWAYS, Serve
from tests.end_to_end.serving import PATIENCE, Server, free_port
from tests.tiny import Weights

BAD_TOKEN = 96  # whoever sends it is answered with a 500

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"
)


@contextlib.contextmanager
def prometheus(directory: Path, target: str) -> Iterator[httpx.Client]:
    """Prometheus as it is configured here, but quick, and with our server for a target."""
    port = free_port()
    config = yaml.safe_load((CONFIGS / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    config["rule_files"] = [str(CONFIGS / "prometheus" / "rules.yml")]
    for job, address in zip(config["scrape_configs"], (target, f"127.0.0.1:{port}"), strict=True):
        job["static_configs"] = [{"targets": [address]}]
    file = directory / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    how: Any = {"timeout": PATIENCE, "trust_env": False}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", **how) as api:
            yield api
    finally:
        process.kill()
        process.wait()


def ask(api: httpx.Client, path: str, **parameters: str) -> Any:
    """The data of an answer; None while nobody answers yet."""
    try:
        answer = api.get(path, params=parameters).json()
    except (httpx.TransportError, json.JSONDecodeError):
        return None
    assert answer["status"] == "success", answer
    return answer["data"]


def numbers(api: httpx.Client, expression: str) -> list[float]:
    """What a query finds now, as far as it is a number."""
    data = ask(api, "/query", query=expression)
    found = [float(series["value"][1]) for series in data["result"]] if data else []
    return [value for value in found if not math.isnan(value)]


def queries() -> list[str]:
    """Every query of every dashboard, as Grafana would send it, and every recorded rule."""
    asked = [q for file in DASHBOARDS for q in expressions(json.loads(file.read_text()))]
    filled = [q.replace("$__rate_interval", "1m").replace("$model", ".*") for q in asked]
    return list(dict.fromkeys([*filled, *(rule["record"] for rule in rules() if "record" in rule)]))


def use(server: Server, turn: int) -> None:
    """Something of everything that a panel shows; plain steps, too, which speed is measured by."""
    few = {"allowed_token_ids": [68, 69, 70], "ignore_eos": True, "seed": turn}
    text = server.complete({"prompt": "a b a b a b " * 5, "max_tokens": 60, **few})
    server.complete({"prompt": "a", "max_tokens": 60, "speculation": {"enabled": False}, **few})
    content = {"type": "content", "content": text["choices"][0]["text"]}
    predicted = {"prompt": "a b a b a b " * 5, "max_tokens": 60, "prediction": content, **few}
    server.complete_all([predicted, {**predicted, "n": 2}, {**predicted, "temperature": 0}])
    assert server.post({"prompt": [BAD_TOKEN], "max_tokens": 5}).status_code == 500
    assert server.post({"prompt": "x", "temperature": 99}).status_code == 400


def test_every_panel_shows_something(serve_tiny: Serve, tmp_path: Path) -> None:
    weights = Weights(poisoned=BAD_TOKEN)
    with (
        serve_tiny(*ALWAYS, "--dtype", "float32", weights=weights) as server,
        prometheus(tmp_path, server.url.removeprefix("http://")) as api,
    ):
        deadline, turn, missing = time.monotonic() + PATIENCE, 0, queries()
        while missing and time.monotonic() < deadline:
            use(server, turn)
            turn += 1
            missing = [query for query in missing if not numbers(api, query)]
        assert missing == [], (tmp_path / "prometheus.log").read_text()
        assert numbers(api, 'up{job="specserve"}') == [1]
        [model] = ask(api, "/label/model_name/values")
        assert model in server.log.read_text()
        told = server.wait_until_idle()
        for name in ("vllm:generation_tokens_total", "vllm:corrupted_requests_total"):
            while numbers(api, f"sum({name})") != [told[name]]:
                assert time.monotonic() < deadline, f"{name} never comes to be {told[name]}"
                time.sleep(0.1)
        groups = ask(api, "/rules")["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
