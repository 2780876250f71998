"""What a run is asked to do, read from the command line and checked as a whole."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.arguments import AB_ARMS, make_parser
from loadtest.asking import Asking, check_overlay
from loadtest.plan import Arm, Level, Target, UsageError
from loadtest.stats import Slo
from loadtest.workloads import WorkloadSize


@dataclass(frozen=True, slots=True)
class Options:
    """A run as asked for on the command line.

    Args:
        requests: conversations for each lane and level over all rounds; None = see `requests_at`.
        duration: seconds for the whole run; None = only requests bound it.
        warmup: unmeasured requests for each lane.
        max_error_rate: share of failed requests up to which the run is a success.
    """

    targets: tuple[Target, ...]
    arms: tuple[Arm, ...]
    levels: tuple[Level, ...]
    rounds: int
    requests: int | None
    duration: float | None
    timeout: float
    warmup: int
    workload: str
    size: WorkloadSize
    asking: Asking
    slo: Slo
    check_equal: bool
    max_error_rate: float
    api_key_env: str | None
    output: Path | None

    def requests_at(self, level: Level) -> int | None:
        """Conversations for each lane at `level`; None = only `duration` bounds them."""
        if self.requests is not None or self.duration is not None:
            return self.requests
        return self.rounds * max(8, 4 * int(level.value))

    def settings(self) -> dict[str, Any]:
        """What a report tells of the options, as JSON; no secrets are among them."""
        asking = self.asking
        return {
            "targets": {target.name: target.url for target in self.targets},
            "models": {target.name: target.model for target in self.targets},
            "arms": {arm.name: dict(arm.body) for arm in self.arms},
            "levels": [str(level) for level in self.levels],
            "rounds": self.rounds,
            "requests": self.requests,
            "duration": self.duration,
            "timeout": self.timeout,
            "warmup": self.warmup,
            "workload": self.workload,
            "endpoint": asking.endpoint,
            "template": asking.template,
            "max_tokens": list(asking.max_tokens),
            "temperature": asking.temperature,
            "seed": asking.seed,
            "ignore_eos": asking.ignore_eos,
            "isolate_cache": asking.isolate_cache,
            "body": dict(asking.body),
            "slo_ttft": self.slo.ttft,
            "slo_tpot": self.slo.tpot,
            "check_equal": self.check_equal,
        }


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line (None = the process's own).

    Raises:
        SystemExit: help was asked for, or argparse refused an argument.
        UsageError: arguments contradict each other.
    """
    given = make_parser().parse_args(arguments)
    return make_options(given, _arms(given))


def make_options(given: argparse.Namespace, arms: Sequence[Arm]) -> Options:
    """A run of these arms, the baseline first.

    Args:
        given: what `make_parser` parses.

    Raises:
        UsageError: arguments contradict each other.
    """
    targets = tuple(given.target or [Target("server", "http://127.0.0.1:8000")])
    _distinct("--target", [target.name for target in targets])
    _distinct("--arm", [arm.name for arm in arms])
    lanes = len(targets) * len(arms)
    if given.check_equal and lanes < 2:
        raise UsageError("--check-equal needs two targets or arms to compare; add --ab or --arm.")
    if given.template and given.endpoint == "chat":
        raise UsageError(
            "--template wraps completions prompts; the chat endpoint has a template of its own. "
            "Add --endpoint completions."
        )
    levels = tuple(given.rate or given.concurrency or [Level("concurrency", 1)])
    rounds = given.rounds or (1 if lanes == 1 else 6)
    return Options(
        targets=tuple(
            Target(target.name, target.url, given.model or target.model) for target in targets
        ),
        arms=tuple(arms),
        levels=levels,
        rounds=rounds,
        requests=given.requests,
        duration=given.duration,
        timeout=given.timeout,
        warmup=given.warmup,
        workload=given.workload,
        size=WorkloadSize(given.prompts, given.prompt_words, given.prefix_groups, given.seed),
        asking=_asking(given),
        slo=Slo(_seconds(given.slo_ttft_ms), _seconds(given.slo_tpot_ms)),
        check_equal=given.check_equal,
        max_error_rate=given.max_error_rate,
        api_key_env=given.api_key_env,
        output=given.output,
    )


def _asking(given: argparse.Namespace) -> Asking:
    body: dict[str, object] = given.body or {}
    check_overlay("--body", body)
    return Asking(
        endpoint=given.endpoint,
        template=given.template,
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        seed=given.seed,
        ignore_eos=given.ignore_eos,
        max_turns=given.max_turns,
        isolate_cache=given.isolate_cache,
        body=body,
    )


def _arms(given: argparse.Namespace) -> tuple[Arm, ...]:
    if given.ab and given.arm:
        raise UsageError("--ab and --arm both name arms; use one of them.")
    arms: tuple[Arm, ...] = AB_ARMS[given.ab] if given.ab else tuple(given.arm or [Arm("plain")])
    for arm in arms:
        check_overlay(f"--arm {arm.name}", arm.body)
    return arms


def _distinct(option: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{option} uses the name {name!r} twice; names must differ.")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
