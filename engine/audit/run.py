"""A whole audit: builds the engine, compares answers, tests distributions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.audit.compare import Comparison, compare, run
from engine.audit.distribution import LENGTH, DistributionTest, check_distribution
from engine.audit.options import AuditOptions
from engine.audit.recompute import NEAR_TIE
from engine.build import BuiltEngine, build_engine
from engine.config import EngineConfig
from engine.control.planner import FixedPlanner
from engine.errors import InvalidRequest
from engine.types import EngineInfo, Request, SamplingParams

#: Every so many prompts one is answered under penalties, which must never see a rejected token.
_PENALISED = 4
_PENALTIES = {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3}
#: Prompts whose continuation is sampled, tokens of them, and tokens left for drafts to repeat.
_CONTEXTS, _CONTEXT, _REPEATED = 2, 48, 4
#: At which it is sampled if answers are greedy: hot, since text that repeats itself is too sure.
_TEMPERATURE = 1.5


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    Attributes:
        info: the engine.
        prompts: that were answered.
        skipped: prompts that do not fit into the context.
        near_tie: gap up to which a mismatch counts as a near-tie, in units of a logit.
        comparison: tokens with and without speculation.
        distributions: of sampled texts.
    """

    info: EngineInfo
    prompts: int
    skipped: int
    near_tie: float
    comparison: Comparison
    distributions: tuple[DistributionTest, ...]

    @property
    def clean(self) -> bool:
        """Whether nothing was found that rounding or chance does not explain."""
        answered = not self.comparison.faults and not self.comparison.failures
        return answered and all(test.passed for test in self.distributions)


def audit(
    config: EngineConfig,
    prompts: Callable[[EngineInfo], Sequence[Sequence[int]]],
    options: AuditOptions,
    report: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """Builds the engine that `config` describes and audits it.

    Args:
        prompts: makes token ids, once it is known for which model.
        report: is told in plain sentences what is going on.

    Raises:
        ConfigurationError: the engine cannot start like this.
    """
    built = build_engine(replace(config, audit_rate=0.0), report)
    return audit_engine(built, prompts(built.info), options, report)


def audit_engine(
    built: BuiltEngine,
    prompts: Sequence[Sequence[int]],
    options: AuditOptions,
    report: Callable[[str], None] = lambda _: None,
) -> AuditReport:
    """Audits an idle engine. Its planner is replaced: drafts are wanted whether or not they pay.

    Raises:
        InvalidRequest: not one prompt fits into the context.
    """
    engine = built.engine
    engine.parts = replace(engine.parts, planner=FixedPlanner(engine.parts.drafters))
    requests = [_request(i, prompt, options) for i, prompt in enumerate(prompts)]
    fitting = [request for request in requests if _fits(built, request)]
    if not fitting:
        raise InvalidRequest(
            f"none of {len(prompts)} prompts fits into {built.info.max_model_len} tokens with "
            f"{options.max_tokens} more; lower --max-tokens or shorten them."
        )
    near_tie = NEAR_TIE[built.info.dtype]
    report(
        f"Answering {len(fitting)} prompts with and without speculation, "
        f"{options.streams} at a time"
    )
    comparison = compare(engine, fitting, options.streams, near_tie)
    distributions = tuple(_sample(built, fitting, options, report)) if options.samples else ()
    engine.check()
    return AuditReport(
        info=built.info,
        prompts=len(fitting),
        skipped=len(requests) - len(fitting),
        near_tie=near_tie,
        comparison=comparison,
        distributions=distributions,
    )


def _request(index: int, prompt: Sequence[int], options: AuditOptions) -> Request:
    penalties = _PENALTIES if index % _PENALISED == _PENALISED - 1 else {}
    sampling = SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=index if options.temperature else None,
        **penalties,  # type: ignore[arg-type]
    )
    return Request(f"audit{index}", tuple(prompt), sampling)


def _fits(built: BuiltEngine, request: Request) -> bool:
    try:
        built.rules.validate(request)
    except InvalidRequest:
        return False
    return True


def _sample(
    built: BuiltEngine,
    requests: Sequence[Request],
    options: AuditOptions,
    report: Callable[[str], None],
) -> Iterator[DistributionTest]:
    """Distribution tests after a few of the prompts."""
    greedy = SamplingParams(max_tokens=_CONTEXT // 2, temperature=0.0, ignore_eos=True)
    for i, request in enumerate(requests[:_CONTEXTS]):
        asked = Request(f"context{i}", request.prompt[-_CONTEXT // 2 :], greedy)
        answer = run(built.engine, [asked], streams=1)[asked.request_id]
        # Text that repeats itself, so that every kind of drafter has something to say.
        body = (*asked.prompt, *answer.tokens)
        context = (*body, *body[:-_REPEATED])
        if not _fits(built, Request("fits", context, SamplingParams(max_tokens=LENGTH))):
            continue
        report(f"Sampling {options.samples} short texts")
        yield check_distribution(
            built.engine,
            context,
            options.samples,
            options.temperature or _TEMPERATURE,
            f"sample{i}",
        )
