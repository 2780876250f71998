"""Measures what a pass costs on this machine, once; later starts read it from the cache."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from engine.batch import Span, build_batch
from engine.cache.pages import PagePool
from engine.control.calibration import Calibration, Measure, cache_key, calibrate
from engine.model.loader import Runner
from engine.model.paths import cache_directory

logger = logging.getLogger(__name__)

#: Seconds a start may spend on it.
_BUDGET = 2.0

_LONG_CONTEXT = 1024


def load_calibration(
    model_path: str, dtype: str, runner: Runner, pool: PagePool, *, most_rows: int
) -> Calibration:
    """The calibration of this model on this machine, from the cache or measured now.

    Args:
        model_path: identifies the model.
        dtype: as the engine reports it.
        runner: the target, its pages unused so far.
        pool: all of its pages free.
        most_rows: most query tokens of a pass.
    """
    key = cache_key(model_path, str(runner.device), dtype, torch.get_num_threads())
    path = cache_directory() / "calibration" / key
    try:
        return Calibration.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass
    capacity = pool.num_pages * pool.page_size
    sequences = max(1, min(8, pool.num_pages // 2))
    measured = calibrate(
        measure_passes(runner, pool),
        most_rows=max(1, min(most_rows, capacity // 4)),
        most_sequences=sequences,
        long_context=min(_LONG_CONTEXT, capacity // (2 * sequences)),
        seconds=_BUDGET,
    )
    _write(path, measured)
    return measured


def measure_passes(runner: Runner, pool: PagePool) -> Measure:
    """A function that times one pass over any shape; what lies in the pages costs the same."""

    def measure(rows: int, sequences: int, context: int) -> float:
        tables = [pool.new_table("") for _ in range(sequences)]
        spans = []
        for i, table in enumerate(tables):
            count = rows // sequences + (i < rows % sequences)
            if not count or not pool.reserve(table, context + count):
                break
            spans.append(Span([0] * count, context, table, count))
        batch = build_batch(spans, pool.page_size, pool.num_pages, runner.device, runner.min_rows)
        started = time.perf_counter()
        runner.forward(batch)
        seconds = time.perf_counter() - started
        for table in tables:
            pool.free(table)
        return seconds

    return measure


def _write(path: Path, calibration: Calibration) -> None:
    """Keeps it for the next start; a read-only cache only costs that start a second."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(calibration.to_json(), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        logger.info("the calibration cannot be cached: %s", error)
