"""A report as one HTML page that holds everything, plots too, and asks nobody for anything."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from html import escape
from pathlib import Path

from loadtest import plots
from loadtest.report import Report
from loadtest.tables import Table, equality_line, overview, tables

#: Nothing may be loaded and nothing may run, whatever a name or an answer holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root {
  color-scheme: light dark; --back: #fff; --text: #1b1f24; --faint: #57606a; --line: #d0d7de;
}
@media (prefers-color-scheme: dark) {
  :root { --back: #0d1117; --text: #e6edf3; --faint: #9ea7b3; --line: #3d444d; }
}
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--back);
  color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, li, caption, summary { color: var(--faint); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td { overflow-wrap: anywhere; }
figure { margin: 1rem 0; } img { max-width: 100%; background: #fff; border-radius: .4rem; }
"""

_CAPTIONS = {
    "throughput": "Output tokens a second, by load",
    "ttft": "Time to the first token: the share of requests at or below it",
    "tpot": "Time of an output token after the first: the share of requests at or below it",
    "ratios": "Tokens a second over the baseline's, with 95 % intervals; above 1 is faster",
}


def document(report: Report) -> str:
    """The page. It is well-formed XML, too; everything that was not written here is escaped."""
    targets = ", ".join(str(model) for model in report.settings.get("models", {}).values())
    head = (
        '<meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}"/>'
        f"<title>Load test: {_text(targets)}</title><style>{_STYLE}</style>"
    )
    parts = [f"<h1>Load test: {_text(targets)}</h1>"]
    parts += [_table(overview(report))]
    if report.equality is not None:
        parts.append(f"<p>{_text(equality_line(report.equality))}</p>")
    if report.notes:
        notes = "".join(f"<li>{_text(note)}</li>" for note in report.notes)
        parts.append(f"<ul>{notes}</ul>")
    parts += _plots(report)
    parts += [_table(table) for table in tables(report)]
    settings: list[tuple[str, ...]] = [(k, json.dumps(v)) for k, v in report.settings.items()]
    parts.append(_table(("Settings", ("setting", "value"), settings)))
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def write_html(report: Report, directory: Path) -> Path:
    """Writes `report.html`; without plots where matplotlib is not installed."""
    path = directory / "report.html"
    path.write_text(document(report), "utf-8")
    return path


def _plots(report: Report) -> list[str]:
    try:
        drawn = {name: plots.as_svg(figure) for name, figure in plots.figures(report).items()}
    except plots.PlotsUnavailable:
        return []
    return [_picture(_CAPTIONS[name], svg) for name, svg in drawn.items()]


def _picture(caption: str, svg: bytes) -> str:
    """As an image and not as markup: what is in it then cannot act on the page."""
    data = base64.b64encode(svg).decode("ascii")
    return (
        f"<figure><figcaption>{_text(caption)}</figcaption>"
        f'<img alt="{escape(caption)}" src="data:image/svg+xml;base64,{data}"/></figure>'
    )


def _table(table: Table) -> str:
    title, head, rows = table
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return (
        f'<h2>{_text(title)}</h2><div class="scroll"><table>'
        f"<thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table></div>"
    )


def _row(kind: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{kind}>{_text(cell)}</{kind}>" for cell in cells) + "</tr>"


def _text(text: str) -> str:
    """Escaped, and without what XML has no place for."""
    return escape("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))
