"""Measuring a machine: steps are found, terms separated, damage in the cache noticed."""

from __future__ import annotations

import math

import pytest

from engine.calibrate import cache_key, from_json, to_json
from engine.calibration import ASSUMED, Calibration
from engine.sweep import calibrate


def test_a_step_is_found_where_it_is() -> None:
    """Tiles of 64 rows: the curve must rise between 64 and 65 and nowhere near."""
    table = calibrate(
        lambda rows, *_: 0.01 * math.ceil(rows / 64),
        most_rows=256, most_sequences=8, long_context=256, seconds=60.0,
    )  # fmt: skip
    for rows in (1, 32, 63, 64, 65, 100, 128, 129, 192, 193, 256):
        assert table.rows_seconds(rows) == pytest.approx(0.01 * math.ceil(rows / 64), rel=0.01)


def test_terms_are_told_apart() -> None:
    def measure(rows: int, sequences: int, context: int, logits: int) -> float:
        read, head = sequences * context, 3e-3 * min(rows, sequences * logits)
        return 5e-3 + 1e-3 * rows + head + 2e-4 * sequences + 1e-6 * read + 1e-7 * rows * context

    table = calibrate(measure, most_rows=64, most_sequences=8, long_context=1024, seconds=60.0)
    assert table.sequence_seconds == pytest.approx(2e-4, rel=0.2)
    assert table.context_seconds == pytest.approx(1e-6, rel=0.05)
    assert table.attention_seconds == pytest.approx(1e-7, rel=0.05)
    for rows in (1, 48, 128):  # the last is beyond what was measured
        assert table.prompt_seconds(rows) == pytest.approx(8e-3 + 1e-3 * rows, rel=0.05)
        assert table.rows_seconds(rows) == pytest.approx(5e-3 + 4e-3 * rows, rel=0.05)


def test_first_calls_do_not_count() -> None:
    seen: set[int] = set()

    def measure(rows: int, *_: int) -> float:
        first = rows not in seen
        seen.add(rows)
        return 1.0 if first else 0.01

    table = calibrate(measure, most_rows=32, most_sequences=1, long_context=16, seconds=60.0)
    assert table.rows_seconds(32) == pytest.approx(0.01)


@pytest.mark.parametrize(("seconds", "whole", "most_calls"), [(0.3, False, 15), (60.0, True, 60)])
def test_it_ends_when_its_time_is_up(seconds: float, whole: bool, most_calls: int) -> None:
    """Yet even a rushed one tells what a prompt costs, and what its context does."""
    calls = 0

    def measure(rows: int, sequences: int, context: int, _: int) -> float:
        nonlocal calls
        calls += 1
        return 0.1 * rows + 1e-4 * context * sequences

    table = calibrate(measure, most_rows=4096, most_sequences=64, long_context=512, seconds=seconds)
    assert calls <= most_calls
    assert table.whole is whole
    for read in (table.rows_seconds, table.prompt_seconds):
        assert read(4096) == pytest.approx(409.6, rel=0.1)  # extrapolated
    assert table.prompt[-1][0] >= 32
    assert table.context_seconds == pytest.approx(1e-4, rel=0.1)


def test_noise_cannot_make_more_tokens_cheaper() -> None:
    times = {1: 0.02, 2: 0.01, 4: 0.03, 8: 0.025, 16: 0.04}
    table = calibrate(
        lambda rows, *_: times.get(rows, 0.03),
        most_rows=16, most_sequences=1, long_context=16, seconds=60.0,
    )  # fmt: skip
    values = [table.rows_seconds(rows) for rows in range(1, 17)]
    assert values == sorted(values)


def test_it_survives_the_cache() -> None:
    prompt = ((1, 0.01), (8, 0.015))
    table = Calibration(((1, 0.01), (8, 0.02)), 1e-5, 1e-7, 0.0, prompt=prompt)
    assert from_json(to_json(table)) == table
    assert from_json(to_json(ASSUMED)).measured is False


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"version": 0}',
        to_json(ASSUMED).replace("0.01", "NaN"),
        to_json(ASSUMED).replace("0.01", "-1"),
        to_json(ASSUMED).replace('"curve"', '"bend"'),
        to_json(ASSUMED).replace("[1,", "[99,"),
    ],
)
def test_a_damaged_cache_is_noticed(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        from_json(text)


def test_every_setting_has_its_own_file() -> None:
    keys = {
        cache_key(model, device, dtype, threads, code)
        for model in "ab"
        for device in ("cpu", "cuda")
        for dtype in ("float32", "bfloat16")
        for threads in (1, 2)
        for code in ("old", "new")
    }
    assert len(keys) == 32
    assert all("/" not in key for key in keys)
