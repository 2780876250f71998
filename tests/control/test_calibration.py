"""Measuring a machine: steps are found, terms separated, damage in the cache noticed."""

from __future__ import annotations

import math

import pytest

from engine.control.calibration import ASSUMED, Calibration, cache_key
from engine.sweep import calibrate


def test_a_step_is_found_where_it_is() -> None:
    """Tiles of 64 rows: the curve must rise between 64 and 65 and nowhere near."""
    table = calibrate(
        lambda rows, sequences, context: 0.01 * math.ceil(rows / 64),  # noqa: ARG005
        most_rows=256, most_sequences=8, long_context=256, seconds=60.0,
    )  # fmt: skip
    for rows in (1, 32, 63, 64, 65, 100, 128, 129, 192, 193, 256):
        assert table.rows_seconds(rows) == pytest.approx(0.01 * math.ceil(rows / 64), rel=0.01)


def test_terms_are_told_apart() -> None:
    def measure(rows: int, sequences: int, context: int) -> float:
        read = sequences * context
        return 5e-3 + 1e-3 * rows + 2e-4 * sequences + 1e-6 * read + 1e-7 * rows * context

    table = calibrate(measure, most_rows=64, most_sequences=8, long_context=1024, seconds=60.0)
    assert table.sequence_seconds == pytest.approx(2e-4, rel=0.2)
    assert table.context_seconds == pytest.approx(1e-6, rel=0.05)
    assert table.attention_seconds == pytest.approx(1e-7, rel=0.05)
    assert table.rows_seconds(48) == pytest.approx(53e-3, rel=0.05)
    assert table.rows_seconds(128) == pytest.approx(133e-3, rel=0.05)  # beyond what was measured


def test_first_calls_do_not_count() -> None:
    seen: set[int] = set()

    def measure(rows: int, sequences: int, context: int) -> float:
        del sequences, context
        first = rows not in seen
        seen.add(rows)
        return 1.0 if first else 0.01

    table = calibrate(measure, most_rows=32, most_sequences=1, long_context=16, seconds=60.0)
    assert table.rows_seconds(32) == pytest.approx(0.01)


def test_it_ends_when_its_time_is_up() -> None:
    calls = 0

    def measure(rows: int, sequences: int, context: int) -> float:
        nonlocal calls
        del sequences, context
        calls += 1
        return 0.1 * rows

    table = calibrate(measure, most_rows=4096, most_sequences=64, long_context=512, seconds=3.0)
    assert calls <= 15
    assert table.rows_seconds(4096) == pytest.approx(409.6, rel=0.1)  # extrapolated


def test_noise_cannot_make_more_tokens_cheaper() -> None:
    times = {1: 0.02, 2: 0.01, 4: 0.03, 8: 0.025, 16: 0.04}
    table = calibrate(
        lambda rows, sequences, context: times.get(rows, 0.03),  # noqa: ARG005
        most_rows=16, most_sequences=1, long_context=16, seconds=60.0,
    )  # fmt: skip
    values = [table.rows_seconds(rows) for rows in range(1, 17)]
    assert values == sorted(values)


def test_it_survives_the_cache() -> None:
    table = Calibration(((1, 0.01), (8, 0.02)), 1e-5, 1e-7, 0.0)
    assert Calibration.from_json(table.to_json()) == table
    assert Calibration.from_json(ASSUMED.to_json()).measured is False


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "3",
        '{"version": 0}',
        ASSUMED.to_json().replace("0.01", "NaN"),
        ASSUMED.to_json().replace("0.01", "-1"),
        ASSUMED.to_json().replace('"curve"', '"bend"'),
        ASSUMED.to_json().replace("[1,", "[99,"),
    ],
)
def test_a_damaged_cache_is_noticed(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Calibration.from_json(text)


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
