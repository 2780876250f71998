"""Prometheus metrics: one registry per server, fed by the engine's steps and by requests.

Names that start with ``vllm:`` are a compatibility layer: dashboards, autoscalers and load
generators know them. What only this server has starts with ``specserve_``. No label ever
holds text from a request.

Inter-token latency under speculation: when tokens arrive together, the gap since the last
arrival is divided by their number and observed once for each token. So the histogram counts
tokens, and its sum is the time that really passed.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from engine.stats import AuditStats, StepStats
from engine.types import EngineInfo, SamplingParams, SequenceStats
from server.metrics.instruments import Instruments
from server.metrics.steps import StepMetrics

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)
_SAMPLES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Everything `/metrics` shows.

    Args:
        model_name: the served name, the only value of the `model_name` label.
    """

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        make = Instruments(self.registry, model_name)
        self._model_name = model_name
        self._steps = StepMetrics(make)
        self._up = make.gauge("specserve_engine_up", "1 while the engine takes requests.")
        self._step_age = make.gauge(
            "specserve_engine_step_age_seconds", "Age of the running step; 0 when idle."
        )
        self._requests(make)
        self._audits(make)
        self._latencies(make)
        self._http()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def _requests(self, make: Instruments) -> None:
        self._prompt_tokens = make.counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generated = make.counter("vllm:generation_tokens", "Tokens sent to clients.")
        self._finished = make.labelled_counter(
            "vllm:request_success", "Choices that ended, by reason.", "finished_reason"
        )
        self._predictions = make.labelled_counter(
            "specserve_prediction_tokens", "Draft tokens from `prediction`.", "outcome"
        )
        self._rejected = make.labelled_counter(
            "specserve_requests_rejected", "Requests refused before any work.", "reason"
        )
        self._disconnected = make.counter(
            "vllm:http_requests_client_disconnected", "Answers whose client went away."
        )
        self._corrupted = make.counter(
            "vllm:corrupted_requests", "Requests whose logits were not finite numbers."
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(self._model_name, reason)
        histogram = make.histogram
        self._request_prompt = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a choice.", _TOKENS
        )
        self._request_generated = histogram(
            "vllm:request_generation_tokens", "Tokens of a choice.", _TOKENS
        )
        self._params_n = histogram("vllm:request_params_n", "`n` of a request.", _SAMPLES)
        self._params_max_tokens = histogram(
            "vllm:request_params_max_tokens", "`max_tokens` of a request.", _TOKENS
        )

    def _audits(self, make: Instruments) -> None:
        self._audit_tokens = make.counter(
            "specserve_audit_tokens", "Tokens that were said again without speculation."
        )
        self._audit_mismatches = make.labelled_counter(
            "specserve_audit_mismatches", "Those that came out differently, by kind.", "kind"
        )
        for kind in ("near_tie", "fault"):
            self._audit_mismatches.labels(self._model_name, kind)

    def _latencies(self, make: Instruments) -> None:
        def seconds(name: str, text: str) -> Histogram:
            return make.histogram(f"vllm:{name}_seconds", text, _SECONDS)

        self._first_token = seconds("time_to_first_token", "Arrival to first token.")
        self._inter_token = seconds("inter_token_latency", "Gap between tokens, per token.")
        self._per_token = seconds("request_time_per_output_token", "Mean gap of a choice.")
        self._end_to_end = seconds("e2e_request_latency", "Arrival to end.")
        self._queue = seconds("request_queue_time", "Arrival to first step.")
        self._prefill = seconds("request_prefill_time", "First step to first token.")
        self._decode = seconds("request_decode_time", "First token to end.")

    def _http(self) -> None:
        labels = ["handler", "method", "status"]
        self._answered = Counter("http_requests", "HTTP answers.", labels, registry=self.registry)
        self._duration = Histogram(
            "http_request_duration_seconds",
            "First byte in to last byte out.",
            labels[:2],
            registry=self.registry,
            buckets=_SECONDS,
        )

    # ------------------------------------------------------------------ the engine

    def on_step(self, stats: StepStats) -> None:
        """Counts one engine step."""
        self._steps.on_step(stats)

    def on_audit(self, stats: AuditStats) -> None:
        """Counts one online audit."""
        self._audit_tokens.inc(stats.tokens)
        for kind, count in (("near_tie", stats.near_ties), ("fault", stats.faults)):
            self._audit_mismatches.labels(self._model_name, kind).inc(count)

    # ------------------------------------------------------------------ generations

    def submitted(self, sampling: SamplingParams, choices: int) -> None:
        """A generation went to the engine."""
        self._steps.in_flight += choices
        self._params_n.observe(sampling.n)
        self._params_max_tokens.observe(sampling.max_tokens)

    def tokens_arrived(self, count: int, gap: float, *, first: bool) -> None:
        """`count` tokens of one choice arrived `gap` seconds after the last (or, if `first`,
        after the request)."""
        self._generated.inc(count)
        if first:
            self._first_token.observe(gap)
            return
        for _ in range(count):
            self._inter_token.observe(gap / count)

    def finished(
        self, stats: SequenceStats, reason: str, tokens: int, *, count_prompt: bool
    ) -> None:
        """One choice ended.

        Args:
            reason: stop, length or abort.
            tokens: tokens that counted as generated.
            count_prompt: whether it is the first choice of its prompt to end.
        """
        self._steps.in_flight -= 1
        self._finished.labels(self._model_name, reason).inc()
        if count_prompt:
            self._prompt_tokens.inc(stats.prompt_tokens)
        self._request_prompt.observe(stats.prompt_tokens)
        self._request_generated.observe(tokens)
        for outcome, value in (
            ("accepted", stats.accepted_prediction_tokens),
            ("rejected", stats.rejected_prediction_tokens),
        ):
            self._predictions.labels(self._model_name, outcome).inc(value)
        self._end_to_end.observe(stats.finished - stats.arrival)
        if stats.first_scheduled is None:
            return
        self._queue.observe(stats.first_scheduled - stats.arrival)
        if stats.first_token is None:
            return
        self._prefill.observe(stats.first_token - stats.first_scheduled)
        decode = stats.finished - stats.first_token
        self._decode.observe(decode)
        if stats.generated_tokens > 1:
            self._per_token.observe(decode / (stats.generated_tokens - 1))

    def gave_up(self, choices: int, reason: str) -> None:
        """`choices` ended without a verdict of the engine's: reason abort or error."""
        self._steps.in_flight -= choices
        self._finished.labels(self._model_name, reason).inc(choices)

    def corrupted(self) -> None:
        """The model computed no finite logits for a request."""
        self._corrupted.inc()

    # ------------------------------------------------------------------ HTTP

    def rejected(self, reason: str) -> None:
        """A request was refused before any work; `reason` is one of a few fixed words."""
        self._rejected.labels(self._model_name, reason).inc()

    def disconnected(self) -> None:
        """A client went away while its answer was being made."""
        self._disconnected.inc()

    def http_answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """A request was answered; `handler` is a route's pattern, never a path from a client."""
        self._answered.labels(handler, method, str(status)).inc()
        self._duration.labels(handler, method).observe(seconds)

    def render(
        self, info: EngineInfo | None, *, step_age: float, names: Sequence[str] = ()
    ) -> bytes:
        """The text of a scrape.

        Args:
            info: what the engine is; None while it takes no requests.
            step_age: seconds since the running step began, 0 when idle.
            names: of the samples that are wanted; empty = all, which take ten times as long.
        """
        self._up.set(info is not None)
        if info is not None:
            self._steps.describe(info)
        self._step_age.set(step_age)
        self._steps.refresh()
        wanted = self.registry.restricted_registry(names) if names else self.registry
        return generate_latest(wanted)
