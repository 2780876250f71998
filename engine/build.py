"""Puts an engine together from its configuration."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cache.pages import PagePool
from engine.config import EngineConfig
from engine.control.planner import FixedPlanner
from engine.core import Engine, EngineParts
from engine.draft.drafter import Drafter
from engine.draft.lookup import LookupDrafter
from engine.draft.portfolio import DrafterPortfolio
from engine.errors import ConfigurationError
from engine.judge import Judge
from engine.model.loader import LoadedModel, Runner, load_model
from engine.model.memory import available_memory, logits_bytes, plan_pages
from engine.rules import RequestRules
from engine.scheduler import Scheduler
from engine.types import EngineInfo, Request, SamplingParams

logger = logging.getLogger(__name__)

#: Requests of the warm-up carry this prefix, which no caller's id can have.
_WARM_UP = "\0warm-up"


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, what it is, and which requests it takes."""

    engine: Engine
    info: EngineInfo
    rules: RequestRules


def build_engine(
    config: EngineConfig, report: Callable[[str], None] = lambda _: None
) -> BuiltEngine:
    """Loads the model, allocates the cache and warms up.

    Args:
        config: its model path is a local directory.
        report: is told in plain sentences what is going on.

    Raises:
        ConfigurationError: it cannot start like this, and what to change.
    """
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    report("Loading weights")
    loaded = load_model(Path(config.model.path), config.model)
    built = assemble(config, loaded)
    report("Warming up")
    warm_up(built)
    return built


def assemble(config: EngineConfig, loaded: LoadedModel) -> BuiltEngine:
    """Builds an engine around a model that is already in memory."""
    pool, target = _make_cache(config, loaded)
    drafters = make_drafters(config)
    default = config.speculation.drafter
    engine = Engine(
        EngineParts(
            target=target,
            pool=pool,
            scheduler=Scheduler(config.scheduler, pool),
            drafters=DrafterPortfolio(drafters, loaded.vocab_size),
            planner=FixedPlanner(),
            judge=Judge(loaded.vocab_size, loaded.eos_token_ids),
        ),
        max_model_len=loaded.max_model_len,
        default_drafter=default,
        max_draft=config.speculation.max_draft,
    )
    info = EngineInfo(
        model_name=Path(config.model.path).name,
        model_path=config.model.path,
        dtype=str(loaded.shape.dtype).removeprefix("torch."),
        device=str(loaded.device),
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        runner=loaded.runner_name,
        drafters=tuple(drafters),
        max_draft=config.speculation.max_draft,
    )
    rules = RequestRules(
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        max_cached_tokens=pool.num_pages * pool.page_size,
        drafters=tuple(drafters),
    )
    return BuiltEngine(engine, info, rules)


def make_drafters(config: EngineConfig) -> dict[str, Drafter]:
    """The drafters a configuration asks for, by name.

    Raises:
        ConfigurationError: the drafter is unknown.
    """
    name = config.speculation.drafter
    if name == "none":
        return {}
    if name == "lookup":
        return {"lookup": LookupDrafter()}
    raise ConfigurationError(f"drafter is {name!r}; choose one of lookup, none.")


def warm_up(built: BuiltEngine) -> None:
    """Runs prefill, decode and verify once, so that the first caller does not pay for it.

    Raises:
        ConfigurationError: the model cannot produce a token here.
    """
    engine, rules = built.engine, built.rules
    room = min(rules.max_model_len, rules.max_cached_tokens)
    prompt = tuple(i % min(7, rules.vocab_size) for i in range(max(1, min(64, room // 2))))
    tokens = min(8, room - len(prompt))
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0)
    for i in range(2):
        engine.add(Request(f"{_WARM_UP}{i}", prompt, sampling, arrival=time.monotonic()))
    while engine.has_work:
        if any(type(event).__name__ == "Failed" for event in engine.step().events):
            raise ConfigurationError("the model failed in the warm-up; the log says how.")
    engine.parts.pool.drop_cache()
    engine.check()


def _make_cache(config: EngineConfig, loaded: LoadedModel) -> tuple[PagePool, Runner]:
    cache = config.cache
    spare = available_memory(loaded.device) - logits_bytes(
        config.scheduler, config.speculation.max_draft, loaded.vocab_size
    )
    useful = config.scheduler.max_sequences * loaded.max_model_len
    pages = plan_pages(cache, [loaded.shape], spare, useful)
    pool = PagePool(pages, cache.page_size, prefix_reuse=cache.prefix_reuse)
    return pool, loaded.make_runner(pages, cache.page_size)
