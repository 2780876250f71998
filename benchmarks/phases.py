"""Where the time of an engine step goes: planning, drafting, the target's pass, sampling, the rest.

    python -m benchmarks.phases [--model SOURCE] [--dtype bfloat16] [--sequences 1,16,64]

Runs the real engine in this process, without HTTP, on greedy requests with random prompts that
all decode at once, with speculation off and with `auto`, after an unmeasured run of the same.
Shares are sums over steps that only decode; the *rest* is committing, statistics, events and the
planner's learning.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

from engine.build import build_engine
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import Engine
from engine.model.sources import DEFAULT_SOURCE, resolve
from engine.types import Request, SamplingParams, SpeculationParams

PROMPT = 192
PHASES = ("plan", "draft", "verify", "sample", "rest")


@dataclass
class Shares:
    """Seconds by phase over a run's steps."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    plan: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0

    @property
    def rest(self) -> float:
        """What no phase accounts for."""
        return self.seconds - self.plan - self.draft - self.verify - self.sample


def decode(engine: Engine, sequences: int, speculate: bool, tokens: int) -> Shares:
    """Runs `sequences` requests to their end; counts steps in which all of them decode."""
    pick = random.Random(sequences)
    for i in range(sequences):
        words = [pick.randrange(1000, 4000) for _ in range(PROMPT // 4)]
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        ask = SpeculationParams(enabled=speculate)
        engine.add(Request(f"{speculate}-{i}-{time.monotonic_ns()}", (*words * 4,), sampling, ask))
    shares = Shares()
    while engine.has_work:
        started = time.monotonic()
        stats = engine.step().stats
        elapsed = time.monotonic() - started
        if stats is None or stats.prefill_tokens or stats.decode_sequences < sequences:
            continue
        shares.steps += 1
        shares.tokens += stats.emitted_tokens
        shares.seconds += elapsed
        shares.plan += stats.plan_seconds
        shares.draft += stats.draft_seconds
        shares.verify += stats.verify_seconds
        shares.sample += stats.sample_seconds
    return shares


def main() -> None:
    """Measures and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_SOURCE)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--sequences", default="1,16,64")
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    directory: Path = resolve(options.model)
    config = EngineConfig(
        ModelConfig(str(directory), dtype=options.dtype),
        CacheConfig(memory_bytes=2**31),
        SchedulerConfig(max_batch_tokens=512, max_sequences=64),
    )
    engine = build_engine(config).engine
    print(f"| sequences | speculation | steps | ms | tokens/s | {' | '.join(PHASES)} |")
    print("|---" * (5 + len(PHASES)) + "|")
    for sequences in map(int, options.sequences.split(",")):
        for speculate in (False, True):
            decode(engine, sequences, speculate, options.tokens)
            shares = decode(engine, sequences, speculate, options.tokens)
            cells = [f"{getattr(shares, phase) / shares.seconds:.1%}" for phase in PHASES]
            mode = "auto" if speculate else "off"
            step = 1e3 * shares.seconds / shares.steps
            rate = shares.tokens / shares.seconds
            print(
                f"| {sequences} | {mode} | {shares.steps} | {step:.2f} | {rate:.0f} | "
                f"{' | '.join(cells)} |"
            )


if __name__ == "__main__":
    main()
