"""Two hundred descriptions of structured answers, in all ways to speculate, as a table::

    python -m tools.schemas                     # everything: some minutes
    python -m tools.schemas --every 10          # each tenth description

Each description is asked for greedily and sampled, under every tokenizer and with every kind of
drafter, in company with each other and with requests that have no grammar. Every answer that ends
must be what its description asks for, as other libraries see it, and each answer must be the same,
token for token, as alone and without speculation. Exits with 1 if one is not.

The models are tiny and random, helped by biases to come to an end. What is tried, and how, is in
`tests/lossless/structured.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator

from tests.fakes import Run, make_engine, run
from tests.lossless.catalogue import DESCRIPTIONS
from tests.lossless.structured import (
    WAYS,
    Case,
    World,
    broken,
    case,
    neighbours,
    way,
    world,
)

TOKENIZERS = ("bytes", "byte fallback", "characters")


@dataclasses.dataclass(frozen=True)
class Line:
    """What came of one tokenizer and one way.

    Attributes:
        answers: all that have a grammar.
        ended: those of them that came to their end.
        faults: what is wrong with which.
    """

    tokenizer: str
    way: str
    answers: int
    ended: int
    drafted: int
    accepted: int
    seconds: float
    faults: list[str]

    def __str__(self) -> str:
        kept = f"{self.accepted / self.drafted:8.0%}" if self.drafted else f"{'':8}"
        return (
            f"{self.tokenizer:14} {self.way:18} {self.answers:7} {self.ended / self.answers:7.0%}"
            f" {self.drafted:8} {kept} {len(self.faults):7} {self.seconds:7.0f}"
        )


HEAD = (
    f"{'tokenizer':14} {'way':18} {'answers':>7} {'ended':>7} {'drafted':>8} {'accepted':>8}"
    f" {'faults':>7} {'seconds':>7}"
)


def measure(name: str, cases: list[Case], ways: list[str]) -> Iterator[Line]:
    """A line for plain decoding in company, one for plain decoding alone, and one for each way."""
    made = world(name)
    everybody = [*cases, *neighbours(made, len(cases) // 8)]
    began = time.perf_counter()
    plain = run(make_engine(made.setup), [c.request for c in everybody])
    yield _line(made, name, "off", (plain, plain), everybody, began)
    began = time.perf_counter()
    alone = make_engine(made.setup)
    merged = Run(alone)
    for one in everybody:
        done = run(alone, [one.request])
        merged.answers |= done.answers
        merged.stats += done.stats
    yield _line(made, name, "off, alone", (merged, plain), everybody, began)
    for how in ways:
        began = time.perf_counter()
        done = run(make_engine(made.setup, **way(made, how)), [c.request for c in everybody])
        yield _line(made, name, how, (done, plain), everybody, began)
    began = time.perf_counter()
    for rule in ("rejection", "block"):
        yield _weighed(made, name, rule, cases)


def _weighed(made: World, name: str, rule: str, cases: list[Case]) -> Line:
    """Rules that weigh drafts by their probabilities say something else each time, and answers
    only have to be valid."""
    began = time.perf_counter()
    free = [
        dataclasses.replace(
            one,
            request=dataclasses.replace(
                one.request, sampling=dataclasses.replace(one.request.sampling, seed=None)
            ),
        )
        for one in cases
        if not one.request.sampling.greedy
    ]
    built = make_engine(made.setup, **way(made, "model"))
    built.engine.parts.judge._verification = rule
    done = run(built, [c.request for c in free])
    return _line(made, name, f"model, {rule}", (done, done), free, began)


def _line(
    made: World, name: str, how: str, runs: tuple[Run, Run], cases: list[Case], began: float
) -> Line:
    done, plain = runs
    described = [one for one in cases if one.description is not None]
    count, faults = broken(made, done, described)
    for one in cases:
        request_id = one.request.request_id
        if done.answers[request_id].said != plain.answers[request_id].said:
            what = one.description.name if one.description else "a neighbour"
            faults.append(f"{request_id} ({what}) differs from what is said without speculation")
    drafted = sum(sum(s.drafted_by_position) for s in done.stats)
    seconds = time.perf_counter() - began
    return Line(name, how, len(described), count, drafted, done.accepted, seconds, faults)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="try each n-th description only")
    parser.add_argument("--tokenizers", nargs="*", default=TOKENIZERS, choices=TOKENIZERS)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    given = parser.parse_args()
    found = 0
    print(f"{len(DESCRIPTIONS[:: given.every])} descriptions, greedy and sampled\n{HEAD}")
    for name in given.tokenizers:
        made, numbers = world(name), range(0, len(DESCRIPTIONS), given.every)
        cases = [case(made, n, sampled) for n in numbers for sampled in (False, True)]
        for line in measure(name, cases, list(given.ways)):
            print(line, *(f"    {fault}" for fault in line.faults), sep="\n", flush=True)
            found += len(line.faults)
    print(f"{found} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
