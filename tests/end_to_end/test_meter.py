"""The measured speed-up on a real model: what is forced on in vain, what is off, what is right.

The bounds leave room for a busy machine: both sides of each ratio are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engine.config import ModelConfig
from engine.model import sources
from engine.model.loader import LoadedModel, load_model
from engine.sequence import Sequence
from engine.stats import SpeculationReport
from server.cli.settings import Settings
from tests.drafters import ScriptedDrafter
from tests.fakes import Run, ask, make_engine

pytestmark = [pytest.mark.smollm2, pytest.mark.quiet]

PROMPT = tuple(range(1000, 1040))
NEVER = 16  # a reserved token, which the model does not say
LONG = 200


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    directory = sources.resolve(Settings().model)
    yield load_model(directory, ModelConfig(str(directory)))
    torch.set_num_threads(threads)


def begin(loaded: LoadedModel, tokens: int = LONG, **setup: Any) -> Run:
    """Two requests in one batch."""
    sizes = {"page_size": 16, "num_pages": 256, "max_draft": 8}
    built = make_engine(loaded=loaded, max_model_len=2048, **sizes, **setup)
    return Run(built, [ask(name, PROMPT, tokens, ignore_eos=True) for name in ("a", "b")])


def reports(run: Run) -> list[SpeculationReport]:
    """The meter's word after every step, to the end."""
    run.finish()
    return [stats.speculation for stats in run.stats]


def speedups(run: Run) -> list[float]:
    """Of each request that has one."""
    ends = [choice.end for answer in run.answers.values() for choice in answer.choices.values()]
    found = [end.stats.speedup for end in ends if end is not None]
    return [value for value in found if value is not None]


def test_always_wrong_and_forced_on_reads_below_one(loaded: LoadedModel) -> None:
    run = begin(loaded, 150, drafter=ScriptedDrafter(lambda _, n: [NEVER] * n), mode="fixed")
    *_, last = seen = reports(run)
    assert run.accepted == 0
    assert last.wasted_tokens > 1000
    assert last.basis in ("measured", "modelled")
    assert last.speedup is not None
    assert last.speedup_high is None or last.speedup_high < 1.0
    assert 0.1 < last.speedup < 0.92
    assert 0.1 < last.equal_seconds / last.decode_seconds < 0.92
    assert len(speedups(run)) == 2
    assert all(0.1 < value < 0.92 for value in speedups(run))
    # Drafting from the first step on, it had nothing to compare with, and said so.
    early = [report for report in seen if report.speedup is None]
    assert seen[: len(early)] == early
    assert 4 <= len(early) < len(seen)
    assert {report.basis for report in early} == {"unknown"}


def test_always_right_reads_well_above_one(loaded: LoadedModel) -> None:
    plain = begin(loaded, drafter="none", mode="off")
    plain.finish()
    said = plain.answers["a"].tokens

    def right(sequence: Sequence, length: int) -> list[int]:
        return list(said[sequence.num_generated :][:length])

    run = begin(loaded, drafter=ScriptedDrafter(right), mode="auto")
    for name in "cdefghijkl":  # each takes a few passes only
        run.finish()
        run.add(ask(name, PROMPT, LONG, ignore_eos=True))
    last = reports(run)[-1]
    assert {answer.tokens for answer in run.answers.values()} == {said}
    assert last.equal_seconds / last.decode_seconds > 1.5
    assert speedups(run)[-1] > 1.5


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_off_reads_about_one(loaded: LoadedModel, drafter: str) -> None:
    """Plain steps count as themselves, less what planning took."""
    run = begin(loaded, 100, drafter=drafter, mode="off")
    last = reports(run)[-1]
    assert last.basis == "measured"
    # Exactly so, where no clock is real (`tests/control/test_meter.py`). Here learning from a step
    # takes some 0.3 ms of a pass of 8 ms on one thread, which reads 0.967.
    assert last.speedup == pytest.approx(1.0, abs=0.05)
    assert speedups(run) == pytest.approx([1.0, 1.0], abs=0.05)
    assert last.wasted_tokens == 0
    assert last.unknown_seconds == 0.0
