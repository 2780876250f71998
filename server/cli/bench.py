"""`specserve bench`: does speculation pay here? The load test, with lanes for each drafter."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.draft import registry
from engine.errors import ConfigurationError, EngineUnavailable
from server.cli.chat import add_server

_STATUS_SECONDS = 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add_server(parser)
    add = parser.add_argument
    add(
        "--prompts",
        default="builtin",
        metavar="FILE",
        help="JSON lines with `prompt` or `turns`, or a .txt file with a prompt on each line; or "
        "the name of a workload of the load test (builtin)",
    )
    add("--concurrency", default="1,4,16", help="streams at a time, separated by commas (1,4,16)")
    add("--rounds", default="4", help="in which off, drafters and auto take turns (4)")
    add("--requests", help="for each of them and number of streams, over all rounds")
    add("--duration", metavar="S", help="seconds for all of it; what has begun may finish")
    add("--max-tokens", default="64", metavar="MIN[:MAX]", help="tokens to ask for (64)")
    add("--temperature", default="0", help="0 (default) to 2; every request has a seed")
    add(
        "--check-equal",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="all answers must be those without speculation; default: if greedy",
    )
    add(
        "--output",
        type=Path,
        metavar="DIR",
        help="where report.html, results.json and plots go (specserve-bench)",
        default=Path("specserve-bench"),
    )


def run(options: argparse.Namespace, url: str, key: str) -> int:
    """Measures and reports.

    Args:
        options: what `add_arguments` parses.
        url: of the server, without `/v1`.
        key: that it wants; empty = none.

    Returns:
        The load test's exit code.

    Raises:
        ConfigurationError: the flags do not fit together.
        EngineUnavailable: the server does not answer.
    """
    from loadtest.arguments import make_parser
    from loadtest.options import Options, make_options
    from loadtest.plan import Arm, UsageError
    from loadtest.session import conduct

    arms = [Arm(name, body) for name, body in lanes(_drafters(url, key)).items()]
    try:
        found: Options = make_options(make_parser().parse_args(arguments(options, url)), arms)
        return conduct(found, key, brief=True)
    except UsageError as error:
        raise ConfigurationError(str(error)) from error


def lanes(drafters: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What is compared, by name: off, each drafter alone, and auto, which chooses among them.

    Drafters for grammars are left out, since no prompt has one; and where a single drafter is
    left, auto is the same as it.
    """
    known = registry.choices()  # the server may know others
    alone = [
        name for name in drafters if name not in known or not registry.get(name).reads_grammars
    ]
    made: dict[str, dict[str, Any]] = {"off": {"speculation": {"enabled": False}}}
    if len(alone) > 1:
        made |= {name: {"speculation": {"drafter": name}} for name in alone}
    auto = f"auto ({alone[0]})" if len(alone) == 1 else "auto"
    return made | {auto: {"speculation": {"enabled": True}}}


def arguments(options: argparse.Namespace, url: str) -> list[str]:
    """What the load test is told, but for its arms and the key."""
    greedy = float(options.temperature or 0) == 0
    check = greedy if options.check_equal is None else options.check_equal
    told = {
        "--target": url,
        "--workload": options.prompts,
        "--concurrency": options.concurrency,
        "--rounds": options.rounds,
        "--requests": options.requests,
        "--duration": options.duration,
        "--max-tokens": options.max_tokens,
        "--temperature": options.temperature,
        "--output": str(options.output),
    }
    given = [f"{flag}={value}" for flag, value in told.items() if value is not None]
    return ["run", *given, "--isolate-cache", *(["--check-equal"] if check else [])]


def _drafters(url: str, key: str) -> tuple[str, ...]:
    """Those that the server has loaded."""
    import httpx

    address = f"{url}/v1/speculation/status"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(address, headers=headers, timeout=_STATUS_SECONDS, trust_env=False)
        if answer.status_code == 401:
            raise EngineUnavailable(f"{url} wants a key; name its variable with --api-key-env.")
        answer.raise_for_status()
        return tuple(answer.json()["drafters"])
    except httpx.HTTPError as error:
        raise EngineUnavailable(f"{address} does not answer ({error}). Does it run?") from error
    except (ValueError, LookupError, TypeError):
        raise EngineUnavailable(f"{address} is not what specserve would say.") from None
