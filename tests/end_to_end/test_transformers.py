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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
)

from engine.build import assemble
from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.model import sources
from engine.model.inventory import describe_weights
from engine.model.loader import LoadedModel, load_model
from engine.model.quantized import QuantizedWeight
from engine.model.weights import read_model
from tests.end_to_end.serving import chat_prompts
from tests.fakes import Run, ask, run
from tests.gguf_models import assert_equal

pytestmark = pytest.mark.smollm2

PROMPTS = 20
TOGETHER = 5
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
def theirs(directory: Path) -> PreTrainedModel:
    """The model as transformers reads the file; that takes half a minute."""
    with contextlib.redirect_stderr(io.StringIO()):  # the reader's progress bars
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory,
            config=AutoConfig.from_pretrained(directory),
            gguf_file="model.gguf",
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    return model.eval()


@pytest.fixture(scope="module")
def expected(directory: Path, theirs: PreTrainedModel) -> dict[Ids, Ids]:
    """Prompt -> transformers' greedy continuation, beyond any end of text. Of five prompts at a
    time, of about the same length: a token of each takes little longer than one of one."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    texts = chat_prompts()
    chosen = sorted(
        texts[:: len(texts) // PROMPTS][:PROMPTS], key=lambda t: len(tokenizer(t).input_ids)
    )
    continuations = {}
    for start in range(0, PROMPTS, TOGETHER):
        asked = tokenizer(chosen[start : start + TOGETHER], return_tensors="pt", padding=True)
        output = theirs.generate(
            **asked,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=[],
            pad_token_id=0,
        )
        for ids, mask, said in zip(asked.input_ids, asked.attention_mask, output, strict=True):
            continuations[tuple(ids[mask.bool()].tolist())] = tuple(said[len(ids) :].tolist())
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


def test_alone(loaded: LoadedModel, expected: dict[Ids, Ids]) -> None:
    """With drafts where the text repeats itself, and plain steps where it does not."""
    setting = Setting("lookup")
    check(answer(loaded, setting, list(expected), alone=True), setting, expected)


@pytest.mark.parametrize(
    "setting",
    [
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


def test_the_files_blocks_are_its_weights(directory: Path, theirs: PreTrainedModel) -> None:
    kept = read_model(directory, torch.float32, "file")
    assert describe_weights(kept).kinds == "Q4_1, Q8_0"
    assert_equal(kept, theirs)
    assert isinstance(kept.lm_head.weight, QuantizedWeight)
    assert kept.lm_head.weight is kept.model.embed_tokens.weight
