"""Metrics of the engine's steps: load, cache, speculation, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from prometheus_client import Gauge
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.stats import SpeculationReport, StepStats
from engine.types import EngineInfo
from server.metrics.instruments import Instruments
from server.metrics.weights import WeightsMetrics

_STEP_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

_MODEL = "model_name"


class TokensPerStep(Collector):
    """Histogram of the tokens a sequence gained from one target pass.

    Filled from counts, so that a step costs a few additions and not an observation for each
    sequence. `accepted_by_position` says how many sequences accepted at least i + 1 drafts,
    and every pass adds one token of the target's own; the difference of neighbours is the
    number of sequences with exactly so many.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._counts = [0]

    def add(self, sequences: int, accepted_by_position: Sequence[int]) -> None:
        """Adds the sequences of one step."""
        at_least = [sequences, *accepted_by_position, 0]
        self._counts.extend([0] * (len(at_least) - 1 - len(self._counts)))
        for index, (count, following) in enumerate(pairwise(at_least)):
            self._counts[index] += count - following

    def collect(self) -> Iterator[Metric]:
        total, weighted = 0, 0
        buckets: list[tuple[str, float]] = []
        for tokens, count in enumerate(self._counts, 1):
            total += count
            weighted += tokens * count
            buckets.append((str(float(tokens)), total))
        family = HistogramMetricFamily(
            "specserve_spec_tokens_per_step",
            "Tokens a sequence gained from one target pass.",
            labels=[_MODEL],
        )
        family.add_metric([self._model_name], [*buckets, ("+Inf", total)], sum_value=weighted)
        yield family


class SpeculationCollector(Collector):
    """The measured speed-up and why rows were not speculated, from the engine's last report.

    The two counters divide over any window; the gauge has no sample while it is unknown.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.last = SpeculationReport()

    def collect(self) -> Iterator[Metric]:
        report, prefix = self.last, "specserve_spec"
        yield self._counter(
            f"{prefix}_plain_equivalent_seconds",
            "Seconds plain decoding would have taken for the same tokens, measured live.",
            {"": report.equal_seconds},
        )
        yield self._counter(
            f"{prefix}_decode_seconds", "Seconds the same steps took.", {"": report.decode_seconds}
        )
        yield self._counter(
            f"{prefix}_unmeasured_seconds",
            "Seconds of steps before any plain step was seen; in neither of the two sums.",
            {"": report.unknown_seconds},
        )
        yield self._counter(
            f"{prefix}_wasted_tokens",
            "Draft tokens that were checked for nothing.",
            {"": report.wasted_tokens},
        )
        yield self._counter(
            f"{prefix}_rows_off",
            "Rows that decoded without a draft, by reason.",
            dict(report.rows_off),
            "reason",
        )
        yield from self._gauges(report)

    def _gauges(self, report: SpeculationReport) -> Iterator[Metric]:
        speedup = GaugeMetricFamily(
            "specserve_spec_speedup_ratio",
            "Wall-clock speed-up over the last few thousand steps, with a 95 % range.",
            labels=[_MODEL, "bound", "basis"],
        )
        bounds = {
            "estimate": report.speedup,
            "low": report.speedup_low,
            "high": report.speedup_high,
        }
        for bound, value in bounds.items():
            if value is not None:
                speedup.add_metric([self._model_name, bound, report.basis], value)
        yield speedup

    def _counter(
        self, name: str, text: str, values: Mapping[str, float], label: str | None = None
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=[_MODEL, *([label] if label else [])])
        for key, value in values.items():
            family.add_metric([self._model_name, *([key] if label else [])], value)
        return family


class StepMetrics:
    """Turns `StepStats` into metrics.

    The engine reports only when it steps, so its last report goes stale when it falls idle.
    What is in flight is known here at every moment; the gauges are bounded by it.
    """

    def __init__(self, make: Instruments) -> None:
        self._make = make
        self.in_flight = 0  # choices submitted and not finished
        self._last: StepStats | None = None
        self._running = make.gauge("vllm:num_requests_running", "Sequences in the batch.")
        self._waiting = make.gauge("vllm:num_requests_waiting", "Sequences that wait.")
        self._pages = make.gauge("vllm:kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        counter = make.counter
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up for reuse.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix index.")
        self._preemptions = counter("vllm:num_preemptions", "Sequences that lost their pages.")
        self._steps = counter("specserve_target_forwards", "Passes of the target model.")
        self._draft_forwards = counter("specserve_draft_forwards", "Passes of draft models.")
        self._drafts = counter("vllm:spec_decode_num_drafts", "Drafts the target checked.")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens checked.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens kept.")
        self._by_position = make.labelled_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens kept.", "position"
        )
        self._drafted_by_position = make.labelled_counter(
            "specserve_spec_draft_tokens_per_pos", "Draft tokens checked.", "position"
        )
        self._drafted_by = make.labelled_counter(
            "specserve_spec_drafter_draft_tokens", "Draft tokens checked.", "method"
        )
        self._accepted_by = make.labelled_counter(
            "specserve_spec_drafter_accepted_tokens", "Draft tokens kept.", "method"
        )
        self._threads = make.gauge("specserve_compute_threads", "Threads that share a pass.")
        self._waiting_threads = make.gauge(
            "specserve_compute_threads_waiting", "Of those, without a core, on average."
        )
        self._times(make)
        self._facts(make)
        self._weights = WeightsMetrics(make.registry, make.model_name)
        self._tokens_per_step = TokensPerStep(make.model_name)
        make.registry.register(self._tokens_per_step)
        self._speculation = SpeculationCollector(make.model_name)
        make.registry.register(self._speculation)

    def _facts(self, make: Instruments) -> None:
        self._cache_info = Gauge(
            "vllm:cache_config_info",
            "The KV cache: tokens per page, and pages.",
            [_MODEL, "block_size", "num_gpu_blocks"],
            registry=make.registry,
        )
        self._method_info = Gauge(
            "specserve_spec_method_info",
            "Drafters that are loaded, and their longest draft.",
            [_MODEL, "method", "max_draft"],
            registry=make.registry,
        )
        self._active = Gauge(
            "specserve_spec_active",
            "1 while a drafter works, 0 once it was switched off because it failed.",
            [_MODEL, "method"],
            registry=make.registry,
        )
        self._invariant = Gauge(
            "specserve_row_invariant",
            "1 if logits do not depend on who shares the pass, 0 if they do (self-test at start).",
            [_MODEL],
            registry=make.registry,
        )

    def _times(self, make: Instruments) -> None:
        histogram = make.histogram
        self._iteration = histogram("vllm:iteration_tokens_total", "Tokens a step.", _STEP_TOKENS)
        seconds = "seconds of a step"
        self._step_seconds = histogram("specserve_step_seconds", f"All {seconds}.", _STEP_SECONDS)
        self._plan_seconds = histogram(
            "specserve_spec_plan_seconds",
            "Scheduling and choosing draft lengths, seconds of a step.",
            _STEP_SECONDS,
        )
        self._draft_seconds = histogram(
            "specserve_spec_draft_seconds", f"Drafting {seconds}.", _STEP_SECONDS
        )
        self._verify_seconds = histogram(
            "specserve_spec_verify_seconds", f"Target pass {seconds}.", _STEP_SECONDS
        )
        self._sample_seconds = histogram(
            "specserve_spec_sample_seconds", f"Sampling and verdict {seconds}.", _STEP_SECONDS
        )

    def on_step(self, stats: StepStats) -> None:
        """Counts one engine step; called on the event loop, so it must be quick."""
        self._last = stats
        self._speculation.last = stats.speculation
        self._queries.inc(stats.prefix_query_tokens)
        self._hits.inc(stats.prefix_hit_tokens)
        self._preemptions.inc(stats.preemptions)
        self._steps.inc()
        self._iteration.observe(stats.prefill_tokens + stats.emitted_tokens)
        self._step_seconds.observe(stats.seconds)
        self._plan_seconds.observe(stats.plan_seconds)
        self._draft_seconds.observe(stats.draft_seconds)
        self._verify_seconds.observe(stats.verify_seconds)
        self._sample_seconds.observe(stats.sample_seconds)
        if stats.decode_sequences:
            self._tokens_per_step.add(stats.decode_sequences, stats.accepted_by_position)
        if not stats.drafted_by_position:
            return
        self._draft_forwards.inc(stats.draft_forwards)
        self._drafts.inc(stats.drafted_by_position[0])
        self._drafted.inc(sum(stats.drafted_by_position))
        self._accepted.inc(sum(stats.accepted_by_position))
        name = self._make.model_name
        for method, (drafted, accepted) in stats.by_drafter.items():
            self._drafted_by.labels(name, method).inc(drafted)
            self._accepted_by.labels(name, method).inc(accepted)
        for position, count in enumerate(stats.drafted_by_position):
            self._drafted_by_position.labels(name, str(position)).inc(count)
        for position, count in enumerate(stats.accepted_by_position):
            self._by_position.labels(name, str(position)).inc(count)

    def refresh(self) -> None:
        """Sets the gauges; called before a scrape."""
        last = self._last
        running = min(last.running, self.in_flight) if last is not None else 0
        self._running.set(running)
        self._waiting.set(self.in_flight - running)
        used = last.pages_used / max(1, last.pages_total) if last is not None else 0.0
        self._pages.set(used if self.in_flight else 0.0)
        if last is not None and last.threads is not None:
            self._threads.set(last.threads)
            self._waiting_threads.set(last.waiting_threads or 0.0)

    def describe(self, info: EngineInfo) -> None:
        """Publishes what the started engine is."""
        name = self._make.model_name
        self._cache_info.labels(name, str(info.page_size), str(info.num_pages)).set(1)
        for drafter in info.drafters:
            self._method_info.labels(name, drafter, str(info.max_draft)).set(1)
            works = self._last is None or drafter in self._last.speculation.drafters
            self._active.labels(name, drafter).set(works)
        self._weights.describe(info)
        if info.row_invariant is not None:
            self._invariant.labels(name).set(info.row_invariant)
