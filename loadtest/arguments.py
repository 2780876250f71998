"""The arguments of `python -m loadtest run`, and what each may look like."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.plan import Arm, Level, Target
from loadtest.workloads import NAMES

#: `--ab NAME`: two arms, the baseline first.
AB_ARMS: Mapping[str, tuple[Arm, Arm]] = {
    "speculation": (
        Arm("speculation off", {"speculation": {"enabled": False}}),
        Arm("speculation on", {"speculation": {"enabled": True}}),
    ),
    "prediction": (Arm("no prediction"), Arm("prediction", prediction=True)),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest", description="Load test for OpenAI-compatible servers."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="send load and report what came back")
    _add_where(run)
    _add_what(run)
    _add_how_much(run)
    _add_outcome(run)
    return parser


def _add_where(run: argparse.ArgumentParser) -> None:
    add = run.add_argument_group("where to").add_argument
    add(
        "--target",
        action="append",
        type=_target,
        metavar="[NAME=]URL",
        help="server to test; repeatable, the first is the baseline "
        "(default: http://127.0.0.1:8000)",
    )
    add("--model", help="model id to send (default: the first of each server's /v1/models)")
    add("--api-key-env", metavar="VAR", help="environment variable that holds the API key")
    add(
        "--ab",
        choices=tuple(AB_ARMS),
        help="compare two arms on each server: speculation off and on, or without and with "
        "each prompt's `prediction`",
    )
    add(
        "--arm",
        action="append",
        type=_arm,
        metavar="NAME=JSON",
        help="a way of asking: JSON fields for every request; repeatable, first is baseline",
    )


def _add_what(run: argparse.ArgumentParser) -> None:
    add = run.add_argument_group("what to ask").add_argument
    add(
        "--workload",
        default="builtin",
        metavar="NAME|FILE.jsonl",
        help=f"{', '.join(NAMES)}, or a JSONL file of prompts (default: builtin)",
    )
    add("--prompts", type=_count, default=64, help="synthetic prompts to make (default: 64)")
    add(
        "--prompt-words",
        type=_range,
        default=(32, 256),
        metavar="MIN[:MAX]",
        help="length of synthetic prompts in words (default: 32:256)",
    )
    add(
        "--prefix-groups",
        type=_count,
        default=4,
        help="distinct prefixes of shared-prefix (default: 4)",
    )
    add("--endpoint", choices=("chat", "completions"), default="chat")
    add("--template", choices=("chatml",), help="wrap completions prompts")
    add(
        "--max-tokens",
        type=_range,
        default=(128, 128),
        metavar="MIN[:MAX]",
        help="tokens to ask for (default: 128)",
    )
    add("--max-turns", type=_count, help="turns of a conversation to send (default: all)")
    add("--temperature", type=_not_negative, default=0.0, help="default: 0, greedy")
    add("--seed", type=int, default=0, help="of prompts, lengths, arrivals and requests")
    add("--ignore-eos", action="store_true", help="always generate max_tokens (an extension)")
    add(
        "--isolate-cache",
        action="store_true",
        help="a cache_salt for each block, so that lanes share no prefix cache (an extension)",
    )
    add("--body", type=_json_object, metavar="JSON", help="fields for every request")


def _add_how_much(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("how much")
    load = group.add_mutually_exclusive_group()
    load.add_argument(
        "--concurrency",
        type=_concurrency,
        metavar="N[,N...]",
        help="closed loop: requests always in flight (default: 1)",
    )
    load.add_argument(
        "--rate", type=_rates, metavar="R[,R...]", help="open loop: Poisson arrivals a second"
    )
    add = group.add_argument
    add(
        "--rounds",
        type=_count,
        help="rounds in which lanes alternate, ABBA (default: 1, or 6 to compare)",
    )
    add(
        "--requests",
        type=_count,
        help="requests for each lane and level over all rounds (default without --duration: "
        "4 times the concurrency a round, at least 8)",
    )
    add(
        "--duration",
        type=_positive,
        metavar="S",
        help="seconds for the whole run; started requests may finish",
    )
    add("--timeout", type=_positive, default=300.0, metavar="S", help="for a request (300)")
    add("--warmup", type=_whole, default=4, help="unmeasured requests for each lane (default: 4)")


def _add_outcome(run: argparse.ArgumentParser) -> None:
    add = run.add_argument_group("outcome").add_argument
    add("--slo-ttft-ms", type=_positive, help="a good request's longest TTFT")
    add("--slo-tpot-ms", type=_positive, help="a good request's longest TPOT")
    add("--check-equal", action="store_true", help="all lanes must give the same answers")
    add(
        "--max-error-rate",
        type=_not_negative,
        default=0.01,
        help="share of failures that is still a success (default: 0.01)",
    )
    add("--output", type=Path, metavar="DIR", help="write results.json, report.md and plots")


def _target(text: str) -> Target:
    name, equals, url = text.partition("=")
    if not equals or "://" in name:
        name, url = "server", text
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not like name=http://host:port")
    return Target(name, base_url(url))


def base_url(text: str) -> str:
    """A server's address without `/v1`, which may be given or not.

    Raises:
        ArgumentTypeError: it is none, or holds a password.
    """
    url = text.rstrip("/").removesuffix("/v1")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r} is not like http://host:port")
    if parts.username is not None:
        raise argparse.ArgumentTypeError(
            "a URL with a password would end up in reports; use --api-key-env"
        )
    return url


def _arm(text: str) -> Arm:
    name, _, body = text.partition("=")
    if not name or not body:
        raise argparse.ArgumentTypeError(f'{text!r} is not like name={{"top_k": 5}}')
    return Arm(name, _json_object(body))


def _json_object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _whole(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _not_negative(text: str) -> float:
    return 0.0 if float(text) == 0 else _positive(text)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    bounds = _count(low), _count(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} runs backwards; write MIN:MAX")
    return bounds


def _concurrency(text: str) -> list[Level]:
    return [Level("concurrency", _count(part)) for part in text.split(",")]


def _rates(text: str) -> list[Level]:
    return [Level("rate", _positive(part)) for part in text.split(",")]
