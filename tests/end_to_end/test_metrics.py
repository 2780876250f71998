"""/metrics adds up to what clients were told, and load can be put on from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.end_to_end.serving import PATIENCE, Server

BODIES: list[dict[str, Any]] = [
    {"prompt": "a b c a b c", "max_tokens": 60, "temperature": 0},
    {"prompt": ["x", "yy", "zzz"], "max_tokens": 20, "seed": 1, "n": 2},
    {"prompt": "a", "max_tokens": 80, "allowed_token_ids": [68, 69], "temperature": 0.5},
    {"prompt": "b", "max_tokens": 80, "allowed_token_ids": [68, 69, 70], "seed": 2},
    {"prompt": "b", "max_tokens": 30, "speculation": {"enabled": False}},
    {"prompt": "c", "max_tokens": 300, "stop": "N", "seed": 3},
    {"prompt": "d" * 600, "max_tokens": 5, "n": 3, "best_of": 5},
    {"prompt": "e", "max_tokens": 0, "echo": True},
]
USAGE = {"stream_options": {"include_usage": True}}


def test_metrics_add_up_to_what_clients_were_told(tiny: Server) -> None:
    before = tiny.wait_until_idle(), tiny.samples()
    whole = [tiny.complete(body) for body in BODIES] + tiny.complete_all(BODIES)
    streamed = [tiny.stream({**body, **USAGE})[-1] for body in BODIES if "best_of" not in body]
    after = tiny.wait_until_idle(), tiny.samples()

    def gained(name: str) -> float:
        return after[0][name] - before[0].get(name, 0.0)

    def told(part: str, name: str) -> int:
        return sum(answer[part][name] for answer in [*whole, *streamed])

    assert gained("vllm:generation_tokens_total") == told("usage", "completion_tokens")
    assert gained("vllm:prompt_tokens_total") == told("usage", "prompt_tokens")
    # Where a stop string ended a text, the engine had gone on for a few passes.
    assert gained("vllm:spec_decode_num_draft_tokens_total") >= told("speculation", "drafted") > 0
    assert gained("vllm:spec_decode_num_accepted_tokens_total") >= told("speculation", "accepted")
    assert told("speculation", "accepted") > 0
    choices = (
        sum(len(a["choices"]) for a in whole)
        + 2 * 2
        + sum(
            body.get("n", 1) * (len(body["prompt"]) if isinstance(body["prompt"], list) else 1)
            for body in BODIES
            if "best_of" not in body
        )
    )
    assert gained("vllm:request_success_total") == choices
    assert gained("vllm:e2e_request_latency_seconds_count") == choices
    lengths = gained("vllm:request_generation_tokens_sum")
    assert lengths == told("usage", "completion_tokens")


def test_speculation_adds_up(tiny: Server) -> None:
    tiny.complete_all(BODIES)
    metrics, samples = tiny.wait_until_idle(), tiny.samples()
    drafted = metrics["vllm:spec_decode_num_draft_tokens_total"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_total"]
    assert 0 < accepted < drafted
    accepted_at = samples["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    drafted_at = samples["specserve_spec_draft_tokens_per_pos_total"]
    assert sum(accepted_at.values()) == accepted
    assert sum(drafted_at.values()) == drafted
    assert drafted_at["0"] == metrics["vllm:spec_decode_num_drafts_total"]
    counts = [drafted_at[str(position)] for position in range(8)]
    assert counts == sorted(counts, reverse=True), "a draft has no second token without a first"
    assert set(drafted_at) == set("01234567"), "max_draft is 8"
    assert all(accepted_at[at] <= drafted_at[at] for at in accepted_at)
    # Every pass of a sequence gives the accepted tokens and one of the target's own.
    passes = metrics["specserve_spec_tokens_per_step_count"]
    assert metrics["specserve_spec_tokens_per_step_sum"] == passes + accepted
    assert metrics["specserve_step_seconds_count"] == metrics["specserve_target_forwards_total"]
    assert 0 <= metrics["vllm:prefix_cache_hits_total"] < metrics["vllm:prefix_cache_queries_total"]


def test_a_prompt_asked_twice_is_found_in_the_cache(tiny: Server) -> None:
    body = {"prompt": "never asked before " * 20, "max_tokens": 4, "temperature": 0}
    first, second, salted = (
        tiny.complete(body | extra)["usage"]["prompt_tokens_details"]["cached_tokens"]
        for extra in ({}, {}, {"cache_salt": "another's"})
    )
    assert (first, salted) == (0, 0)
    assert second >= 19 * 20 // 16 * 16 - 16


def test_the_load_test_finds_equal_answers(tiny: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadtest", "run", "--target", tiny.url]
    command += ["--ab", "speculation", "--check-equal", "--isolate-cache", "--rounds", "2"]
    command += ["--concurrency", "1,6", "--requests", "12", "--max-tokens", "8:48"]
    command += ["--temperature", "0.7", "--max-error-rate", "0", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["equality"]["mismatches"] == []
    assert "speculation on" in done.stdout
