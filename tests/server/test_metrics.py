"""What /metrics shows is what happened."""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import CorruptedLogits, RequestFailed
from engine.stats import SpeculationReport, StepStats
from server.api.app import create_app
from server.metrics.registry import Metrics
from tests.server.support import (
    MODEL,
    FakeEngine,
    call,
    complete,
    make_app,
    make_info,
    make_tokenizer,
    serving,
    wait_until,
)


def samples(app: Any) -> dict[tuple[str, ...], float]:
    """Every sample of a scrape, by name and label values (without the model's)."""
    text = call(app, "GET", "/metrics").text
    assert "_created" not in text
    result = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [v for k, v in sorted(sample.labels.items()) if k != "model_name"]
            result[(sample.name, *labels)] = sample.value
    return result


def test_requests_are_counted_as_their_usage_says() -> None:
    app = make_app(FakeEngine(blocks=(3, 1)))
    usages = [
        complete(app, **fields).json()["usage"]
        for fields in (
            {"max_tokens": 200},
            {"max_tokens": 5, "n": 3},
            {"prompt": ["a", "bc"], "stop": "fox", "max_tokens": 99},
            {"prediction": {"type": "content", "content": "xy"}},
        )
    ]
    complete(app, temperature=9)
    complete(app, prompt="x" * 3000)
    seen = samples(app)
    assert seen["vllm:generation_tokens_total",] == sum(u["completion_tokens"] for u in usages)
    assert seen["vllm:prompt_tokens_total",] == sum(u["prompt_tokens"] for u in usages)
    reasons = {
        r: seen["vllm:request_success_total", r] for r in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 3, "length": 4, "abort": 0, "error": 0}
    assert seen["vllm:time_to_first_token_seconds_count",] == 7
    gaps = sum(u["completion_tokens"] for u in usages) - 7 * 3  # first blocks hold three tokens
    assert seen["vllm:inter_token_latency_seconds_count",] == gaps
    assert seen["vllm:e2e_request_latency_seconds_count",] == 7
    assert seen["vllm:num_requests_running",] == seen["vllm:num_requests_waiting",] == 0
    assert seen["specserve_prediction_tokens_total", "accepted"] == 2
    assert seen["specserve_requests_rejected_total", "invalid"] == 1
    assert seen["specserve_requests_rejected_total", "too_long"] == 1
    assert seen["http_requests_total", "/v1/completions", "POST", "200"] == 4
    assert seen["http_requests_total", "/v1/completions", "POST", "400"] == 2


STEP = StepStats(
    seconds=0.02,
    draft_seconds=0.002,
    verify_seconds=0.015,
    sample_seconds=0.001,
    running=4,
    waiting=1,
    prefill_tokens=7,
    decode_sequences=4,
    emitted_tokens=9,
    drafted_by_position=(3, 3, 2),
    accepted_by_position=(3, 2, 0),
    pages_used=16,
    pages_total=64,
    preemptions=1,
    prefix_query_tokens=32,
    prefix_hit_tokens=16,
    plan_seconds=0.002,
    speculation=SpeculationReport(
        equal_seconds=3.0,
        decode_seconds=2.0,
        unknown_seconds=0.25,
        basis="measured",
        speedup=1.5,
        speedup_low=1.4,
        speedup_high=1.6,
        wasted_tokens=7,
        rows_off=(("no_proposal", 5), ("guard", 0)),
        drafters=("lookup",),
    ),
)


def test_steps_are_counted() -> None:
    metrics = Metrics(MODEL)
    app = create_app(FakeEngine(), make_tokenizer(), MODEL, metrics=metrics)
    metrics.on_step(STEP)
    metrics.on_step(STEP)
    seen = samples(app)
    assert seen["vllm:spec_decode_num_drafts_total",] == 6
    assert seen["vllm:spec_decode_num_draft_tokens_total",] == 16
    assert seen["vllm:spec_decode_num_accepted_tokens_total",] == 10
    per_position = [
        seen["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)] for i in range(3)
    ]
    assert per_position == [6, 4, 0]
    assert seen["vllm:prefix_cache_queries_total",] == 64
    assert seen["vllm:prefix_cache_hits_total",] == 32
    assert seen["vllm:num_preemptions_total",] == 2
    assert seen["specserve_target_forwards_total",] == 2
    assert seen["specserve_spec_verify_seconds_count",] == 2
    assert seen["vllm:cache_config_info", "16", "64"] == 1
    assert seen["specserve_spec_method_info", "4", "lookup"] == 1
    assert seen["specserve_weights_info", "bfloat16", "Q4_1, Q8_0"] == 1
    assert seen["specserve_weights_bytes",] == 96 * 2**20
    assert seen["specserve_bytes_per_weight",] == 5.7 / 8
    assert seen["specserve_kv_bytes_per_token",] == 23040
    assert seen["vllm:kv_cache_usage_perc",] == 0  # nothing is in flight, so the step is over


def test_tokens_per_step_is_the_true_distribution() -> None:
    metrics = Metrics(MODEL)
    app = create_app(FakeEngine(), make_tokenizer(), MODEL, metrics=metrics)
    metrics.on_step(STEP)  # four sequences: three accept one draft, two of them a second one
    seen = samples(app)
    name = "specserve_spec_tokens_per_step"
    assert [seen[name + "_bucket", le] for le in ("1.0", "2.0", "3.0", "4.0", "+Inf")] == [
        1, 2, 4, 4, 4,
    ]  # fmt: skip
    assert seen[name + "_sum",] == STEP.emitted_tokens
    assert seen[name + "_count",] == STEP.decode_sequences


def test_the_speed_up_is_two_counters_and_a_gauge_with_its_range() -> None:
    metrics = Metrics(MODEL)
    app = create_app(FakeEngine(), make_tokenizer(), MODEL, metrics=metrics)
    metrics.on_step(STEP)
    metrics.on_step(STEP)  # the engine reports sums, which must not be added up
    seen = samples(app)
    assert seen["specserve_spec_plain_equivalent_seconds_total",] == 3.0
    assert seen["specserve_spec_decode_seconds_total",] == 2.0
    assert seen["specserve_spec_unmeasured_seconds_total",] == 0.25
    assert seen["specserve_spec_wasted_tokens_total",] == 7
    assert seen["specserve_spec_rows_off_total", "no_proposal"] == 5
    assert seen["specserve_spec_rows_off_total", "guard"] == 0
    for bound, value in (("estimate", 1.5), ("low", 1.4), ("high", 1.6)):
        assert seen["specserve_spec_speedup_ratio", "measured", bound] == value


def test_an_unknown_speed_up_is_no_number() -> None:
    metrics = Metrics(MODEL)
    app = create_app(FakeEngine(), make_tokenizer(), MODEL, metrics=metrics)
    unknown = SpeculationReport(unknown_seconds=1.0)
    for step in (None, replace(STEP, speculation=unknown)):
        if step is not None:
            metrics.on_step(step)
        seen = samples(app)
        assert not [key for key in seen if key[0] == "specserve_spec_speedup_ratio"]
        assert seen["specserve_spec_decode_seconds_total",] == 0  # so the quotient is no number
    early = replace(unknown, speedup=1.2, basis="modelled")
    metrics.on_step(replace(STEP, speculation=early))
    found = {k: v for k, v in samples(app).items() if k[0] == "specserve_spec_speedup_ratio"}
    assert found == {("specserve_spec_speedup_ratio", "modelled", "estimate"): 1.2}


def test_all_of_a_steps_time_is_accounted_for() -> None:
    metrics = Metrics(MODEL)
    app = create_app(FakeEngine(), make_tokenizer(), MODEL, metrics=metrics)
    plain = replace(STEP, drafted_by_position=(), accepted_by_position=())
    drafting = replace(STEP, draft_forwards=3)
    for step in (drafting, plain):  # a drafter that finds nothing takes time, too
        metrics.on_step(step)
    seen = samples(app)
    parts = ("plan", "draft", "verify", "sample")
    for part in parts:
        assert seen[f"specserve_spec_{part}_seconds_count",] == 2
    total = sum(seen[f"specserve_spec_{part}_seconds_sum",] for part in parts)
    assert total == pytest.approx(seen["specserve_step_seconds_sum",])
    assert seen["specserve_draft_forwards_total",] == 3


def test_a_drafter_that_was_switched_off_shows() -> None:
    metrics = Metrics(MODEL)
    engine = FakeEngine(info=make_info(drafters=("lookup", "model")))
    app = create_app(engine, make_tokenizer(), MODEL, metrics=metrics)
    assert samples(app)["specserve_spec_active", "model"] == 1
    metrics.on_step(STEP)
    seen = samples(app)
    assert seen["specserve_spec_active", "lookup"] == 1
    assert seen["specserve_spec_active", "model"] == 0


def test_a_plain_step_drafts_nothing() -> None:
    metrics = Metrics(MODEL)
    app = create_app(FakeEngine(), make_tokenizer(), MODEL, metrics=metrics)
    assert samples(app)["specserve_spec_tokens_per_step_count",] == 0
    changes = {"drafted_by_position": (), "accepted_by_position": (), "emitted_tokens": 4}
    fields = {name: getattr(STEP, name) for name in STEP.__slots__}
    metrics.on_step(StepStats(**{**fields, **changes}))
    seen = samples(app)
    assert seen["vllm:spec_decode_num_drafts_total",] == 0
    assert seen["specserve_spec_tokens_per_step_bucket", "1.0"] == 4


def test_compute_threads_are_shown() -> None:
    metrics = Metrics(MODEL)
    app = create_app(FakeEngine(), make_tokenizer(), MODEL, metrics=metrics)
    metrics.on_step(dataclasses.replace(STEP, threads=3, waiting_threads=0.25))
    seen = samples(app)
    assert seen["specserve_compute_threads",] == 3
    assert seen["specserve_compute_threads_waiting",] == 0.25


def test_what_is_in_flight_bounds_the_gauges() -> None:
    engine = FakeEngine(delay=0.05)
    metrics = Metrics(MODEL)
    app = create_app(engine, make_tokenizer(), MODEL, metrics=metrics)
    with serving(app) as url:
        body = {"prompt": "x", "n": 3, "max_tokens": 40}
        thread = threading.Thread(
            target=lambda: httpx.post(url + "/v1/completions", json=body, timeout=30)
        )
        thread.start()
        wait_until(lambda: bool(engine.running))
        metrics.on_step(
            StepStats(**{**{n: getattr(STEP, n) for n in STEP.__slots__}, "running": 2})
        )
        text = httpx.get(url + "/metrics").text
        assert f'vllm:num_requests_running{{model_name="{MODEL}"}} 2.0' in text
        assert f'vllm:num_requests_waiting{{model_name="{MODEL}"}} 1.0' in text
        assert f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.25' in text
        thread.join()


def test_corrupted_requests_are_counted_apart_from_other_failures() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    engine.fail_after = 1
    for failure in (CorruptedLogits(7), RequestFailed("something else")):
        engine.failure = failure
        assert complete(app).status_code == 500
    seen = samples(app)
    assert seen["vllm:corrupted_requests_total",] == 1
    assert seen["vllm:request_success_total", "error"] == 2
    assert seen["http_requests_total", "/v1/completions", "POST", "500"] == 2


def test_a_scrape_of_some_samples_has_them_and_no_others() -> None:
    app = make_app(FakeEngine())
    complete(app, prompt="x", max_tokens=3)
    names = ["vllm:generation_tokens_total", "vllm:num_requests_running"]
    query = "&".join(f"name%5B%5D={name}" for name in [*names, "nobody_has_this"])
    some = call(app, "GET", f"/metrics?{query}").text.splitlines()
    whole = call(app, "GET", "/metrics").text.splitlines()
    values = [line for line in some if not line.startswith("#")]
    assert sorted(values) == sorted(line for line in whole if line.split("{")[0] in names)
    assert len(values) == 2
