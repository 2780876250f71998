"""`specserve chat`: a conversation on the terminal, with a running server or one of its own."""

from __future__ import annotations

import argparse
import os

from engine.errors import ConfigurationError
from server.cli.configure import flag_of, given_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_server(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--max-tokens", type=int, help="most tokens of an answer; default: all the room there is"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) to 2")
    parser.add_argument("--seed", type=int, help="makes a temperature above 0 repeatable")
    parser.add_argument(
        "--colours", action="store_true", help="show who guessed a token, from the start"
    )
    parser.add_argument(
        "--history",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep what was typed in a private file of the user's state directory (true)",
    )
    parser.add_argument(
        "--lines",
        action="store_true",
        help="from a pipe: each line is a message, instead of all of it",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which server is meant."""
    parser.add_argument("source", nargs="?", metavar="MODEL", help="same as --model")
    parser.add_argument(
        "--url", type=_url, help="a running server; default: one is started, and stopped at the end"
    )
    parser.add_argument(
        "--api-key-env", metavar="VAR", help="environment variable that holds the server's key"
    )


def _url(text: str) -> str:
    from loadtest.arguments import base_url

    return base_url(text)


def read_key(variable: str | None) -> str:
    """The key that a variable holds; empty without one.

    Raises:
        ConfigurationError: it is not set.
    """
    if variable is None:
        return ""
    if key := os.environ.get(variable, ""):
        return key
    raise ConfigurationError(f"--api-key-env {variable}: that variable is not set or empty.")


def refuse_settings(options: argparse.Namespace) -> None:
    """A running server has settings of its own.

    Raises:
        ConfigurationError: the command line sets some.
    """
    for name in given_settings(options):
        flag = "MODEL" if options.source is not None and name == "model" else flag_of(name)
        raise ConfigurationError(
            f"--url is {options.url}, a server that has its settings already; leave {flag} out."
        )


def run(options: argparse.Namespace, url: str, key: str) -> int:
    """Talks until there is no more to say.

    Args:
        options: what `add_arguments` parses.
        url: of the server, without `/v1`.
        key: that it wants; empty = none.

    Returns:
        The exit code: 0, or 1 if the server failed.
    """
    from server.terminal.main import Options, converse
    from server.terminal.wishes import Wishes

    wishes = Wishes(options.temperature, options.max_tokens, seed=options.seed)
    return converse(
        Options(
            url,
            key,
            wishes,
            system=options.system,
            colours=options.colours,
            history=options.history,
            lines=options.lines,
        )
    )
