"""Where settings come from: YAML file < environment < flags. Says where a wrong one was set."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from engine.errors import ConfigurationError
from server.cli.settings import SECRETS, Settings

PREFIX = "SPECSERVE_"
CONFIG_VARIABLE = PREFIX + "CONFIG"

#: Prefix of the parsed flags that are settings.
GIVEN = "given_"

#: Variables with the prefix that are no settings: the configuration file, and the cache directory.
_OTHER_VARIABLES = (CONFIG_VARIABLE, PREFIX + "HOME")

#: What Kubernetes puts into every pod beside a service that is called specserve.
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_\w+")


def load_settings(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> Settings:
    """Merges file, environment and flags; later ones win.

    Args:
        file: the YAML file; None = the one that $SPECSERVE_CONFIG names, if it does.
        environment: such as `os.environ`; an empty value counts as none.
        flags: field names and values that the command line gave.

    Raises:
        ConfigurationError: naming the setting, where it was set, and what is wrong.
    """
    if file is None and (named := environment.get(CONFIG_VARIABLE)):
        file = Path(named)
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for name, value in (_read_file(file) if file else {}).items():
        values[name], origins[name] = value, f"{name} in {file}"
    for variable, name, text in _read_environment(environment):
        values[name], origins[name] = text, variable
    for name, value in flags.items():
        values[name], origins[name] = value, flag_of(name)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, origins)) from None


def given_settings(options: argparse.Namespace) -> dict[str, object]:
    """The settings among the parsed options."""
    given = {
        name.removeprefix(GIVEN): value
        for name, value in vars(options).items()
        if name.startswith(GIVEN)
    }
    if options.source is not None:
        if given.get("model", options.source) != options.source:
            raise ConfigurationError(
                f"MODEL is {options.source!r} and --model is {given['model']!r}; name one."
            )
        given["model"] = options.source
    return given


def flag_of(name: str) -> str:
    """The flag of a field: --max-draft of max_draft."""
    return "--" + name.replace("_", "-")


def did_you_mean(
    name: str, known: Iterable[str], show: Callable[[str], str] = lambda name: name
) -> str:
    """The end of a sentence: the nearest known name, as `show` writes it, or a full stop."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {show(near[0])}?" if near else "."


def _read_file(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the configuration {file} cannot be read: {error}.") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"{file} is not valid YAML: {reason}.") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file} must hold settings, one `name: value` a line.")
    for name in content:
        if name not in Settings.model_fields:
            hint = did_you_mean(str(name), Settings.model_fields)
            raise ConfigurationError(f"{file} sets {name!r}, which is no setting{hint}")
    return content


def _read_environment(environment: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    """Yields (variable, field, text)."""
    for variable, text in environment.items():
        if not text or not _is_setting(variable, text):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in Settings.model_fields:
            near = did_you_mean(name, Settings.model_fields, lambda n: PREFIX + n.upper())
            raise ConfigurationError(f"{variable} is set, which is no setting{near}")
        yield variable, name, text


def _is_setting(variable: str, text: str) -> bool:
    """Whether a variable means to be a setting."""
    if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES:
        return False
    name = variable.removeprefix(PREFIX)
    return not _SERVICE_LINK.fullmatch(name) and not (name == "PORT" and "://" in text)


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """The first thing that is wrong, as one sentence."""
    first = error.errors(include_url=False)[0]
    message = str(first["msg"]).removeprefix("Value error, ")
    if not first["loc"]:
        return f"{message}."
    name = str(first["loc"][0])
    reason = message[0].lower() + message[1:]
    shown = "" if name in SECRETS else f" is {first['input']!r}"
    return f"{origins.get(name, name)}{shown}: {reason}."
