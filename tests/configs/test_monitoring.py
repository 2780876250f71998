"""Dashboards and rules ask only for what a server really says, and the tools accept them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.configs.scrape import scrape

CONFIGS = Path(__file__).parents[2] / "configs"
DASHBOARDS = sorted((CONFIGS / "grafana" / "dashboards").glob("*.json"))
RULES = CONFIGS / "prometheus" / "rules.yml"

#: Metrics of Prometheus itself.
FOREIGN = {"up"}

_STRING = re.compile(r'"[^"]*"')
_NAME = re.compile(r"(?<![\w:$.])[a-zA-Z_:][\w:]*(?![\w:]*\s*\()")
_WORDS = frozenset({"by", "le", "on", "and", "or", "unless", "without", "group_left"})

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def names_in(expression: str) -> set[str]:
    """The metrics of a PromQL expression: names that are neither functions nor labels."""
    bare = _STRING.sub("", expression)
    bare = re.sub(r"\{[^}]*\}", "", bare)
    bare = re.sub(r"\b(by|without|on)\s*\([^)]*\)", "", bare)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    return {name for name in _NAME.findall(bare) if name not in _WORDS}


def series() -> set[str]:
    """Every series name that a scrape may hold, whichever labels have been seen."""
    names = set()
    for family in text_string_to_metric_families(scrape()):
        names |= {sample.name for sample in family.samples} | {family.name}
        if family.type == "counter":
            names.add(f"{family.name}_total")
        if family.type == "histogram":
            names |= {family.name + end for end in ("_bucket", "_sum", "_count")}
    return names


def expressions(board: Any) -> Iterator[str]:
    """Every query of a dashboard, its variables' included."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield re.sub(r"label_values\((.*),.*\)", r"\1", variable["definition"])


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def promtool(*arguments: str, given: str | None = None) -> str:
    done = subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, text=True, timeout=60
    )
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}" or "failed"


def test_names_are_found_in_expressions() -> None:
    text = 'sum by (le, a) (rate(x:y_z{b="c(d)"}[5m])) / on (i) e_total{} > 0.5 and rate(f[1m]) > 0'
    assert names_in(text) == {"x:y_z", "e_total", "f"}


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_every_metric_of_a_dashboard_exists(file: Path) -> None:
    wanted = set().union(*map(names_in, expressions(json.loads(file.read_text()))))
    assert len(wanted) > 8
    assert wanted - series() == set()


def test_every_metric_of_a_rule_exists() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    wanted = set().union(*(names_in(rule["expr"]) for rule in rules()))
    assert wanted - series() - recorded - FOREIGN == set()


def test_the_serving_dashboard_leaves_nothing_out() -> None:
    """A metric that nobody looks at is not worth its cost."""
    shown: set[str] = set()
    for file in DASHBOARDS:
        for expression in expressions(json.loads(file.read_text())):
            shown |= names_in(expression)
    ours = {name for name in series() if name.startswith("vllm:") and name.endswith("_total")}
    unseen = {name for name in ours if name not in shown and name + "_bucket" not in shown}
    assert unseen == set()


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_dashboards_are_well_formed(file: Path) -> None:
    board = json.loads(file.read_text())
    assert board["uid"] == f"specserve-{file.stem}"
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] <= 24 - place["w"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} overlaps"
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"]
            assert panel["description"]
            assert panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"


@needs_promtool
@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)
def test_queries_of_dashboards_parse(file: Path, tmp_path: Path) -> None:
    """promtool reads expressions in rules, so every query becomes one."""
    queries = expressions(json.loads(file.read_text()))
    plain = [q.replace("$__rate_interval", "1m").replace("$model", ".*") for q in queries]
    made = [{"record": f"q:{number}:x", "expr": query} for number, query in enumerate(plain)]
    assert not any("$" in query for query in plain)
    rule_file = tmp_path / "rules.yml"
    rule_file.write_text(yaml.safe_dump({"groups": [{"name": "q", "rules": made}]}))
    assert promtool("check", "rules", str(rule_file)) == ""


@needs_promtool
def test_promtool_accepts_configuration_and_rules() -> None:
    assert promtool("check", "config", str(CONFIGS / "prometheus" / "prometheus.yml")) == ""
    assert promtool("check", "rules", str(RULES)) == ""


@needs_promtool
def test_promtool_accepts_the_exposition() -> None:
    """All it has to say is about the names that others have coined."""
    complaints = promtool("check", "metrics", given=scrape()).splitlines()
    own = [line for line in complaints if not line.startswith(("vllm:", "python_", "process_"))]
    assert own == []
    borrowed = {line.split(" ", 1)[1] for line in complaints if line.startswith("vllm:")}
    assert borrowed <= {
        "metric names should not contain ':'",
        'non-counter metrics should not have "_total" suffix',
    }


@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    one = {"instance": "a:8000", "job": "specserve", "model_name": "m"}

    def line(name: str, **labels: str) -> str:
        pairs = ",".join(f'{k}="{v}"' for k, v in {**one, **labels}.items())
        return f"{name}{{{pairs}}}"

    bad = {
        line("up"): "0x60",
        line("specserve_engine_up"): "0x60",
        line("specserve_engine_step_age_seconds"): "31+60x60",
        line("http_requests_total", status="500"): "0+1x60",
        line("http_requests_total", status="200"): "0+9x60",
        line("vllm:corrupted_requests_total"): "0+1x60",
        line("specserve_requests_rejected_total", reason="queue_full"): "0+1x60",
        line("vllm:kv_cache_usage_perc"): "0.99x60",
        line("vllm:num_preemptions_total"): "0+1x60",
        line("vllm:spec_decode_num_accepted_tokens_total"): "0+1x60",
        line("vllm:spec_decode_num_draft_tokens_total"): "0+99x60",
        line("specserve_spec_plain_equivalent_seconds_total"): "0+9.7x60",
        line("specserve_spec_decode_seconds_total"): "0+10x60",
        line("specserve_spec_active", method="lookup"): "0x60",
    }
    alerts = [rule["alert"] for rule in rules() if "alert" in rule]
    good = {
        line("up"): "1x60",
        line("specserve_engine_up"): "1x60",
        line("specserve_engine_step_age_seconds"): "0.1x60",
        line("http_requests_total", status="200"): "0+9x60",
        line("vllm:corrupted_requests_total"): "0x60",
        line("specserve_requests_rejected_total", reason="invalid"): "0+1x60",
        line("vllm:kv_cache_usage_perc"): "0.99x60",
        line("vllm:num_preemptions_total"): "0x60",
        line("vllm:spec_decode_num_accepted_tokens_total"): "0+50x60",
        line("vllm:spec_decode_num_draft_tokens_total"): "0+99x60",
        line("specserve_spec_plain_equivalent_seconds_total"): "0+9.9x60",
        line("specserve_spec_decode_seconds_total"): "0+10x60",
        line("specserve_spec_active", method="lookup"): "1x60",
    }
    count = "count by (alertname) (ALERTS{alertstate='firing'})"
    expected = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in alerts]
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": s, "values": v} for s, v in given.items()],
            "promql_expr_test": [{"expr": count, "eval_time": "50m", "exp_samples": wanted}],
        }
        for given, wanted in ((bad, expected), (good, []))
    ]
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "tests": tests}))
    assert promtool("test", "rules", str(file)) == ""
