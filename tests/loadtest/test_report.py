from __future__ import annotations

import builtins
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest import output, plots, report
from loadtest.plan import Level
from loadtest.runner import BlockResult
from loadtest.stats import Slo
from tests.loadtest.making import LEVEL, OFF, ON, answer, result

SETTINGS = {"seed": 0, "check_equal": True, "workload": "builtin"}


def made(results: Sequence[BlockResult], **settings: Any) -> report.Report:
    return report.make_report(SETTINGS | settings, [OFF, ON], [LEVEL], results, Slo(ttft=1.0))


def some_results() -> list[BlockResult]:
    results = []
    for number in range(4):
        results.append(result(OFF, number, [answer(), answer(text="[bold]|pipe")], 2.0))
        results.append(
            result(ON, number, [answer(), answer(text="[bold]|other")], 1.0 + number / 9)
        )
    return results


def shown(found: report.Report) -> str:
    out = io.StringIO()
    output.show(found, Console(file=out, width=200))
    return out.getvalue()


def test_the_same_numbers_stand_in_table_markdown_and_json() -> None:
    found = made(some_results())
    text, document, data = shown(found), output.markdown(found), report.as_json(found)
    off, on = data["summaries"]
    assert off["tokens_per_second"] == pytest.approx(8.0)
    for place in (text, document):
        assert "8.0" in place
        assert f"{on['tokens_per_second']:.1f}" in place
        assert f"{data['ratios'][0]['ratio']:.3f}" in place
        assert "4 different" in place
    assert json.loads(json.dumps(data, allow_nan=False))["notes"] == []
    assert data["blocks"][0]["requests"][0]["chunks"] == [[0.5, 1], [1.2, 7]]
    assert len(data["equality"]["mismatches"]) == 4


def test_answers_can_neither_break_tables_nor_style_the_terminal() -> None:
    found = made(some_results())
    assert "[bold]|" in shown(found)
    assert "[bold]\\|" in output.markdown(found)


def test_unknown_is_shown_as_unknown() -> None:
    found = made([result(OFF, 0, [answer(None)]), result(ON, 0, [answer(None)])])
    assert "unknown" in shown(found)
    assert any("No usage from off, on" in note for note in found.notes)


def test_notes_say_what_to_distrust() -> None:
    partial = replace(result(ON, 0, [answer()], complete=False), lag=0.5)
    notes = " ".join(made([result(OFF, 0, [answer()]), partial]).notes)
    assert "interrupted" in notes
    assert "late by up to 500 ms" in notes
    assert "odd number of rounds" in notes
    assert "at least 4 rounds" in notes
    assert made(some_results()).notes == []


def test_a_run_without_results_still_reports() -> None:
    found = made([])
    assert "0 pairs compared" in shown(found)
    assert output.markdown(found).startswith("# Load test")


def test_files_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = made(some_results())
    paths = output.write(found, tmp_path / "new")
    paths += plots.write_plots(found, tmp_path / "new")
    names = ["results.json", "report.md", "throughput.png", "ttft.png", "tpot.png", "ratios.png"]
    assert [path.name for path in paths] == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths[2:])


def test_plots_of_unknown_numbers_do_not_fail(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = report.make_report(
        SETTINGS, [OFF, ON], [LEVEL, Level("rate", 1.0)], [result(OFF, 0, [answer(None)])], Slo()
    )
    assert len(plots.write_plots(found, tmp_path)) == 3


def test_missing_matplotlib_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_matplotlib(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(plots.PlotsUnavailable, match=r"pip install 'specserve\[loadtest\]'"):
        plots.write_plots(made(some_results()), tmp_path)
