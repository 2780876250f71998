"""`specserve train-drafter`: a head for any model, from nothing but the model."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from engine.model.sources import DEFAULT_SOURCE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--target", default=DEFAULT_SOURCE, metavar="MODEL", help="the model to draft for"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the drafter")
    parser.add_argument("--kind", default="eagle", help="of drafter: eagle")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="questions to answer, one a line; default: the model thinks of some",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for everything together (60)")
    parser.add_argument(
        "--tokens", type=int, default=500_000, help="answer tokens to learn from (500000)"
    )
    parser.add_argument(
        "--draft-vocab", type=int, default=8192, help="tokens that it may guess (8192)"
    )
    parser.add_argument("--depth", type=int, default=4, help="rounds it is trained for (4)")
    parser.add_argument("--epochs", type=int, default=10, help="at most, within the time (10)")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="at its peak (0.0005)")
    parser.add_argument("--seed", type=int, default=0, help="of text and training (0)")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="compute threads (one per core)",
    )


def run(args: argparse.Namespace, target: Path) -> int:
    """Makes the drafter, and says how to serve it.

    Args:
        args: what `add_arguments` parses.
        target: local directory of the target.

    Returns:
        0, the exit code.

    Raises:
        EngineError: it cannot be made like this, and what to change.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from training.options import HeadOptions
    from training.run import train_head

    options = HeadOptions(
        target=target,
        source=args.target,
        out=args.out.expanduser().absolute(),
        kind=args.kind,
        prompts=args.prompts,
        tokens=args.tokens,
        minutes=args.minutes,
        draft_vocab=args.draft_vocab,
        depth=args.depth,
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        seed=args.seed,
        threads=args.threads,
    )
    columns = TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn()) as progress:
        found = train_head(options, progress)
    print(f"held-out greedy text: {found}")
    print("serve it with:\n")
    print(
        f"    specserve serve --model {args.target} --drafters eagle,lookup --draft-head {args.out}"
    )
    return 0
