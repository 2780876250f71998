"""What a start takes its time for, before the first request: memory, measurements, first calls."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from engine.cache.pages import DRAFT, PRIVATE, TARGET, PagePool
from engine.calibrate import load_calibration
from engine.config import EngineConfig
from engine.control.options import PlannerOptions
from engine.control.planner import FixedPlanner
from engine.core import Engine
from engine.errors import ConfigurationError
from engine.model.loader import LoadedModel, Runner
from engine.rules import RequestRules
from engine.types import Failed, Request, SamplingParams, SpeculationParams

logger = logging.getLogger(__name__)

#: Seconds a start may wait for the memory of the K/V pages.
_POPULATE_SECONDS = 5.0

#: Most query tokens of a pass that is timed.
_MOST_ROWS = 256

#: Requests of the warm-up carry this prefix, which no caller's id can have.
_WARM_UP = "\0warm-up"


def populate(runners: list[Runner]) -> None:
    """Has the system find memory for the K/V pages, as far as that goes in a few seconds."""
    for runner in runners:
        store = runner.store
        tokens = store.populate(_POPULATE_SECONDS / len(runners))
        logger.info("memory of %d of %d tokens is backed", tokens, store.keys.shape[1])


def measure(
    options: PlannerOptions,
    config: EngineConfig,
    models: list[LoadedModel],
    runners: list[Runner],
    pool: PagePool,
) -> PlannerOptions:
    """The same options, with what passes of target and draft model cost on this machine.

    Args:
        options: of the planner.
        config: names the models' directories.
        models: the target, and the draft model if there is one.
        runners: theirs, unused so far.
        pool: all of its pages free.
    """
    configs = [config.model, config.speculation.draft_model][: len(models)]
    measured = [
        load_calibration(
            source.path if source else "",
            str(model.shape.dtype),
            runner,
            pool,
            most_rows=min(config.scheduler.max_batch_tokens, _MOST_ROWS),
            longest=model.max_model_len,
        )
        for source, model, runner in zip(configs, models, runners, strict=True)
    ]
    drafts = {"model": measured[DRAFT]} if len(measured) > DRAFT else {}
    return replace(options, calibration=measured[TARGET], draft_calibrations=drafts)


def warm_up(engine: Engine, rules: RequestRules) -> None:
    """Runs prefill, decode, verify and every drafter once, so that the first caller does not pay
    for it, with a planner of its own: what first calls take says nothing.

    Raises:
        ConfigurationError: the model cannot produce a token here.
    """
    trial = Engine(
        replace(engine.parts, planner=FixedPlanner()),
        max_model_len=engine.max_model_len,
        default_drafters=engine.default_drafters,
        max_draft=engine.max_draft,
    )
    room = min(rules.max_model_len, rules.max_cached_tokens)
    prompt = tuple(i % min(7, rules.vocab_size) for i in range(max(1, min(64, room // 2))))
    tokens = min(8, room - len(prompt))
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0)
    drafters = engine.parts.drafters.names or engine.default_drafters
    for i, drafter in enumerate(2 * drafters):  # two at a time, each drafter for itself
        ask, now = SpeculationParams(drafter=drafter), time.monotonic()
        trial.add(Request(f"{_WARM_UP}{i}", prompt, sampling, ask, cache_salt=PRIVATE, arrival=now))
    while trial.has_work:
        failed = [event for event in trial.step().events if isinstance(event, Failed)]
        if failed:
            raise ConfigurationError(f"the model fails in the warm-up: {failed[0].error}")
    engine.parts.pool.drop_cache()
    engine.check()
