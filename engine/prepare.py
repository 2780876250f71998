"""What a start takes its time for, before the first request: memory, measurements, first calls."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

from engine.cache.pages import PRIVATE, PagePool
from engine.calibrate import PassTimer, load_calibration, load_tuning
from engine.calibration import Calibration
from engine.config import EngineConfig
from engine.control.costs import CostModel
from engine.control.planner import FixedPlanner
from engine.core import Engine
from engine.draft import registry
from engine.draft.entry import PagedModel
from engine.errors import ConfigurationError
from engine.meter.meter import Meter
from engine.model.passes import Runner
from engine.model.threads import ThreadWatch
from engine.rules import RequestRules
from engine.types import Failed, Request, SamplingParams, SpeculationParams

logger = logging.getLogger(__name__)

#: Runners whose matrices are multiplied by kernels that have variants: see `engine.model.tuning`.
_OWN_KERNELS = ("native", "torch")

#: Seconds a start may wait for the memory of the K/V pages.
_POPULATE_SECONDS = 5.0

#: Longest that a start looks whether threads get cores, and tokens of the passes it does so with.
_SETTLE_SECONDS = 2.0
_SETTLE_ROWS = 8

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


def settle_threads(threads: ThreadWatch | None, runner: Runner, pool: PagePool) -> None:
    """Runs passes until it is clear how many threads get cores: what a pass costs depends on it.

    Args:
        threads: finds it out; None = nobody does.
        runner: the model's, unused so far.
        pool: all of its pages free.
    """
    if threads is None or threads.settled:
        return
    timer = PassTimer(runner, pool, 1, min(_SETTLE_ROWS + 1, pool.num_pages * pool.page_size))
    until = time.monotonic() + _SETTLE_SECONDS
    while not threads.settled and time.monotonic() < until:
        timer.seconds(_SETTLE_ROWS, 1, 0)
        threads.look()
    timer.close()


def measure(
    config: EngineConfig, target: PagedModel, drafting: Mapping[str, PagedModel], pool: PagePool
) -> CostModel:
    """What passes of the target and of drafters' models cost on this machine.

    Args:
        config: names the models' directories.
        target: unused so far, as the others.
        drafting: the models that drafters run, by drafter.
        pool: all of its pages free.
    """

    def kept(paged: PagedModel) -> str:
        model, activations = paged.model, config.model.activations
        return f"{model.dtype_name} {model.shape.dtype} {model.weights.kinds} {activations}"

    def timed(paged: PagedModel, path: str) -> Calibration:
        return load_calibration(
            path,
            kept(paged),
            paged.runner,
            pool,
            most_rows=min(config.scheduler.max_batch_tokens, _MOST_ROWS),
            longest=paged.model.max_model_len,
        )

    if target.model.runner_name in _OWN_KERNELS:
        kinds = target.model.weights.kinds
        load_tuning(config.model.path, kept(target), target.runner, pool, kinds)
    drafts = {name: timed(paged, _path_of(name, config)) for name, paged in drafting.items()}
    most_rows = config.scheduler.max_batch_tokens
    return CostModel(timed(target, config.model.path), most_rows, drafts)


def _path_of(drafter: str, config: EngineConfig) -> str:
    """The directory of the model that a drafter runs, as far as the settings say."""
    own = registry.get(drafter).model
    source = own.config(config.speculation) if own is not None else None
    return source.path if source is not None else ""


def warm_up(engine: Engine, rules: RequestRules) -> None:
    """Runs prefill, decode, verify and every drafter once, so that the first caller does not pay
    for it, with a planner of its own: what first calls take says nothing.

    Raises:
        ConfigurationError: the model cannot produce a token here.
    """
    trial = Engine(
        replace(engine.parts, planner=FixedPlanner(), meter=Meter(CostModel())),
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
