"""Shows a report: tables on a terminal, Markdown and JSON in files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.report import Report, as_json
from loadtest.tables import DIFFERENT, equality_line, overview, tables


def show(report: Report, console: Console, *, brief: bool = False) -> None:
    """Prints tables and notes.

    Args:
        brief: of the numbers only the overview.
    """
    shown = tables(report)
    if brief:
        shown = [overview(report), *(table for table in shown if table[0] == DIFFERENT)]
    for title, head, rows in shown:
        table = Table(title=title, title_justify="left", title_style="bold")
        for name in head:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(table)
    if report.equality is not None:
        console.print(equality_line(report.equality), highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"Note: {note}", highlight=False, markup=False, soft_wrap=True)


def markdown(report: Report) -> str:
    """The report as a Markdown document."""
    lines = ["# Load test", ""]
    lines += _markdown_table(
        ("setting", "value"), [(key, json.dumps(v)) for key, v in report.settings.items()]
    )
    for title, head, rows in tables(report):
        lines += [f"## {title}", "", *_markdown_table(head, rows)]
    if report.equality is not None:
        lines += [equality_line(report.equality), ""]
    lines += [f"- {note}" for note in report.notes]
    return "\n".join(lines).rstrip() + "\n"


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), line("---" for _ in head), *(line(row) for row in rows), ""]


def write(report: Report, directory: Path) -> list[Path]:
    """Writes `results.json` and `report.md` into `directory`, which is made if need be."""
    directory.mkdir(parents=True, exist_ok=True)
    data, text = directory / "results.json", directory / "report.md"
    data.write_text(json.dumps(as_json(report), indent=1, allow_nan=False) + "\n", "utf-8")
    text.write_text(markdown(report), "utf-8")
    return [data, text]
