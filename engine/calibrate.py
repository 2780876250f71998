"""Measures what a pass costs on this machine, and which variants of the kernels are fastest on it,
once; later starts read it from the cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path

import torch

from engine.batch import Span, build_batch
from engine.cache.pages import PagePool
from engine.calibration import Calibration
from engine.model import tuning
from engine.model.files import read_sealed, write_sealed
from engine.model.passes import Runner
from engine.model.paths import cache_directory
from engine.model.version import passes_version
from engine.sweep import calibrate

logger = logging.getLogger(__name__)

#: Of what is kept between starts; another one is measured anew.
_VERSION = 2

#: Seconds a start may spend on it.
_BUDGET = 2.0

_LONG_CONTEXT = 1024
_SEQUENCES = 8

#: Query tokens of the longest pass that variants of the kernels are tried with, and its context.
_TUNING_ROWS, _TUNING_CONTEXT = 8, 16


def load_tuning(
    model_path: str, dtype: str, runner: Runner, pool: PagePool, kinds: str
) -> tuning.Choices:
    """The fastest variants of the kernels for this model on this machine, from the cache or tried
    now; they are what runs from here on.

    Args:
        model_path: identifies the model.
        dtype: of K/V and weights, in any words that tell them apart.
        runner: the model's, its pages unused so far, with the CPU's own kernels.
        pool: all of its pages free.
        kinds: of weights, as in `WeightsInfo`.
    """
    threads = torch.get_num_threads()
    key = cache_key(model_path, "tuning", dtype, threads, passes_version())
    path = cache_directory() / "calibration" / key
    if (cached := read_sealed(path)) is not None:
        with contextlib.suppress(ValueError, TypeError):  # written by another version
            known: dict[str, int] = json.loads(cached)
            tuning.apply(known)
            return known
    room = min(_TUNING_CONTEXT + _TUNING_ROWS, pool.num_pages * pool.page_size)
    timer = PassTimer(runner, pool, 1, room)
    try:
        chosen = tuning.tune(
            lambda rows: timer.seconds(min(rows, room), 1, _TUNING_CONTEXT, rows),
            tuning.knobs_for(kinds),
        )
    finally:
        timer.close()
    _write(path, json.dumps(chosen))
    logger.info("kernels: %s", ", ".join(f"{name} {value}" for name, value in chosen.items()))
    return chosen


def load_calibration(
    model_path: str, dtype: str, runner: Runner, pool: PagePool, *, most_rows: int, longest: int
) -> Calibration:
    """The calibration of this model on this machine, from the cache or measured now.

    Args:
        model_path: identifies the model.
        dtype: of K/V and weights, in any words that tell them apart.
        runner: the model's, its pages unused so far.
        pool: all of its pages free.
        most_rows: most query tokens of a pass.
        longest: most tokens of a sequence.
    """
    device, threads = str(runner.device), torch.get_num_threads()
    key = cache_key(model_path, device, dtype, threads, passes_version())
    path = cache_directory() / "calibration" / key
    if (cached := read_sealed(path)) is not None:
        with contextlib.suppress(ValueError):  # written by another version
            return from_json(cached)
    sequences = max(1, min(_SEQUENCES, pool.num_pages // 2))
    room = min(longest, pool.num_pages // sequences * pool.page_size, 2 * _LONG_CONTEXT)
    timer = PassTimer(runner, pool, sequences, room)
    try:
        measured = calibrate(
            timer.seconds,
            most_rows=max(1, min(most_rows, room // 2)),
            most_sequences=sequences,
            long_context=room // 2,
            seconds=_BUDGET,
        )
    finally:
        timer.close()
    if measured.whole:
        _write(path, to_json(measured))
    return measured


class PassTimer:
    """Times passes of any shape; what lies in the pages costs the same.

    All shapes use the same pages, which are read once beforehand: no pass waits for memory that
    the system has yet to find.

    Args:
        runner: the model's.
        pool: has enough free pages.
        sequences: most that a shape may have.
        tokens: most of each sequence, cached and new.
    """

    def __init__(self, runner: Runner, pool: PagePool, sequences: int, tokens: int) -> None:
        self._runner = runner
        self._pool = pool
        self._tokens = tokens
        self._tables = [pool.new_table("") for _ in range(sequences)]
        for table in self._tables:
            pool.reserve(table, tokens)
        self.seconds(sequences, sequences, tokens - 1)

    def seconds(self, rows: int, sequences: int, context: int, logits: int = 1) -> float:
        """See `engine.sweep.Measure`; the context is cut where it does not fit."""
        spans = []
        for i, table in enumerate(self._tables[:sequences]):
            count = rows // sequences + (i < rows % sequences)
            if count:
                start = min(context, self._tokens - count)
                spans.append(Span([0] * count, start, table, min(count, logits)))
        runner, pool = self._runner, self._pool
        batch = build_batch(spans, pool.page_size, pool.num_pages, runner.device, runner.min_rows)
        return runner.forward(batch).seconds()

    def close(self) -> None:
        """Gives the pages back."""
        for table in self._tables:
            self._pool.free(table)


def _write(path: Path, text: str) -> None:
    """Keeps it for the next start; a read-only cache only costs that start a second."""
    try:
        write_sealed(path, text)
    except OSError as error:
        logger.info("the calibration cannot be cached: %s", error)


def cache_key(model: str, device: str, dtype: str, threads: int, code: str) -> str:
    """A file name for the calibration of one model, computed by one version of the code, on one
    machine setting."""
    text = json.dumps([_VERSION, model, device, dtype, threads, code])
    return f"calibration-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def to_json(calibration: Calibration) -> str:
    """For the cache."""
    return json.dumps({"version": _VERSION, **asdict(calibration)})


def from_json(text: str) -> Calibration:
    """Reads what `to_json` wrote.

    Raises:
        ValueError: it is damaged or of another version; calibrate again.
    """
    try:
        data = json.loads(text)
        if data.pop("version") != _VERSION:
            raise ValueError("the calibration was written by another version")
        for name in ("curve", "prompt"):
            data[name] = tuple((int(n), float(t)) for n, t in data[name])
        return Calibration(**data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a calibration ({type(error).__name__})") from error
