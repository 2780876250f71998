"""The default model in float32 says, token by token, what transformers.generate says.

Another implementation, real weights, real prompts: nothing here is shared with the engine but
the files. Exactly equal; no tolerance, no excuse for near-ties.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from engine.build import assemble
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.model import sources
from engine.model.loader import LoadedModel, load_model
from tests.end_to_end.serving import chat_prompts
from tests.fakes import Run, ask, run

pytestmark = pytest.mark.smollm2

PROMPTS = 20
NEW_TOKENS = 32

Ids = tuple[int, ...]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads wait for each other in every layer, which takes ages on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory() -> Path:
    return sources.resolve(sources.DEFAULT_SOURCE)


@pytest.fixture(scope="module")
def loaded(directory: Path) -> LoadedModel:
    return load_model(directory, ModelConfig(str(directory), dtype="float32"))


@pytest.fixture(scope="module")
def expected(directory: Path) -> dict[Ids, Ids]:
    """Prompt -> transformers' greedy continuation, beyond any end of text."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with contextlib.redirect_stderr(io.StringIO()):  # the reader's progress bars
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            config=AutoConfig.from_pretrained(directory),
            gguf_file="model.gguf",
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        ).eval()
    texts = chat_prompts()
    continuations = {}
    for text in texts[:: len(texts) // PROMPTS][:PROMPTS]:
        ids = tokenizer(text, return_tensors="pt").input_ids
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=[],
            pad_token_id=0,
        )
        continuations[tuple(ids[0].tolist())] = tuple(output[0, ids.shape[1] :].tolist())
    assert len(continuations) == PROMPTS
    assert all(len(tokens) == NEW_TOKENS for tokens in continuations.values())
    return continuations


@dataclass(frozen=True)
class Setting:
    """How the engine is built."""

    drafter: str = "lookup"
    max_draft: int = 4
    page_size: int = 16
    num_pages: int = 1024
    prefix_reuse: bool = True

    def config(self) -> EngineConfig:
        return EngineConfig(
            model=ModelConfig("smollm2"),
            cache=CacheConfig(
                page_size=self.page_size,
                num_pages=self.num_pages,
                prefix_reuse=self.prefix_reuse,
            ),
            scheduler=SchedulerConfig(max_batch_tokens=256, max_sequences=16),
            speculation=SpeculationConfig(
                mode="fixed", drafter=self.drafter, max_draft=self.max_draft
            ),
        )


def answer(loaded: LoadedModel, setting: Setting, prompts: list[Ids], *, alone: bool) -> Run:
    """The engine's continuations; request ids are positions in `prompts`."""
    requests = [
        ask(str(i), prompt, NEW_TOKENS, ignore_eos=True) for i, prompt in enumerate(prompts)
    ]
    built = assemble(setting.config(), loaded)
    if not alone:
        return run(built, requests)
    every = Run(built)
    for request in requests:
        every.add(request)
        every.finish()
    return every


def check(run: Run, setting: Setting, expected: dict[Ids, Ids]) -> None:
    wrong = [
        f"prompt {i} differs at token "
        f"{next(n for n in range(NEW_TOKENS) if said[n : n + 1] != tokens[n : n + 1])}"
        for i, tokens in enumerate(expected.values())
        if (said := run.answers[str(i)].tokens) != tokens
    ]
    assert not wrong
    assert (run.accepted > 0) == (setting.drafter != "none")


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_alone(loaded: LoadedModel, expected: dict[Ids, Ids], drafter: str) -> None:
    setting = Setting(drafter)
    check(answer(loaded, setting, list(expected), alone=True), setting, expected)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("none"),
        Setting("lookup"),
        Setting("lookup", max_draft=1, page_size=8, prefix_reuse=False),
        Setting("lookup", max_draft=2, page_size=1, num_pages=16_384),
        Setting("lookup", max_draft=8, page_size=8, num_pages=64),
        Setting("none", page_size=16, num_pages=60, prefix_reuse=False),
    ],
    ids=str,
)
def test_in_company_of_sixteen(
    loaded: LoadedModel, expected: dict[Ids, Ids], setting: Setting
) -> None:
    found = answer(loaded, setting, list(expected), alone=False)
    check(found, setting, expected)
    assert max(step.running for step in found.stats) > 4
    assert (found.preemptions > 0) == (setting.num_pages < 1000), found.preemptions
