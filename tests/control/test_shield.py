"""A fault in planning costs speed, never a request."""

from __future__ import annotations

import dataclasses

import pytest

from engine.control.planner import Assignment, FixedPlanner, ShieldedPlanner
from engine.core import Engine
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from tests.fakes import ask, make_engine, run


class Raising(FixedPlanner):
    """Raises in one method."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def _maybe(self, method: str) -> None:
        if method == self.method:
            raise ZeroDivisionError(method)

    def choose(self, plan: StepPlan) -> Assignment:
        self._maybe("choose")
        return super().choose(plan)

    def observe(self, *_: object) -> None:
        self._maybe("observe")

    def release(self, sequence: Sequence) -> None:
        self._maybe("release")
        super().release(sequence)


@pytest.mark.parametrize("method", ["choose", "observe", "release"])
def test_a_planner_that_raises_is_switched_off_and_answers_stay(method: str) -> None:
    requests = [ask(f"r{i}", (3, 5, 3, 5, 3), 20, ignore_eos=True) for i in range(3)]
    truth = run(make_engine(drafter="lookup"), requests)
    built = make_engine(drafter="lookup")
    planner = ShieldedPlanner(Raising(method))
    old = built.engine
    parts = dataclasses.replace(old.parts, planner=planner)
    engine = Engine(
        parts,
        max_model_len=old.max_model_len,
        default_drafters=old.default_drafters,
        max_draft=old.max_draft,
    )
    done = run(dataclasses.replace(built, engine=engine), requests, check=True)
    assert planner.inner is None
    for request in requests:
        assert done.said(request.request_id)[0] == truth.said(request.request_id)[0]
        assert done.answers[request.request_id].tokens == truth.answers[request.request_id].tokens
        assert done.answers[request.request_id].failed is None
