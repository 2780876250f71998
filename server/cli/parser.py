"""The command line's grammar: the commands, and a flag for every setting."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from pydantic.fields import FieldInfo

from server.cli import audit, bench, chat, plan, train
from server.cli.commands import (
    run_audit,
    run_bench,
    run_chat,
    run_doctor,
    run_generate,
    run_plan,
    run_pull,
    run_serve,
    run_train,
)
from server.cli.configure import GIVEN, flag_of
from server.cli.settings import Settings
from server.version import version

EXIT_USAGE = 2


class _Parser(argparse.ArgumentParser):
    """Complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"specserve: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser, with a flag for every setting."""
    parser = _Parser(
        prog="specserve",
        description="OpenAI-compatible inference with lossless speculative decoding.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"specserve {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = _add_command(commands, "serve", run_serve, "serve a model over HTTP")
    serve.add_argument("source", nargs="?", metavar="MODEL", help="same as --model")
    serve.add_argument(
        "--print-config", action="store_true", help="print the effective settings as YAML and exit"
    )
    generate = _add_command(
        commands, "generate", run_generate, "answer one prompt, without a server"
    )
    generate.add_argument("prompt", help="the prompt; - reads it from standard input")
    generate.add_argument("--max-tokens", type=int, default=256, help="most tokens (256)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default) to 2")
    generate.add_argument("--seed", type=int, help="makes a temperature above 0 repeatable")
    generate.add_argument(
        "--raw", action="store_true", help="continue the text; do not use the chat template"
    )
    chat.add_arguments(
        _add_command(commands, "chat", run_chat, "talk with a model, and see speculation happen")
    )
    bench.add_arguments(
        _add_command(commands, "bench", run_bench, "measure what speculation brings here")
    )
    pull = _add_command(commands, "pull", run_pull, "fetch a model, so that later starts are quick")
    pull.add_argument("source", nargs="?", metavar="MODEL", help="same as --model")
    audit.add_arguments(
        _add_command(
            commands, "audit", run_audit, "check that speculation changes nothing that is said"
        )
    )
    _add_tools(commands)
    return parser


def _add_tools(commands: Any) -> None:
    """Commands beside the model's own."""
    plan.add_arguments(
        _add_command(
            commands,
            "plan",
            run_plan,
            "work out when speculation pays, without a model",
            bare=True,
        )
    )
    train.add_arguments(
        _add_command(
            commands, "train-drafter", run_train, "make a drafter for any model", bare=True
        )
    )
    _add_command(
        commands, "doctor", run_doctor, "show what this machine offers, and what is missing"
    )


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
    destination, flag = GIVEN + name, flag_of(name)
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


def flags_of(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """Every flag that `command` knows."""
    return [
        flag
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for flag in action.choices[command]._option_string_actions
    ]
