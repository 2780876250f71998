"""Short ways to make results by hand."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.measure import Answer, Chunk
from loadtest.plan import Arm, Block, Lane, Level, Target
from loadtest.runner import BlockResult, Record

TARGET = Target("server", "http://127.0.0.1:1", "m")
OFF = Lane("off", TARGET, Arm("off"))
ON = Lane("on", TARGET, Arm("on"))
LEVEL = Level("concurrency", 2)


def answer(
    tokens: int | None = 8,
    first: float = 0.5,
    last: float = 1.2,
    text: str = "text",
    error: str | None = None,
) -> Answer:
    """One token at `first`, the others at `last`; unknown tokens for None."""
    sizes = (None, None) if tokens is None else (1, tokens - 1)
    return Answer(
        started=0.0,
        seconds=last,
        chunks=(Chunk(first, sizes[0]), Chunk(last, sizes[1])),
        prompt_tokens=3,
        cached_tokens=0,
        output_tokens=tokens,
        text=text,
        finish_reason="length",
        error=error,
    )


def result(
    lane: Lane,
    number: int,
    answers: Sequence[Answer],
    seconds: float = 1.0,
    complete: bool = True,
) -> BlockResult:
    """A block of round `number` whose requests carry the indices 0, 1, ..."""
    block = Block(LEVEL, number, lane, range(len(answers)))
    first = number * len(answers)
    records = [Record(first + i, 0, "writing", given) for i, given in enumerate(answers)]
    return BlockResult(block, records, seconds, complete, max_in_flight=2)
