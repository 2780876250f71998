"""`specserve plan`: would speculation pay, before anything is loaded?"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from engine.errors import InvalidRequest
from server.cli.formulas import best_draft, break_even_batch, expected_tokens, roofline

#: Tokens per pass at which a mid-range accelerator stops waiting for memory.
DEFAULT_KNEE = 64.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--acceptance", type=float, required=True, help="share of draft tokens accepted, 0 to 1"
    )
    parser.add_argument(
        "--draft-cost",
        type=float,
        default=0.0,
        help="time of one draft round over that of one plain decode step (0)",
    )
    parser.add_argument(
        "--batch", default="1,2,4,8,16,32,64", help="decoding sequences, separated by commas"
    )
    parser.add_argument(
        "--knee",
        type=float,
        default=DEFAULT_KNEE,
        help="tokens per pass at which the machine becomes compute-bound; about 4 to 8 for a "
        f"2-core CPU, 200 for an H200 in bfloat16 ({DEFAULT_KNEE:.0f})",
    )


def run(args: argparse.Namespace, say: Callable[[str], None] = print) -> int:
    """Prints the best draft length and the speed-up by batch size, and where it stops paying.

    Args:
        args: what `add_arguments` parses.
        say: is given the lines.

    Returns:
        0, the exit code.

    Raises:
        InvalidRequest: a value is out of its range.
    """
    acceptance, cost, knee = args.acceptance, args.draft_cost, args.knee
    batches = _batches(args.batch)
    _check(0.0 <= acceptance <= 1.0, "acceptance", acceptance, "from 0 to 1")
    _check(0.0 <= cost < float("inf"), "draft-cost", cost, "0 or more")
    _check(1.0 <= knee < float("inf"), "knee", knee, "1 token or more")
    say(f"{'batch':>6} {'best draft':>11} {'tokens/pass':>12} {'speed-up':>9}")
    for batch in batches:
        draft, gain = best_draft(acceptance, cost, roofline(batch, knee))
        tokens = expected_tokens(acceptance, draft)
        say(f"{batch:>6} {draft:>11} {tokens:>12.2f} {gain:>9.2f}")
    say(_verdict(break_even_batch(acceptance, cost, knee)))
    return 0


def _verdict(last: int | None) -> str:
    if last is None:
        return "Speculation pays at every batch size tried."
    if last == 0:
        return "Speculation pays at no batch size: a draft costs more than it can save."
    return f"Speculation stops paying beyond {last} decoding sequences."


def _batches(given: str | Sequence[int]) -> list[int]:
    try:
        parts = given.split(",") if isinstance(given, str) else given
        batches = [int(part) for part in parts]
    except ValueError:
        batches = []
    valid = bool(batches) and all(1 <= batch <= 65_536 for batch in batches)
    _check(valid, "batch", given, "whole numbers from 1 to 65536, separated by commas")
    return batches


def _check(condition: bool, flag: str, value: object, rule: str) -> None:
    if not condition:
        raise InvalidRequest(f"--{flag} is {value!r}, but it must be {rule}.", flag)
