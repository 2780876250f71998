"""Puts an engine together from its configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from engine.audit.online import OnlineAudit
from engine.cache.pages import TARGET, PagePool
from engine.config import EngineConfig
from engine.control.adaptive import AdaptivePlanner
from engine.control.costs import CostModel
from engine.control.planner import Mode, ShieldedPlanner
from engine.core import Engine, EngineParts, StepOutput
from engine.draft import registry
from engine.draft.build import load_models, make_portfolio
from engine.draft.entry import PagedModel
from engine.errors import ConfigurationError
from engine.idle import IdleTask
from engine.judge import Judge
from engine.meter.meter import Meter
from engine.model.checked import load_checked
from engine.model.cores import find_cores
from engine.model.loader import LoadedModel
from engine.model.memory import available_memory, logits_bytes, plan_pages
from engine.model.selftest import check_invariance
from engine.model.threads import ThreadWatch
from engine.prepare import measure, populate, settle_threads, warm_up
from engine.rules import RequestRules
from engine.sampling import BatchSampler
from engine.scheduler import Scheduler
from engine.types import EngineInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, what it is, which requests it takes, what to do while there are none, and who
    minds its threads."""

    engine: Engine
    info: EngineInfo
    rules: RequestRules
    idle: IdleTask | None = None
    threads: ThreadWatch | None = None

    def step(self) -> StepOutput:
        """One step of the engine, and afterwards a look at whether its threads had cores."""
        output = self.engine.step()
        if self.threads is None or output.stats is None:
            return output
        self.threads.look()
        return replace(output, stats=self.threads.note(output.stats))


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
    threads = ThreadWatch(config.threads or find_cores().usable)
    report("Loading weights")
    loaded = load_checked(Path(config.model.path), config.model)
    draft_models = load_models(config, report)
    built = assemble(config, loaded, draft_models, prepare=True, threads=threads)
    report("Warming up")
    warm_up(built.engine, built.rules)
    report("Comparing rows across batch shapes")
    return check_numerics(built)


def assemble(
    config: EngineConfig,
    loaded: LoadedModel,
    draft_models: Mapping[str, LoadedModel] | None = None,
    *,
    prepare: bool = False,
    threads: ThreadWatch | None = None,
) -> BuiltEngine:
    """Builds an engine around models that are already in memory.

    Args:
        config: sizes and policies.
        loaded: the target.
        draft_models: those that drafters run, by drafter.
        prepare: whether this may take seconds: to have the pages' memory backed, and for the
            planner to measure this machine, which it otherwise learns as it goes.
        threads: keeps the number of compute threads right.
    """
    own = draft_models or {}
    entries = registry.wanted(config.speculation, own)
    names = [entry.name for entry in entries if entry.name in own]
    pool, [target, *others] = _make_cache(config, [loaded, *map(own.__getitem__, names)])
    drafting = dict(zip(names, others, strict=True))
    portfolio = make_portfolio(config, entries, target, drafting, pool)
    mode, depth = _mode_of(config), max(1, config.speculation.most_drafts)
    costs = CostModel(most_rows=config.scheduler.max_batch_tokens)
    if prepare:
        populate([target.runner, *(model.runner for model in others)])
        settle_threads(threads, target.runner, pool)
        costs = measure(config, target, drafting, pool)
    parts = EngineParts(
        target=target.runner,
        pool=pool,
        scheduler=Scheduler(config.scheduler, pool, costs.target),
        drafters=portfolio,
        planner=ShieldedPlanner(AdaptivePlanner(depth, costs, mode, portfolio)),
        meter=Meter(costs),
        judge=_make_judge(config, loaded),
    )
    engine = Engine(
        parts,
        max_model_len=loaded.max_model_len,
        default_drafters=registry.default_drafters(config.speculation),
        max_draft=config.speculation.max_draft,
        max_nodes=config.speculation.max_nodes,
    )
    info = _describe(config, loaded, pool, portfolio.names)
    rules = RequestRules(
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        max_cached_tokens=pool.num_pages * pool.page_size,
        drafters=info.drafters,
    )
    idle = OnlineAudit(engine, config.audit_rate, info.dtype) if config.audit_rate else None
    return BuiltEngine(engine, info, rules, idle, threads)


def _make_judge(config: EngineConfig, loaded: LoadedModel) -> Judge:
    """Draws where the logits are: side by side on a GPU, row by row on a CPU."""
    on_gpu = loaded.device.type == "cuda"
    sampler = BatchSampler(loaded.vocab_size) if on_gpu else None
    rule = config.speculation.verification
    return Judge(loaded.vocab_size, loaded.eos_token_ids, rule, sampler)


def _describe(
    config: EngineConfig, loaded: LoadedModel, pool: PagePool, drafters: tuple[str, ...]
) -> EngineInfo:
    return EngineInfo(
        model_name=Path(config.model.path).name,
        model_path=config.model.path,
        dtype=loaded.dtype_name,
        device=str(loaded.device),
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        runner=loaded.runner_name,
        drafters=drafters,
        max_draft=config.speculation.max_draft,
        checked=loaded.checked,
        weights=loaded.weights,
        kv_dtype=str(loaded.shape.dtype).removeprefix("torch."),
        kv_bytes_per_token=loaded.shape.bytes_per_token,
    )


def _mode_of(config: EngineConfig) -> Mode:
    """Who decides how far to speculate."""
    asked = config.speculation.mode
    try:
        return Mode(asked)
    except ValueError:
        modes = ", ".join(mode.value for mode in Mode)
        raise ConfigurationError(f"speculation is {asked!r}; choose one of {modes}.") from None


def check_numerics(built: BuiltEngine) -> BuiltEngine:
    """The engine with the numerics self-test's result in its `info`; also logs it."""
    parts, info = built.engine.parts, built.info
    found = check_invariance(parts.target, parts.pool, info.vocab_size, info.max_model_len)
    logger.log(logging.INFO if found.invariant else logging.WARNING, "numerics: %s", found)
    info = replace(info, row_invariant=found.invariant, numerics=str(found))
    return replace(built, info=info)


def _make_cache(
    config: EngineConfig, models: Seq[LoadedModel]
) -> tuple[PagePool, list[PagedModel]]:
    """One pool of pages, and one store of K/V for each model; the target comes first."""
    cache, target = config.cache, models[TARGET]
    spare = available_memory(target.device) - logits_bytes(
        config.scheduler, config.speculation.most_drafts, target.vocab_size
    )
    spare -= sum(m.reserve(cache.page_size, config.scheduler.max_batch_tokens) for m in models)
    useful = config.scheduler.max_sequences * target.max_model_len
    pages = plan_pages(cache, [model.shape for model in models], spare, useful)
    pool = PagePool(pages, cache.page_size, len(models), cache.prefix_reuse)
    return pool, [
        PagedModel(model, model.make_runner(pages, cache.page_size), store)
        for store, model in enumerate(models)
    ]
