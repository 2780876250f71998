"""The head's pass, by the engine's kernels and pages, beside plain torch and its own library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.batch import Span, build_batch
from engine.cache.pages import PagePool
from engine.draft.heads.runner import HeadRunner
from tests.draft.plain_eagle import PlainHead, random_head
from tests.tiny_models import VOCAB

HEADS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"family": "qwen3"},
    "whole vocabulary": {"draft_vocab": VOCAB},
    "normed residual": {"norm_before_residual": True, "norm_output": True},
    "normed together": {"norm_before_fc": True},
    "normed apart": {"fc_norm": True},
}


def paged_rounds(
    runner: HeadRunner, features: torch.Tensor, tokens: list[int], behind: list[int]
) -> torch.Tensor:
    """What `PlainHead.rounds` says, by pages of four tokens, the text taken in in two pieces."""
    pool = PagePool(30, 4)
    table = pool.new_table("")
    assert pool.reserve(table, len(tokens) + len(behind))
    parts = [(0, tokens[:5]), (5, tokens[5:])]
    for start, part in parts:
        batch = build_batch([Span(part, start, table, len(part))], 4, 30, "cpu", 1)
        states = runner.remember(batch, features[start : start + len(part)])
    state = states[-1:]
    rows = []
    for depth, token in enumerate([tokens[-1], *behind]):
        span = Span([token], len(tokens) - 1 + depth, table, 1)
        logits, state = runner.run(build_batch([span], 4, 30, "cpu", 1), state)
        rows.append(logits[0].clone())
    return torch.stack(rows)


def text(head: PlainHead) -> tuple[torch.Tensor, list[int], list[int]]:
    dice = torch.Generator().manual_seed(1)
    features = torch.randn(17, 3 * head.config.hidden, generator=dice)
    tokens = torch.randint(VOCAB, (20,), generator=dice).tolist()
    return features, tokens[:17], tokens[17:]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounds_are_those_of_plain_torch(name: str, dtype: str) -> None:
    head = random_head(**HEADS[name])
    wanted = head.rounds(*text(head))
    runner = head.loaded(dtype).make_runner(30, 4)
    assert isinstance(runner, HeadRunner)
    runner.model.attach(lambda ids: head.embeddings[ids], 20)
    found = paged_rounds(runner, *text(head))
    assert torch.isinf(found).sum() == len(found) * (VOCAB - head.config.draft_vocab)
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype == "float32" else {"atol": 0.1, "rtol": 0.05}
    torch.testing.assert_close(found[:, head.ids], wanted, **tolerance)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", HEADS)
def test_rounds_are_those_of_the_library(name: str) -> None:
    """`speculators` unrolls its training the way a draft goes on: row i of its step j is the
    round at depth j of a draft after the text that ends with row i."""
    core = pytest.importorskip("speculators.models.eagle3.core")
    config = pytest.importorskip("speculators.models.eagle3.config")
    head = random_head(**HEADS[name])
    own = config.Eagle3SpeculatorConfig(
        transformer_layer_config=dict(head.config.layer),
        draft_vocab_size=head.config.draft_vocab,
        eagle_aux_hidden_state_layer_ids=list(head.config.taps or ()),
        **{
            flag: getattr(head.config, flag)
            for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
    )
    own.transformer_layer_config._attn_implementation = "eager"
    model = core.Eagle3DraftModel(own).eval()
    weights = head.weights | {"embed_tokens.weight": head.embeddings}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all("verifier" in name for name in missing)
    features, tokens, _ = text(head)
    said: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, out: said.append(out[0]))
    with torch.inference_mode():
        model(
            features[None],
            torch.tensor([tokens]),
            torch.zeros(1, len(tokens), dtype=torch.long),
            ttt_steps=3,
        )
    for row in (4, 9, 13):  # what stands behind a row is the text itself
        found = head.rounds(features[: row + 1], tokens[: row + 1], tokens[row + 1 : row + 3])
        wanted = torch.stack([step[row] for step in said])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
