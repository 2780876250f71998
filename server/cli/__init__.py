"""The `specserve` command: serve, generate, chat, bench, pull, audit, plan, train-drafter,
doctor.

Exit codes: 0 done, 1 the engine died, a request failed or an audit found a fault, 2 a mistake
in the command, the settings or the model, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from engine.errors import ConfigurationError, EngineError, InvalidRequest
from server.cli.configure import did_you_mean, given_settings, load_settings
from server.cli.parser import EXIT_USAGE, flags_of, make_parser
from server.cli.settings import Settings

EXIT_FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code.

    Args:
        arguments: without the program's name; None = the process's own.
    """
    parser = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = flags_of(parser, options.command)
        parser.error(
            f"there is no {unknown[0]} here{did_you_mean(unknown[0].split('=')[0], known)}"
        )
    signal.signal(signal.SIGTERM, _terminate)  # also as process 1 of a container
    command: Callable[[argparse.Namespace, Settings], int] = options.run
    try:
        settings = load_settings(options.config, os.environ, given_settings(options))
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


def _complain(error: Exception, code: int) -> int:
    print(f"specserve: {error}", file=sys.stderr)
    return code


def _terminate(number: int, _frame: object) -> NoReturn:
    """Leaves in good order: temporary directories are removed on the way out."""
    sys.exit(128 + number)
