"""The container, compose and Kubernetes files: what they promise, checked without an engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.cli.configure import load_settings
from server.cli.settings import Settings
from tests.configs.scrape import scrape

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
PROVISIONING = ROOT / "configs" / "grafana" / "provisioning"


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return loaded


def kubernetes(kind: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((ROOT / "configs/kubernetes/specserve.yaml").read_text())
    [found] = [document for document in documents if document["kind"] == kind]
    assert isinstance(found, dict)
    return found


def find(tool: str) -> str | None:
    """A command of this environment, or of the machine."""
    beside = Path(sys.executable).with_name(tool)
    return str(beside) if beside.exists() else shutil.which(tool)


def run(tool: str, *arguments: str) -> tuple[int, str]:
    """Exit code and words of a tool; skips if it is not there."""
    command = find(tool)
    if command is None:
        pytest.skip(f"{tool} is not installed; it is among the extra `test`")
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def test_hadolint_has_nothing_to_say() -> None:
    assert run("hadolint", str(ROOT / "Dockerfile")) == (0, "")


def test_compose_fits_the_compose_specification(tmp_path: Path) -> None:
    """By the specification's own JSON schema, which check-jsonschema brings along."""
    schema = ("--builtin-schema", "vendor.compose-spec")
    code, words = run("check-jsonschema", *schema, str(COMPOSE))
    assert code == 0, words
    changed = tmp_path / "docker-compose.yml"
    changed.write_text(COMPOSE.read_text().replace("read_only: true", "read_only: [1]"))
    code, words = run("check-jsonschema", *schema, str(changed))
    assert code == 1
    assert "read_only" in words


def test_the_image_runs_as_nobody_and_holds_no_weights() -> None:
    final = (ROOT / "Dockerfile").read_text().split("FROM ")[-1]
    assert "\nUSER 10001\n" in final
    assert "\nHEALTHCHECK " in final
    assert re.search(r'^ENTRYPOINT \["', final, re.MULTILINE)  # exec form: signals arrive
    copied = re.findall(r"^COPY .*", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert all(
        re.search(r"(pyproject|engine|server|loadtest|training|--from)", line) for line in copied
    )
    listed = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in listed if line and not line.startswith("#")]
    assert rules[0] == "*"  # nothing but what the rest lets in


_VARIABLE = re.compile(r"\$\{(\w+)(?::-([\w.-]*))?\}|\$(\w+)")


def test_every_stage_is_found_before_an_argument_is_read() -> None:
    """Older buildahs look for the stages that are needed with what the command line gave alone:
    so a variable in FROM says its default, and the same as the ARG that declares it."""
    text = (ROOT / "Dockerfile").read_text()
    declared = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    stages: list[str] = []
    for base, name in re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE):
        for braced, default, bare in _VARIABLE.findall(base):
            assert not bare, base
            assert default == declared[braced], base
        plain = _VARIABLE.sub(lambda match: match[2], base)
        assert plain in stages or ":" in plain, plain  # a stage before it, or an image
        for variant in ("cpu", "cuda"):
            assert _VARIABLE.sub(variant, base) in [*stages, plain]
        stages.append(name)
    assert len(stages) == len(re.findall(r"^FROM ", text, re.MULTILINE)) == 4


@pytest.mark.parametrize("name", ["server", "server-gpu", "prometheus", "grafana"])
def test_services_have_no_more_rights_than_they_need(name: str) -> None:
    service = compose()["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["tmpfs"] == ["/tmp"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    tag = service["image"].rpartition(":")[2]
    assert tag not in ("", "latest")
    for volume in service["volumes"]:
        source = volume.split(":")[0]
        assert (
            (ROOT / source).exists() if source.startswith(".") else source in compose()["volumes"]
        )


def test_compose_fits_the_server() -> None:
    services = compose()["services"]
    grace = int(services["server"]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings().drain_seconds
    given = services["server"]["environment"]
    environment = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", given[name]) for name in given}
    assert load_settings(None, environment, {"insecure": True}).open_metrics
    assert {s["profiles"][0] for s in services.values() if "profiles" in s} == {"cpu", "gpu"}
    for service in services.values():
        for other in service.get("depends_on", ()):
            assert "healthcheck" in services[other]
    alias = services["server"]["networks"]["default"]["aliases"][0]
    scrape = yaml.safe_load((ROOT / "configs/prometheus/prometheus.yml").read_text())
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"] == [f"{alias}:8000"]


def test_compose_starts_services_again() -> None:
    for service in compose()["services"].values():
        assert service["restart"] == "unless-stopped"


def test_grafana_finds_its_dashboards_and_data() -> None:
    volumes = dict(volume.split(":")[:2] for volume in compose()["services"]["grafana"]["volumes"])
    provider = yaml.safe_load((PROVISIONING / "dashboards/specserve.yml").read_text())
    assert volumes["./configs/grafana/dashboards"] == provider["providers"][0]["options"]["path"]
    assert volumes["./configs/grafana/provisioning"] == "/etc/grafana/provisioning"
    source = yaml.safe_load((PROVISIONING / "datasources/prometheus.yml").read_text())
    assert source["datasources"][0]["url"] == "http://prometheus:9090"
    home = compose()["services"]["grafana"]["environment"]
    shown = Path(home["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).name
    assert (ROOT / "configs/grafana/dashboards" / shown).exists()


def test_kubernetes_runs_it_safely() -> None:
    pod = kubernetes("StatefulSet")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/models", "/tmp"} <= mounted  # all that is written to
    probes = {name: container[name]["httpGet"]["path"] for name in container if "Probe" in name}
    assert probes == {
        "startupProbe": "/health", "livenessProbe": "/livez", "readinessProbe": "/readyz",
    }  # fmt: skip
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    flags = {"host": container["args"][2]}
    settings = load_settings(None, environment, flags)  # refused without a key
    assert not settings.insecure
    paused = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > settings.drain_seconds + paused


def test_kubernetes_objects_find_each_other() -> None:
    labels = kubernetes("StatefulSet")["spec"]["template"]["metadata"]["labels"]
    assert kubernetes("Service")["spec"]["selector"] == labels
    assert kubernetes("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    pool = kubernetes("InferencePool")["spec"]
    assert pool["selector"]["matchLabels"] == labels
    [container] = kubernetes("StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert pool["targetPorts"][0]["number"] == container["ports"][0]["containerPort"]


def test_gateways_find_the_metrics_they_choose_by() -> None:
    """Names and labels of the inference extension's protocol for model servers."""
    families = {family.name: family for family in text_string_to_metric_families(scrape())}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        [sample] = families[f"vllm:{name}"].samples
        assert families[f"vllm:{name}"].type == "gauge"
        assert sample.value >= 0
    [info] = families["vllm:cache_config_info"].samples
    assert int(info.labels["block_size"]) > 0
    assert int(info.labels["num_gpu_blocks"]) > 0
    text = (ROOT / "configs/kubernetes/specserve.yaml").read_text()
    for name in re.findall(r"vllm:\w+", text):
        assert name in families
