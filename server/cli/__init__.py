"""The `specserve` command: serve, generate, pull, audit, plan, doctor.

Exit codes: 0 done, 1 the engine died, a request failed or an audit found a fault, 2 a mistake
in the command, the settings or the model, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from engine.errors import ConfigurationError, EngineError, InvalidRequest
from server import logs
from server.api.ops import version
from server.cli import audit, plan
from server.cli.configure import did_you_mean, flag_of, load_settings
from server.cli.console import Console, LogConsole
from server.cli.settings import Settings

EXIT_FAILED = 1
EXIT_USAGE = 2

_GIVEN = "given_"  # prefix of the parsed flags that are settings


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"specserve: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code.

    Args:
        arguments: without the program's name; None = the process's own.
    """
    parser = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = _flags_of(parser, options.command)
        parser.error(
            f"there is no {unknown[0]} here{did_you_mean(unknown[0].split('=')[0], known)}"
        )
    signal.signal(signal.SIGTERM, _terminate)  # also as process 1 of a container
    command: Callable[[argparse.Namespace, Settings], int] = options.run
    try:
        settings = load_settings(options.config, os.environ, _given(options))
        return command(options, settings)
    except (ConfigurationError, InvalidRequest) as error:
        return _complain(error, EXIT_USAGE)
    except EngineError as error:
        return _complain(error, EXIT_FAILED)
    except BrokenPipeError:  # the reader of our output has gone, as in `specserve doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def make_parser() -> argparse.ArgumentParser:
    """The parser, with a flag for every setting."""
    parser = _Parser(
        prog="specserve",
        description="OpenAI-compatible inference with lossless speculative decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"specserve {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = _add_command(commands, "serve", _serve, "serve a model over HTTP")
    serve.add_argument("source", nargs="?", metavar="MODEL", help="same as --model")
    serve.add_argument(
        "--print-config", action="store_true", help="print the effective settings as YAML and exit"
    )
    generate = _add_command(commands, "generate", _generate, "answer one prompt, without a server")
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.add_argument("--max-tokens", type=int, default=256, help="most tokens (256)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default) to 2")
    generate.add_argument("--seed", type=int, help="makes a temperature above 0 repeatable")
    generate.add_argument(
        "--raw", action="store_true", help="continue the text; do not use the chat template"
    )
    pull = _add_command(commands, "pull", _pull, "fetch a model, so that later starts are quick")
    pull.add_argument("source", nargs="?", metavar="MODEL", help="same as --model")
    audit.add_arguments(
        _add_command(
            commands, "audit", _audit, "check that speculation changes nothing that is said"
        )
    )
    plan.add_arguments(
        _add_command(
            commands, "plan", _plan, "work out when speculation pays, without a model", bare=True
        )
    )
    _add_command(commands, "doctor", _doctor, "show what this machine offers, and what is missing")
    return parser


def _add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace, Settings], int],
    help_text: str,
    *,
    bare: bool = False,
) -> argparse.ArgumentParser:
    """Adds a command; one that is `bare` has no settings."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text, allow_abbrev=False
    )
    parser.set_defaults(run=run, source=None, config=None)
    if bare:
        return parser
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    settings = parser.add_argument_group(
        "settings", "also keys of the YAML file, and SPECSERVE_... in the environment"
    )
    for field_name, field in Settings.model_fields.items():
        _add_setting(settings, field_name, field)
    return parser


def _add_setting(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    default = "" if field.default in (None, ()) else f" ({str(field.default).lower()})"
    help_text = f"{field.description}{default}".replace("%", "%%")
    destination, flag = _GIVEN + name, flag_of(name)
    if field.annotation is bool:
        group.add_argument(
            flag,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            dest=destination,
            help=help_text,
        )
        return
    is_choice = get_origin(field.annotation) is Literal
    group.add_argument(
        flag,
        default=argparse.SUPPRESS,
        dest=destination,
        help=help_text,
        metavar="|".join(get_args(field.annotation)) if is_choice else name.split("_")[-1].upper(),
    )


def _given(options: argparse.Namespace) -> dict[str, object]:
    """The settings among the parsed options."""
    given = {
        name.removeprefix(_GIVEN): value
        for name, value in vars(options).items()
        if name.startswith(_GIVEN)
    }
    if options.source is not None:
        if given.get("model", options.source) != options.source:
            raise ConfigurationError(
                f"MODEL is {options.source!r} and --model is {given['model']!r}; name one."
            )
        given["model"] = options.source
    return given


def _flags_of(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """Every flag that `command` knows."""
    return [
        flag
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for flag in action.choices[command]._option_string_actions
    ]


def _serve(options: argparse.Namespace, settings: Settings) -> int:
    if options.print_config:
        print(settings.to_yaml(), end="")
        return 0
    _set_up_logging(settings)
    settings.server_options()  # tells what is wrong with the keys
    with LogConsole() if settings.log_format == "json" else Console() as console:
        from server.cli.serve import bind, serve

        bind(settings.host, settings.port).close()  # a taken port is told before a long download
        directory, name = _find_model(settings, console)
        settings = _find_draft_model(settings, console)
        _hide_progress_bars()
        return serve(settings, directory, name, console)


def _generate(options: argparse.Namespace, settings: Settings) -> int:
    _set_up_logging(settings, least=logging.WARNING)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    with Console() as console:
        from server.cli.generate import Prompt, generate

        directory, _ = _find_model(settings, console)
        settings = _find_draft_model(settings, console)
        _hide_progress_bars()
        prompt = Prompt(
            text,
            raw=options.raw,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
        asyncio.run(generate(prompt, settings, directory, console))
    return 0


def _pull(_: argparse.Namespace, settings: Settings) -> int:
    with Console() as console:
        directory, _name = _find_model(settings, console)
    print(directory)
    return 0


def _audit(options: argparse.Namespace, settings: Settings) -> int:
    _set_up_logging(settings, least=logging.WARNING)
    command = audit.read_arguments(options)
    with Console() as console:
        directory, _ = _find_model(settings, console)
        settings = _find_draft_model(settings, console)
        _hide_progress_bars()
        return audit.run(command, settings, directory, console)


def _plan(options: argparse.Namespace, _: Settings) -> int:
    return plan.run(options)


def _doctor(_: argparse.Namespace, settings: Settings) -> int:
    from server.cli.doctor import doctor

    _hide_progress_bars()
    return doctor(settings)


def _find_model(settings: Settings, console: Console) -> tuple[Path, str]:
    """The model's local directory and its name in the API."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when it is imported
    from engine.model import sources

    directory = sources.resolve(settings.model, report=console.say, progress=console.progress)
    name = settings.served_model_name or sources.display_name(settings.model, directory)
    return directory, name


def _find_draft_model(settings: Settings, console: Console) -> Settings:
    """The settings with `draft_model` resolved to a local directory."""
    if settings.draft_model is None:
        return settings
    from engine.model import sources

    found = sources.resolve(settings.draft_model, report=console.say, progress=console.progress)
    return settings.model_copy(update={"draft_model": str(found)})


def _hide_progress_bars() -> None:
    """Weights load in a second or two; transformers' bars would only smear the output."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _set_up_logging(settings: Settings, least: int = logging.DEBUG) -> None:
    level = max(least, logging.getLevelNamesMapping()[settings.log_level.upper()])
    logs.set_up(level, settings.log_format)


def _complain(error: Exception, code: int) -> int:
    print(f"specserve: {error}", file=sys.stderr)
    return code


def _terminate(number: int, _frame: object) -> NoReturn:
    """Leaves in good order: temporary directories are removed on the way out."""
    sys.exit(128 + number)
