"""Puts an engine together from its configuration."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cache.pages import TARGET, PagePool
from engine.config import EngineConfig, ModelConfig
from engine.control.planner import FixedPlanner
from engine.core import Engine, EngineParts
from engine.draft.drafter import Drafter
from engine.draft.lookup import LookupDrafter
from engine.draft.model import DraftModelLimits, ModelDrafter
from engine.draft.portfolio import DrafterPortfolio
from engine.errors import ConfigurationError
from engine.judge import Judge
from engine.model.loader import LoadedModel, Runner, load_model
from engine.model.memory import available_memory, logits_bytes, plan_pages
from engine.model.pairing import check_pair
from engine.rules import RequestRules
from engine.scheduler import Scheduler
from engine.types import EngineInfo, Request, SamplingParams

logger = logging.getLogger(__name__)

#: Index of the draft model's K/V store.
DRAFT = 1

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
    draft = None
    if config.speculation.draft_model is not None:
        report("Loading the draft model")
        draft = _load_draft_model(config.model, config.speculation.draft_model)
    built = assemble(config, loaded, draft)
    report("Warming up")
    warm_up(built)
    return built


def assemble(
    config: EngineConfig, loaded: LoadedModel, draft: LoadedModel | None = None
) -> BuiltEngine:
    """Builds an engine around models that are already in memory.

    Args:
        config: sizes and policies.
        loaded: the target.
        draft: the draft model of the "model" drafter, if there is one.
    """
    models = [loaded] if draft is None else [loaded, draft]
    pool, runners = _make_cache(config, models)
    drafters = _make_drafters(config, models, runners, pool)
    engine = Engine(
        EngineParts(
            target=runners[TARGET],
            pool=pool,
            scheduler=Scheduler(config.scheduler, pool),
            drafters=DrafterPortfolio(drafters, loaded.vocab_size),
            planner=FixedPlanner(),
            judge=Judge(loaded.vocab_size, loaded.eos_token_ids),
        ),
        max_model_len=loaded.max_model_len,
        default_drafter=config.speculation.drafter,
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


def _make_drafters(
    config: EngineConfig, models: list[LoadedModel], runners: list[Runner], pool: PagePool
) -> dict[str, Drafter]:
    """The drafters a configuration asks for, by name. `lookup` costs nothing until it is
    used, so it is there for every request that wants it unless speculation is off.

    Raises:
        ConfigurationError: the drafter is unknown, or lacks its model.
    """
    speculation = config.speculation
    if speculation.drafter not in ("lookup", "model", "none"):
        raise ConfigurationError(
            f"drafter is {speculation.drafter!r}; choose one of lookup, model, none."
        )
    if speculation.drafter == "none":
        return {}
    drafters: dict[str, Drafter] = {"lookup": LookupDrafter()}
    if len(models) > DRAFT:
        target, draft = models[TARGET], models[DRAFT]
        limits = DraftModelLimits(
            store=DRAFT,
            page_size=pool.page_size,
            num_pages=pool.num_pages,
            vocab_size=min(target.vocab_size, draft.vocab_size),
            max_model_len=draft.max_model_len,
            max_batch_tokens=config.scheduler.max_batch_tokens,
            temperature=speculation.draft_temperature,
        )
        drafters["model"] = ModelDrafter(runners[DRAFT], limits, target.eos_token_ids)
    elif speculation.drafter == "model":
        raise ConfigurationError("drafter is model, but no draft_model is set; name one.")
    return drafters


def _load_draft_model(target: ModelConfig, draft: ModelConfig) -> LoadedModel:
    check_pair(Path(target.path), Path(draft.path))
    return load_model(Path(draft.path), draft)


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


def _make_cache(config: EngineConfig, models: list[LoadedModel]) -> tuple[PagePool, list[Runner]]:
    """One pool of pages, and one store of K/V for each model."""
    cache, target = config.cache, models[TARGET]
    spare = available_memory(target.device) - logits_bytes(
        config.scheduler, config.speculation.max_draft, target.vocab_size
    )
    useful = config.scheduler.max_sequences * target.max_model_len
    pages = plan_pages(cache, [model.shape for model in models], spare, useful)
    pool = PagePool(pages, cache.page_size, len(models), cache.prefix_reuse)
    return pool, [model.make_runner(pages, cache.page_size) for model in models]
