"""`python -m loadtest run`: the command line of the load test."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from loadtest.options import parse
from loadtest.plan import UsageError
from loadtest.session import CANNOT_START, conduct


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the load test and returns the exit status.

    Tables go to standard output, everything else to standard error.
    """
    try:
        options = parse(arguments)
        return conduct(options, _api_key(options.api_key_env))
    except UsageError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return CANNOT_START


def _api_key(variable: str | None) -> str:
    if variable is None:
        return ""
    if key := os.environ.get(variable, ""):
        return key
    raise UsageError(f"--api-key-env {variable}: that environment variable is not set or empty.")


if __name__ == "__main__":
    sys.exit(main())
