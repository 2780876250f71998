"""Settings: precedence, one way to spell each of them, and errors that say where."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from engine.config import EngineConfig, SpeculationConfig
from engine.draft.registry import DEFAULT, default_drafters
from engine.errors import ConfigurationError
from server.api.options import ServerOptions
from server.cli.configure import flag_of, load_settings
from server.cli.parser import make_parser
from server.cli.settings import Settings
from server.cli.values import is_loopback, parse_size

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "port: 1\nmax_draft: 1\npage_size: 1\n")
    environment = {"SPECSERVE_PORT": "2", "SPECSERVE_MAX_DRAFT": "2", "HOME": "/x"}
    settings = load_settings(file, environment, {"port": "3"})
    assert (settings.port, settings.max_draft, settings.page_size) == (3, 2, 1)
    assert settings.max_sequences == Settings().max_sequences


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    named = {"SPECSERVE_CONFIG": str(write(tmp_path / "a.yaml", "port: 1\n"))}
    assert load_settings(None, named, {}).port == 1
    other = write(tmp_path / "b.yaml", "port: 2\n")
    assert load_settings(other, named, {}).port == 2


def test_empty_variables_and_those_of_kubernetes_are_no_settings() -> None:
    environment = {
        "SPECSERVE_MODEL": "",
        "SPECSERVE_HOME": "/models",
        "SPECSERVE_PORT": "tcp://10.0.0.1:8000",
        "SPECSERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "SPECSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "SPECSERVE_SERVICE_HOST": "10.0.0.1",
        "SPECSERVE_SERVICE_PORT": "8000",
        "SPECSERVE_SERVICE_PORT_HTTP": "8000",
    }
    assert load_settings(None, environment, {}) == Settings()


def test_unknown_names_are_errors_with_a_guess(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "max-draft: 1\n")
    with pytest.raises(ConfigurationError, match=r"a\.yaml sets 'max-draft'.*mean max_draft\?"):
        load_settings(file, {}, {})
    with pytest.raises(ConfigurationError, match=r"SPECSERVE_PROT is.*mean SPECSERVE_PORT\?"):
        load_settings(None, {"SPECSERVE_PROT": "1"}, {})
    with pytest.raises(ConfigurationError, match=r"SPECSERVE_QQQ is set, which is no setting\.$"):
        load_settings(None, {"SPECSERVE_QQQ": "1"}, {})


def test_a_wrong_value_names_the_place_it_came_from(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "port: 70000\n")
    with pytest.raises(ConfigurationError, match=r"^port in .*a\.yaml is 70000: .*65535\.$"):
        load_settings(file, {}, {})
    with pytest.raises(ConfigurationError, match=r"^SPECSERVE_DTYPE is 'bf16': .*'bfloat16'"):
        load_settings(file, {"SPECSERVE_DTYPE": "bf16", "SPECSERVE_PORT": "1"}, {})
    with pytest.raises(ConfigurationError, match=r"^--max-draft is '-1': "):
        load_settings(None, {}, {"max_draft": "-1"})


@pytest.mark.parametrize(
    ("text", "words"), [("a: [", "not valid YAML"), ("- a\n", "must hold settings")]
)
def test_files_that_hold_no_settings(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_settings(write(tmp_path / "a.yaml", text), {}, {})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_settings(tmp_path / "missing.yaml", {}, {})
    assert load_settings(write(tmp_path / "a.yaml", "# nothing\n"), {}, {}) == Settings()


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("500MB", 500_000_000), ("1.5 kib", 1536), ("7", 7), (7, 7), ("3B", 3)],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size
    assert load_settings(None, {}, {"kv_cache_memory": text}).kv_cache_memory == size


@pytest.mark.parametrize("text", ["2 gigs", "GiB", "-1", "1e3", "0", "2GiB2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--kv-cache-memory"):
        load_settings(None, {}, {"kv_cache_memory": text})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_word(host: str) -> None:
    assert is_loopback(host)
    assert load_settings(None, {"SPECSERVE_HOST": host}, {}).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example", "localhost.evil"])
def test_a_host_that_others_reach_must_be_meant(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--insecure"):
        load_settings(None, {"SPECSERVE_HOST": host}, {})
    assert load_settings(None, {"SPECSERVE_HOST": host}, {"insecure": True}).host == host


def test_what_is_printed_is_read_back(tmp_path: Path) -> None:
    settings = load_settings(
        None, {}, {"kv_cache_memory": "1GiB", "served_model_name": "naïve: #1", "drafter": "none"}
    )
    assert load_settings(write(tmp_path / "a.yaml", settings.to_yaml()), {}, {}) == settings
    assert list(yaml.safe_load(settings.to_yaml())) == list(Settings.model_fields)


def test_every_setting_is_a_flag_of_every_command() -> None:
    parser = make_parser()
    for command in ("serve", "pull", "doctor"):
        for name, field in Settings.model_fields.items():
            value = [] if field.annotation is bool else ["1"]
            parsed = vars(parser.parse_args([command, flag_of(name), *value]))
            assert parsed[f"given_{name}"] == (True if field.annotation is bool else "1")
            assert field.description


def test_defaults_are_the_engines_and_the_servers() -> None:
    settings = Settings()
    made = settings.engine_config("x")
    # The engine leaves its default drafter to the registry; people shall see the name.
    assert made == EngineConfig(made.model, speculation=SpeculationConfig(drafter=DEFAULT))
    assert default_drafters(made.speculation) == default_drafters(SpeculationConfig())
    assert made.model.path == "x"
    assert settings.server_options() == ServerOptions()


def test_values_reach_the_engine_and_the_server() -> None:
    settings = Settings(
        dtype="float32", threads=3, max_model_len=9, kv_cache_memory="1KiB", prefix_reuse=False,
        max_sequences=2, max_batch_tokens=5, drafter="none", max_draft=7, drain_seconds=1.5,
        max_body="1MB",
    )  # type: ignore[arg-type]  # fmt: skip
    made = settings.engine_config("x")
    assert (made.model.dtype, made.model.max_model_len, made.threads) == ("float32", 9, 3)
    assert (made.cache.memory_bytes, made.cache.prefix_reuse) == (1024, False)
    assert (made.scheduler.max_sequences, made.scheduler.max_batch_tokens) == (2, 5)
    assert (made.speculation.drafter, made.speculation.max_draft) == ("none", 7)
    options = settings.server_options()
    assert (options.drain_seconds, options.max_body_bytes) == (1.5, 1_000_000)


def test_a_model_has_several_names() -> None:
    settings = load_settings(None, {"SPECSERVE_SERVED_MODEL_NAME": "a/b, c,a/b ,d"}, {})
    assert settings.served_model_name[0] == "a/b"
    assert settings.server_options().aliases == ("c", "d")
    assert Settings().server_options().aliases == ()


def test_settings_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_batch_tokens is 5"):
        Settings(max_batch_tokens=5, max_sequences=6).engine_config("x")


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_the_configurations_that_come_along_are_valid(file: Path) -> None:
    load_settings(file, {}, {}).engine_config("x")


# -- drafters --------------------------------------------------------------------------------


def test_one_drafter_is_the_short_form_of_several() -> None:
    one, same = Settings(drafter="lookup"), Settings(drafters="lookup")  # type: ignore[arg-type]
    for settings in (Settings(), one, same):
        assert default_drafters(settings.engine_config("x").speculation) == ("lookup",)
    settings = load_settings(None, {}, {"drafters": "lookup, model"})
    assert settings.drafter == "lookup"
    assert default_drafters(settings.engine_config("x").speculation) == ("lookup", "model")
    from_environment = load_settings(None, {"SPECSERVE_DRAFTERS": "model,lookup"}, {})
    assert from_environment.drafters == ("model", "lookup")


@pytest.mark.parametrize("drafters", ["model,lookup", "model"])
def test_several_drafters_are_read_back(tmp_path: Path, drafters: str) -> None:
    settings = load_settings(None, {}, {"drafters": drafters, "lookup_store_memory": "64MiB"})
    assert load_settings(write(tmp_path / "a.yaml", settings.to_yaml()), {}, {}) == settings
    assert settings.engine_config("x").speculation.lookup_store_bytes == 64 << 20


def test_drafters_of_a_file_are_a_list(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "drafters: [lookup, model]\n")
    assert load_settings(file, {}, {}).drafters == ("lookup", "model")


def test_drafters_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="drafter is none, but drafters is lookup, model"):
        load_settings(None, {"SPECSERVE_DRAFTER": "none"}, {"drafters": "lookup,model"})
    with pytest.raises(ConfigurationError, match="--drafters is"):
        load_settings(None, {}, {"drafters": "lookup,modle"})
    for wrong in ("lookup,none", "lookup,lookup"):
        with pytest.raises(ConfigurationError, match="drafters is "):
            load_settings(None, {}, {"drafters": wrong}).engine_config("x")
