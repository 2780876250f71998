"""What a step costs besides the target's pass: planning, drafting, packing, drawing, committing.

    python -m benchmarks.host [--sequences 1,16,128] [--vocabulary 49152] [--steps 200]

The engine is the real one; its target is a runner that computes nothing. All texts go round in
the same circle, so that prompt lookup drafts and the target agrees, and passes are said to last
4 ms, so that it pays. What the stand-in itself takes is left out. Times are CPU time of one
thread, without HTTP: they hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch

from engine.batch import Batch
from engine.build import assemble
from engine.cache.store import CacheShape, KVStore
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.core import Engine
from engine.model.loader import LoadedModel
from engine.model.passes import Pass
from engine.types import Request, SamplingParams, SpeculationParams

PASS_SECONDS = 4e-3
PROMPT = 96
_CIRCLE = 16
_MOST_ROWS = 2048


class NoTime:
    """A target whose next token follows from the position alone.

    Args:
        vocabulary: tokens of a row of logits.
        num_pages: pages of the pool.
        page_size: tokens per page.
    """

    min_rows = 1
    device = torch.device("cpu")

    def __init__(self, vocabulary: int, num_pages: int, page_size: int) -> None:
        self.store = KVStore(CacheShape(1, 1, 2, torch.float32), num_pages, page_size, "cpu")
        self._told = torch.full((_MOST_ROWS, vocabulary), -5.0)
        self._marked: list[tuple[int, int]] = []
        self.seconds = 0.0  # CPU time spent here

    def forward(self, batch: Batch, _features: tuple[int, ...] = ()) -> Pass:
        """See `Runner.forward`."""
        began = time.process_time()
        for row, token in self._marked:
            self._told[row, token] = -5.0
        positions = batch.positions[batch.logit_rows[: batch.num_logits]].tolist()
        self._marked = [(row, next_token(place)) for row, place in enumerate(positions)]
        for row, token in self._marked:
            self._told[row, token] = 5.0
        self.seconds += time.process_time() - began
        return Pass(self._told[: batch.num_logits], lambda: PASS_SECONDS)


def next_token(position: int) -> int:
    """What stands behind a position of every text."""
    return 100 + 7 * (position % _CIRCLE)


def make_engine(sequences: int, vocabulary: int) -> tuple[Engine, list[NoTime]]:
    """An engine with the stand-in, and the stand-in."""
    made: list[NoTime] = []

    def make_runner(num_pages: int, page_size: int) -> NoTime:
        made.append(NoTime(vocabulary, num_pages, page_size))
        return made[-1]

    loaded = LoadedModel(
        make_runner=make_runner,
        runner_name="none",
        shape=CacheShape(1, 1, 2, torch.float32),
        device=torch.device("cpu"),
        vocab_size=vocabulary,
        max_model_len=4096,
        eos_token_ids=frozenset(),
    )
    config = EngineConfig(
        ModelConfig("none"),
        CacheConfig(num_pages=256 * sequences),
        SchedulerConfig(max_batch_tokens=_MOST_ROWS, max_sequences=max(sequences, 16)),
        SpeculationConfig(drafter="lookup"),
        threads=1,
    )
    return assemble(config, loaded).engine, made


def measure(sequences: int, vocabulary: int, speculate: bool, steps: int) -> dict[str, float]:
    """Milliseconds of a step in which all sequences decode, in all and by lap."""
    engine, (runner,) = make_engine(sequences, vocabulary)
    prompt = tuple(next_token(place - 1) for place in range(PROMPT))
    for i in range(sequences):
        sampling = SamplingParams(max_tokens=3900, temperature=0.0, ignore_eos=True)
        ask = SpeculationParams(enabled=speculate)
        engine.add(Request(str(i), (i, *prompt[1:]), sampling, ask, cache_salt=str(i)))
    spent: Counter[str] = Counter()
    done = drafted = 0
    while done < steps:
        runner.seconds, began = 0.0, time.process_time()
        stats = engine.step().stats
        elapsed = time.process_time() - began - runner.seconds
        if stats is None or stats.prefill_tokens or stats.decode_sequences < sequences:
            continue
        done += 1
        if done <= steps // 4:  # until the planner knows what it has
            continue
        drafted += sum(stats.drafted_by_position)
        spent["step"] += elapsed
        spent["choose"] += stats.plan_seconds
        spent["draft"] += stats.draft_seconds
        spent["judge and commit"] += stats.sample_seconds
    kept = done - steps // 4
    found = {name: 1e3 * seconds / kept for name, seconds in spent.items()}
    return {**found, "drafted": drafted / kept / sequences}


def main() -> None:
    """Measures and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default="1,16,128")
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| sequences | speculation | drafted | ms a step | of which choosing | drafting |")
    print("|---|---|---|---|---|---|")
    for sequences in map(int, options.sequences.split(",")):
        for speculate in (False, True):
            found = measure(sequences, options.vocabulary, speculate, options.steps)
            print(
                f"| {sequences} | {'auto' if speculate else 'off'} | {found['drafted']:.1f} "
                f"| {found['step']:.3f} | {found['choose']:.3f} | {found['draft']:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
