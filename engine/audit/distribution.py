"""Is sampling under speculation distributed as the model says? A chi-square test of texts.

The model's distribution over short texts is computed exactly, from plain passes; the engine
then samples many of them with speculation. A small `top_k` keeps the texts few enough to count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from engine.audit.compare import run
from engine.audit.options import ODDS
from engine.audit.recompute import processed_after
from engine.core import Engine, EngineParts
from engine.sampling import probabilities
from engine.types import Request, SamplingParams

LENGTH = 3  # tokens of a text
_TOP_K = 4
_CHOICES = 128  # of one request
_LEAST_EXPECTED = 5.0  # rarer texts are counted together: chi-square is an approximation


@dataclass(frozen=True, slots=True)
class DistributionTest:
    """One test.

    Attributes:
        samples: texts that were sampled.
        degrees: of freedom.
        chance: how likely a sound engine is to be off by this much or more.
        detectable: total variation distance that would be found 99 times in 100.
        drafted, accepted: draft tokens that were checked, and kept.
    """

    samples: int
    degrees: int
    chance: float
    detectable: float
    drafted: int
    accepted: int

    @property
    def passed(self) -> bool:
        """Whether chance explains what was seen."""
        return self.chance >= ODDS


def check_distribution(
    engine: Engine, prompt: Sequence[int], samples: int, temperature: float, name: str
) -> DistributionTest:
    """Samples `samples` unseeded texts after `prompt` and compares them with the model.

    Args:
        engine: idle; its drafter should have something to say after `prompt`.
        temperature: above 0.
        name: of the requests.
    """
    params = SamplingParams(
        max_tokens=LENGTH, temperature=temperature, top_k=_TOP_K, ignore_eos=True, n=_CHOICES
    )
    requests = [
        Request(f"{name}-{i}", tuple(prompt), params) for i in range(-(-samples // _CHOICES))
    ]
    expected = exact_texts(engine.parts, requests[0])
    answers = run(engine, requests, streams=1)
    engine.parts.pool.drop_cache()
    failed = [a.failure for a in answers.values() if a.failure]
    if failed:
        raise RuntimeError(failed[0])
    chance, degrees = chi_square(Counter(a.tokens for a in answers.values()), expected)
    return DistributionTest(
        samples=len(answers),
        degrees=degrees,
        chance=chance,
        detectable=detectable(degrees, len(answers)),
        drafted=sum(a.drafted for a in answers.values()),
        accepted=sum(a.accepted for a in answers.values()),
    )


def exact_texts(parts: EngineParts, request: Request) -> dict[tuple[int, ...], float]:
    """Every text of `max_tokens` tokens the model can say, and its probability."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(request.sampling.max_tokens):
        longer = {}
        for text, probability in texts.items():
            row = probabilities(processed_after(parts, request, text)[None])[0]
            for token in row.nonzero().squeeze(1).tolist():
                longer[(*text, token)] = probability * float(row[token])
        texts = longer
    return texts


def chi_square(
    counts: Mapping[tuple[int, ...], int], expected: Mapping[tuple[int, ...], float]
) -> tuple[float, int]:
    """(chance of such counts or worse, degrees of freedom); 0 if an impossible text was said."""
    if counts.keys() - expected.keys():
        return 0.0, max(1, len(expected) - 1)
    total = sum(counts.values())
    cells = [(counts.get(text, 0), total * p) for text, p in expected.items()]
    rare = [cell for cell in cells if cell[1] < _LEAST_EXPECTED]
    cells = [cell for cell in cells if cell[1] >= _LEAST_EXPECTED]
    if rare:
        cells.append((sum(n for n, _ in rare), sum(e for _, e in rare)))
    if len(cells) < 2:
        return 1.0, 0
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    return upper_tail(statistic, len(cells) - 1), len(cells) - 1


def upper_tail(statistic: float, degrees: int) -> float:
    """P(chi-square with `degrees` >= statistic)."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def detectable(degrees: int, samples: int) -> float:
    """Total variation distance, spread evenly over the texts, that fails 99 tests in 100.

    The statistic then is about normal with mean df + b and variance 2 df + 4 b, where b =
    4 * samples * distance^2.
    """
    if degrees == 0:
        return 1.0
    low, high = 0.0, 1e4 + 10.0 * degrees
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_tail(middle, degrees) > ODDS else (low, middle)
    bias = 0.0
    for _ in range(30):
        bias = max(0.0, high - degrees + 2.33 * math.sqrt(2 * degrees + 4 * bias))
    return min(1.0, math.sqrt(bias / (4 * samples)))
