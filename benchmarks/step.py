"""Step time by sequences x rows x context, against the memory floor measured in the same run.

    python -m benchmarks.step [--model SOURCE] [--dtype bfloat16] [--repeats 30] [--output FILE]

The *floor* is the time to read as many bytes as the weights of a step with `torch.sum` on all
cores: no decode step can be faster. All cases take turns, round after round, so that whatever
else the machine does hits all of them; medians and their ratios to the floor are shown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig

from engine.batch import Span, build_batch
from engine.cache.pages import PagePool
from engine.config import ModelConfig
from engine.model.loader import LoadedModel, load_model
from engine.model.passes import Runner
from engine.model.sources import DEFAULT_SOURCE, resolve

PAGE_SIZE = 16
PREFILL = 1024
#: (sequences, rows of each, context)
CASES = [
    *((1, rows, 256) for rows in (1, 2, 4, 5, 8, 16)),
    *((sequences, 1, 256) for sequences in (2, 4, 8, 16, 32)),
    *((sequences, 5, 256) for sequences in (4, 16)),
    *((sequences, 1, 1024) for sequences in (1, 16)),
]


class Bench:
    """A runner, pages filled with K/V, and batches over them."""

    def __init__(self, loaded: LoadedModel) -> None:
        pages = sum(s * -(-(c + r) // PAGE_SIZE) for s, r, c in CASES)
        self.pages = pages + PREFILL // PAGE_SIZE
        self.pool = PagePool(self.pages, PAGE_SIZE)
        self.runner: Runner = loaded.make_runner(self.pages, PAGE_SIZE)

    def case(self, sequences: int, rows: int, context: int) -> Callable[[], object]:
        """One pass of `rows` query tokens in each of `sequences`, all with logits."""
        tables = [self.pool.new_table("") for _ in range(sequences)]
        for table in tables:
            assert self.pool.reserve(table, context + rows)
            self.run([Span([1] * context, 0, table, 1)])
        spans = [Span([5] * rows, context, table, rows) for table in tables]
        return lambda: self.run(spans)

    def prefill(self) -> Callable[[], object]:
        """One pass over a prompt of `PREFILL` tokens."""
        table = self.pool.new_table("")
        assert self.pool.reserve(table, PREFILL)
        return lambda: self.run([Span([3] * PREFILL, 0, table, 1)])

    def run(self, spans: list[Span]) -> torch.Tensor:
        """One packed pass."""
        runner = self.runner
        batch = build_batch(spans, PAGE_SIZE, self.pages, runner.device, runner.min_rows)
        return runner.forward(batch).logits


def measure(cases: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of every case, all taking turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for call in cases.values():
        call()
    for _ in range(repeats):
        for name, call in cases.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


def report(medians: dict[str, float], weight_bytes: int, parameters: int, attention: int) -> str:
    """A Markdown table, and the prefill's share of the machine's matrix rate.

    Args:
        parameters: weights that every row meets.
        attention: operations of the prefill's attention, of which a query row does only those
            that it needs: half of all pairs.
    """
    floor = medians["floor"]
    lines = ["| pass | ms | x floor | rows/s |", "|---|---|---|---|"]
    for name, seconds in medians.items():
        sequences, _, rest = name.partition(" x ")
        rows = int(sequences) * int(rest.split()[0]) if rest else 0
        speed = f"{rows / seconds:.0f}" if rows else ""
        lines.append(f"| {name} | {seconds * 1e3:.2f} | {seconds / floor:.2f} | {speed} |")
    prefill = (2 * parameters * PREFILL + attention) / medians["prefill"]
    matrix = 2 * MATRIX**3 / medians["matrix product"]
    lines += [
        "",
        f"floor: {weight_bytes / 1e6:.0f} MB at {weight_bytes / floor / 1e9:.1f} GB/s; "
        f"prefill: {prefill / 1e9:.0f} GFLOP/s, {prefill / matrix:.0%} of torch.matmul's "
        f"{matrix / 1e9:.0f} GFLOP/s, in linear layers and causal attention "
        f"({attention / (2 * parameters * PREFILL + attention):.0%} of the operations)",
    ]
    return "\n".join(lines)


MATRIX = 2048


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_SOURCE)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runner", default="auto")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    directory = resolve(options.model)
    config = ModelConfig(str(directory), dtype=options.dtype, runner=options.runner)
    loaded = load_model(directory, config)
    dtype = loaded.shape.dtype
    bench = Bench(loaded)
    layers, head, attention = _work(directory)
    weight_bytes = (layers + head) * dtype.itemsize
    memory = torch.ones(weight_bytes // 4)
    matrix = torch.randn(MATRIX, MATRIX).to(dtype)
    cases: dict[str, Callable[[], object]] = {
        "floor": memory.sum,
        **{f"{s} x {r} rows, context {c}": bench.case(s, r, c) for s, r, c in CASES},
        "prefill": bench.prefill(),
        "matrix product": lambda: matrix @ matrix,
    }
    text = report(measure(cases, options.repeats), weight_bytes, layers, attention)
    text = f"{directory.name}, {dtype}, {torch.get_num_threads()} threads\n\n{text}"
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


def _work(directory: Path) -> tuple[int, int, int]:
    """Weights that every row meets, those of the output layer, and a prefill's attention."""
    config = AutoConfig.from_pretrained(directory).get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    size = getattr(config, "head_dim", None) or hidden // heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    attention = hidden * size * (2 * heads + 2 * groups)
    layers = config.num_hidden_layers * (attention + 3 * hidden * config.intermediate_size)
    # two products of one multiplication and one addition, for half of all pairs of positions
    pairs = PREFILL * (PREFILL + 1) // 2
    return layers, hidden * config.vocab_size, 4 * config.num_hidden_layers * heads * size * pairs


if __name__ == "__main__":
    main()
