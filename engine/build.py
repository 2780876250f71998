"""Puts an engine together from its configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.audit.online import AuditingEngine
from engine.cache.pages import DRAFT, TARGET, PagePool
from engine.config import EngineConfig, ModelConfig
from engine.control.adaptive import AdaptivePlanner
from engine.control.options import Mode, PlannerOptions
from engine.control.shield import ShieldedPlanner
from engine.core import Engine, EngineParts
from engine.draft.drafter import Advisor, Drafter
from engine.draft.lookup import LookupDrafter
from engine.draft.model import DraftModelLimits, ModelDrafter
from engine.draft.portfolio import DrafterPortfolio
from engine.draft.store import AnswerStore
from engine.errors import ConfigurationError
from engine.judge import Judge
from engine.model.checked import load_checked
from engine.model.loader import LoadedModel, Runner
from engine.model.memory import available_memory, logits_bytes, plan_pages
from engine.model.pairing import check_pair
from engine.model.selftest import check_invariance
from engine.prepare import measure, populate, warm_up
from engine.rules import RequestRules
from engine.scheduler import Scheduler
from engine.types import EngineInfo

logger = logging.getLogger(__name__)


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
    loaded = load_checked(Path(config.model.path), config.model)
    draft = None
    if config.speculation.draft_model is not None:
        report("Loading the draft model")
        draft = _load_draft_model(config.model, config.speculation.draft_model)
    built = assemble(config, loaded, draft, prepare=True)
    report("Warming up")
    warm_up(built.engine, built.rules)
    report("Comparing rows across batch shapes")
    return check_numerics(built)


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    draft: LoadedModel | None = None,
    *,
    prepare: bool = False,
) -> BuiltEngine:
    """Builds an engine around models that are already in memory.

    Args:
        config: sizes and policies.
        loaded: the target.
        draft: the draft model of the "model" drafter, if there is one.
        prepare: whether this may take seconds: to have the pages' memory backed, and for the
            planner to measure this machine, which it otherwise learns as it goes.
    """
    models = [loaded] if draft is None else [loaded, draft]
    pool, runners = _make_cache(config, models)
    if prepare:
        populate(runners)
    drafters = _make_drafters(config, models, runners, pool)
    portfolio = DrafterPortfolio(drafters, loaded.vocab_size)
    planner = _make_planner(config, portfolio)
    if prepare and planner.options.mode is Mode.AUTO and drafters:
        planner = AdaptivePlanner(measure(planner.options, config, models, runners, pool))
    parts = EngineParts(
        target=runners[TARGET],
        pool=pool,
        scheduler=Scheduler(config.scheduler, pool),
        drafters=portfolio,
        planner=ShieldedPlanner(planner),
        judge=Judge(loaded.vocab_size, loaded.eos_token_ids, config.speculation.verification),
    )
    engine = _make_engine(config, loaded, parts)
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
        checked=loaded.checked,
    )
    rules = RequestRules(
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        max_cached_tokens=pool.num_pages * pool.page_size,
        drafters=tuple(drafters),
    )
    return BuiltEngine(engine, info, rules)


def _make_engine(config: EngineConfig, loaded: LoadedModel, parts: EngineParts) -> Engine:
    speculation = config.speculation
    if not config.audit_rate:
        return Engine(
            parts,
            max_model_len=loaded.max_model_len,
            default_drafters=speculation.default_drafters,
            max_draft=speculation.max_draft,
        )
    return AuditingEngine(
        parts,
        max_model_len=loaded.max_model_len,
        default_drafters=speculation.default_drafters,
        max_draft=speculation.max_draft,
        rate=config.audit_rate,
        dtype=str(loaded.shape.dtype).removeprefix("torch."),
    )


def _make_drafters(
    config: EngineConfig, models: list[LoadedModel], runners: list[Runner], pool: PagePool
) -> dict[str, Drafter]:
    """The drafters a configuration asks for, by name. `lookup` costs nothing until it is
    used, so it is there for every request that wants it unless speculation is off.

    Raises:
        ConfigurationError: a drafter is unknown, or lacks its model.
    """
    speculation = config.speculation
    names = speculation.default_drafters
    for name in names:
        if name not in ("lookup", "model", "none"):
            raise ConfigurationError(f"drafter is {name!r}; choose one of lookup, model, none.")
    if names == ("none",):
        return {}
    memory = speculation.lookup_store_bytes
    drafters: dict[str, Drafter] = {
        "lookup": LookupDrafter(store=AnswerStore(memory) if memory else None)
    }
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
    elif "model" in names:
        raise ConfigurationError("drafter is model, but no draft_model is set; name one.")
    return drafters


def _load_draft_model(target: ModelConfig, draft: ModelConfig) -> LoadedModel:
    check_pair(Path(target.path), Path(draft.path))
    return load_checked(Path(draft.path), draft)


def _make_planner(config: EngineConfig, advisor: Advisor) -> AdaptivePlanner:
    """The planner that a configuration asks for, knowing nothing of this machine yet."""
    speculation = config.speculation
    try:
        mode = Mode(speculation.mode)
    except ValueError:
        modes = ", ".join(m.value for m in Mode)
        raise ConfigurationError(
            f"speculation is {speculation.mode!r}; choose one of {modes}."
        ) from None
    return AdaptivePlanner(
        PlannerOptions(
            depth=max(1, speculation.max_draft),
            most_rows=config.scheduler.max_batch_tokens,
            mode=mode,
            advisor=advisor,
        )
    )


def check_numerics(built: BuiltEngine) -> BuiltEngine:
    """The engine with the numerics self-test's result in its `info`; also logs it."""
    parts, info = built.engine.parts, built.info
    found = check_invariance(parts.target, parts.pool, info.vocab_size, info.max_model_len)
    logger.log(logging.INFO if found.invariant else logging.WARNING, "numerics: %s", found)
    info = replace(info, row_invariant=found.invariant, numerics=str(found))
    return replace(built, info=info)


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
