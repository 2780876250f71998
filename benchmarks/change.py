"""How fast draft lengths follow when acceptance changes in mid-stream.

    python -m benchmarks.change [--model SOURCE] [--dtype bfloat16] [--rounds 8]

Runs the real engine in this process. Each answer is first generated without speculation, then
again with a predicted output that is right up to some place and has every third token wrong from
there on, and with one that is wrong first and right afterwards. Printed are draft tokens per
step, before and after the change, and how many steps it took until drafts were about as long as
they stayed.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from engine.build import build_engine
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.core import Engine
from engine.model.sources import DEFAULT_SOURCE, resolve
from engine.types import Request, SamplingParams, SpeculationParams, Tokens

TOKENS = 480
WINDOW = 8  # steps that a length is averaged over
NEAR = 0.75  # draft tokens per step that a length may be off


def answer(
    engine: Engine, name: str, number: int, ask: SpeculationParams
) -> tuple[list[int], list[tuple[int, int]]]:
    """Runs one request. It samples, with a seed: greedy texts soon repeat themselves, and what
    repeats itself is guessed right without a prediction.

    Returns:
        Its tokens, and for each step how many there were before it and how many were drafted.
    """
    prompt = tuple(1000 + 37 * number + i for i in range(64))
    sampling = SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=number, ignore_eos=True)
    engine.add(Request(name, prompt, sampling, ask))
    tokens: list[int] = []
    steps: list[tuple[int, int]] = []
    while engine.has_work:
        output = engine.step()
        before = len(tokens)
        for event in output.events:
            if isinstance(event, Tokens):
                tokens += event.token_ids
        if output.stats is not None and not output.stats.prefill_tokens:
            steps.append((before, sum(output.stats.drafted_by_position)))
    return tokens, steps


def steps_to_settle(lengths: list[int]) -> int:
    """Steps until the mean of the next few is near what it is in the second half."""
    settled = statistics.mean(lengths[len(lengths) // 2 :])
    means = [statistics.mean(lengths[i : i + WINDOW]) for i in range(len(lengths) - WINDOW)]
    near = (i for i, mean in enumerate(means) if abs(mean - settled) <= NEAR)
    return next(near, len(lengths))


def damage(tokens: list[int]) -> list[int]:
    """Every third token is another one."""
    return [token ^ 1 if i % 3 == 2 else token for i, token in enumerate(tokens)]


def main() -> None:
    """Measures and prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_SOURCE)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    directory: Path = resolve(options.model)
    model = ModelConfig(str(directory), dtype=options.dtype)
    engine = build_engine(EngineConfig(model, CacheConfig(memory_bytes=2**29))).engine
    print("| round | change | drafts before | after | steps to follow |\n|---|---|---|---|---|")
    half = TOKENS // 2
    for number in range(options.rounds):
        plain, _ = answer(engine, f"plain-{number}", number, SpeculationParams(enabled=False))
        for change in ("right to wrong", "wrong to right"):
            parts = plain[:half], plain[half:]
            guess = parts[0] + damage(parts[1]) if change[0] == "r" else damage(parts[0]) + parts[1]
            ask = SpeculationParams(prediction=tuple(guess))
            tokens, steps = answer(engine, f"{change}-{number}", number, ask)
            assert tokens == plain, "speculation changed the answer"
            before = [drafted for place, drafted in steps if place < half]
            after = [drafted for place, drafted in steps if place >= half]
            means = [statistics.mean(part[len(part) // 2 :]) for part in (before, after)]
            print(
                f"| {number + 1} | {change} | {means[0]:.1f} | {means[1]:.1f} "
                f"| {steps_to_settle(after)} of {len(after)} |"
            )


if __name__ == "__main__":
    main()
