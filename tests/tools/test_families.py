"""The table of docs/models.md: complete, nothing wrong in it, and true for some of each kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.caches import own_cache
from tools import families

#: One of each kind of answer, and of each kind of reason.
SOME = (
    "llama",
    "qwen2 with windows",
    "gpt_neox",
    "gemma3_text",
    "mixtral",
    "phi3 with longrope",
    "lfm2",
    "deepseek_v3",
    "gpt_oss",
    "doge",
    "falcon",
)


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPECSERVE_HOME", str(own_cache(tmp_path)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_table_has_every_family_once() -> None:
    assert list(families.read_table()) == list(families.FAMILIES)
    assert len({name.split()[0] for name in families.FAMILIES}) >= 60


def test_nothing_in_it_is_wrong() -> None:
    served = [row.split(" | ")[2] for row in families.read_table().values()]
    assert set(served) == {"native", "torch", "refused"}
    assert served.count("refused") < len(served) / 2


def without_figures(row: str) -> str:
    """How far a row of logits is off depends on the machine; that it is does not."""
    return re.sub(r"\d[\d.e-]*", "N", row)


@pytest.mark.parametrize("family", SOME)
def test_it_is_what_happens(family: str) -> None:
    row = families.examine(family).row
    assert without_figures(row) == without_figures(families.read_table()[family])


def test_a_wrong_answer_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comparison, by generated text, is one of its own."""
    generate = families._generate
    monkeypatch.setattr(families, "_generate", lambda path: [[*a[:-1], 0] for a in generate(path)])
    assert families.examine("llama").served == "WRONG"
