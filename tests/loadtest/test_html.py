"""The report as a page: well-formed, whole, and deaf to what is in it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtest import html, plots, report
from loadtest.plan import Arm, Lane
from loadtest.stats import Slo
from loadtest.tables import overview
from tests.loadtest.making import LEVEL, OFF, TARGET, answer, result

EVIL = "<script>alert(1)</script>&\"'"


def made() -> report.Report:
    evil = Lane(EVIL, TARGET, Arm(EVIL))
    results = []
    for number in range(4):
        told = replace(answer(), passes=4, drafted=10, accepted=5)
        results.append(result(OFF, number, [answer(text=EVIL)], 2.0))
        results.append(result(evil, number, [told], 1.0))
    settings = {"check_equal": True, "models": {"server": EVIL + "\0"}}
    return report.make_report(settings, [OFF, evil], [LEVEL], results, Slo())


def test_the_page_is_well_formed_and_asks_nobody(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = html.write_html(made(), tmp_path).read_text("utf-8")
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>"))
    assert {element.tag for element in tree.iter()} & {"script", "link", "iframe", "a"} == set()
    addresses = [v for e in tree.iter() for k, v in e.attrib.items() if k in ("src", "href")]
    assert len(addresses) == 4  # plots
    assert all(address.startswith("data:image/svg+xml;base64,") for address in addresses)
    assert not re.search(r"https?://(?!127\.0\.0\.1)|url\(|@import", page)
    [policy] = [e.get("content") for e in tree.iter("meta") if e.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    text = "".join(tree.itertext())
    assert f"Load test: {EVIL}\ufffd" in text
    assert "2.000 to 2.000" in text


def test_without_matplotlib_the_page_has_no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: object) -> None:
        raise plots.PlotsUnavailable("none")

    monkeypatch.setattr(plots, "figures", missing)
    assert "<img" not in html.document(made())


def test_the_overview_has_what_the_server_told() -> None:
    _, head, rows = overview(made())
    off, evil = (dict(zip(head, row, strict=True)) for row in rows)
    assert off["tok/pass"] == off["guesses kept"] == "unknown"
    assert (evil["tok/pass"], evil["guesses kept"]) == ("2.00", "50 %")
    assert (evil["ratio"], evil["95 % interval"]) == ("2.000", "2.000 to 2.000")
