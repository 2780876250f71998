"""The same requests with and without speculation, token by token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from engine.audit.recompute import gap_between
from engine.core import Engine, EngineParts
from engine.types import Failed, Finished, Request, SpeculationParams, Tokens

#: How often predictions are wrong on purpose.
_WRONG_EVERY = 7


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first token of an answer that speculation changed.

    Attributes:
        request_id: of the request.
        position: index among the generated tokens.
        speculated: the token with speculation; None = the text had ended.
        plain: the token without.
        gap: how far the worse of the two lies below the best score, in units of a logit.
        near_tie: whether that is so little that rounding explains it.
    """

    request_id: str
    position: int
    speculated: int | None
    plain: int | None
    gap: float
    near_tie: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request said."""

    tokens: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    failure: str | None = None


@dataclass(slots=True)
class Comparison:
    """What came of comparing two runs of the same requests.

    Attributes:
        tokens: compared, up to and including the first mismatch of each request.
        drafted, accepted: draft tokens that were checked, and kept, with speculation.
        mismatches: at most one a request.
        failures: request id and reason of requests that did not come to their end.
    """

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)

    @property
    def near_ties(self) -> list[Mismatch]:
        """Mismatches that rounding explains."""
        return [m for m in self.mismatches if m.near_tie]

    @property
    def faults(self) -> list[Mismatch]:
        """Mismatches that nothing excuses."""
        return [m for m in self.mismatches if not m.near_tie]


def compare(
    engine: Engine,
    requests: Sequence[Request],
    streams: int,
    near_tie: float,
) -> Comparison:
    """Runs all requests without speculation, then all with, and compares.

    Every second request also predicts its answer, nearly, if there is a drafter that reads
    predictions: so many drafts are kept and many refused, whatever the text.

    Args:
        engine: idle.
        requests: greedy or seeded, with one choice each.
        streams: how many run at once.
        near_tie: gap up to which a mismatch is a near-tie.
    """
    plain = [replace(r, speculation=SpeculationParams(enabled=False)) for r in requests]
    expected = run(engine, plain, streams)
    engine.parts.pool.drop_cache()  # else one run could read pages that the other got wrong
    found = run(engine, _predicting(engine, requests, expected), streams)
    engine.parts.pool.drop_cache()
    result = Comparison()
    for request in requests:
        ours, theirs = found[request.request_id], expected[request.request_id]
        result.drafted += ours.drafted
        result.accepted += ours.accepted
        failure = ours.failure or theirs.failure
        if failure is not None:
            result.failures.append((request.request_id, failure))
            continue
        mismatch = first_mismatch(engine.parts, request, ours.tokens, theirs.tokens, near_tie)
        if mismatch is None:
            result.tokens += len(theirs.tokens)
        else:
            result.tokens += mismatch.position + 1
            result.mismatches.append(mismatch)
    return result


def _predicting(
    engine: Engine, requests: Sequence[Request], expected: dict[str, Answer]
) -> list[Request]:
    asked = list(requests)
    if engine.parts.drafters.prediction_readers:
        for i in range(1, len(asked), 2):
            answer = list(expected[asked[i].request_id].tokens)
            for wrong in range(_WRONG_EVERY, len(answer), _WRONG_EVERY):
                answer[wrong] = answer[wrong - _WRONG_EVERY]
            prediction = SpeculationParams(prediction=tuple(answer))
            asked[i] = replace(asked[i], speculation=prediction)
    return asked


def first_mismatch(
    parts: EngineParts,
    request: Request,
    speculated: Sequence[int],
    plain: Sequence[int],
    near_tie: float,
) -> Mismatch | None:
    """Where two answers to the same request part, and by how much; None if they do not."""
    for i, (ours, theirs) in enumerate(zip_longest(speculated, plain)):
        if ours == theirs:
            continue
        gap = float("inf")
        if ours is not None and theirs is not None:
            gap = gap_between(parts, request, plain[:i], (ours, theirs))
        return Mismatch(request.request_id, i, ours, theirs, gap, gap <= near_tie)
    return None


def run(engine: Engine, requests: Iterable[Request], streams: int) -> dict[str, Answer]:
    """Answers of all requests by id, `streams` of them at once; further choices of a request
    are named after it: "id/choice"."""
    answers: dict[str, Answer] = {}
    alive: dict[str, int] = {}  # choices that have not ended
    for request in requests:
        engine.add(request)
        alive[request.request_id] = request.sampling.n
        while len(alive) >= streams:
            _step(engine, answers, alive)
    while alive:
        _step(engine, answers, alive)
    return answers


def _step(engine: Engine, answers: dict[str, Answer], alive: dict[str, int]) -> None:
    for event in engine.step().events:
        request_id = event.request_id
        choice = event.choice if isinstance(event, Tokens | Finished) else 0
        name = f"{request_id}/{choice}" if choice else request_id
        answer = answers.get(name, Answer(()))
        if isinstance(event, Tokens):
            answer = replace(answer, tokens=answer.tokens + event.token_ids)
        elif isinstance(event, Finished):
            stats = event.stats
            answer = replace(answer, drafted=stats.draft_tokens, accepted=stats.accepted_tokens)
            alive[request_id] -= 1
        elif isinstance(event, Failed):
            answer = replace(answer, failure=str(event.error))
            alive[request_id] = 0
        answers[name] = answer
        if alive.get(request_id) == 0:
            del alive[request_id]
