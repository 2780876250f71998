"""Heads on disk: in the forms that others write, and refused where they do not fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig
from engine.draft import registry
from engine.draft.heads.checkpoint import draft_ids, read_weights, vocabulary, write_head
from engine.draft.heads.config import check_head, read_config
from engine.draft.heads.runner import HeadRunner, load_head
from engine.errors import ConfigurationError, ModelNotSupported
from engine.model.sources import resolve_head
from tests.draft.plain_eagle import PlainHead, random_head
from tests.draft.test_eagle_model import paged_rounds, text
from tests.tiny_models import VOCAB, make_model


@pytest.fixture
def head() -> PlainHead:
    return random_head(norm_before_residual=True)


@pytest.fixture
def written(head: PlainHead, tmp_path: Path) -> Path:
    place = tmp_path / "head"
    verifier = {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]}
    write_head(place, head.config, head.weights, verifier)
    return place


def change(place: Path, **changes: Any) -> None:
    """Changes fields of a configuration; those of the layer by their name alone."""
    content = json.loads((place / "config.json").read_text())
    for name, value in changes.items():
        where = content if name in content else content["transformer_layer_config"]
        where[name] = value
    (place / "config.json").write_text(json.dumps(content))


def rewrite(place: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = place / "model.safetensors"
    weights = {name: w.clone() for name, w in load_file(path).items()}
    edit(weights)
    save_file(weights, path)


def test_what_is_written_is_read(head: PlainHead, written: Path) -> None:
    config = read_config(written)
    assert config == head.config
    weights = read_weights(written, config)
    assert weights.keys() == head.weights.keys()
    assert all(torch.equal(weights[name], head.weights[name]) for name in weights)
    assert torch.equal(draft_ids(config, weights), head.ids)
    check_head_against(written)


def check_head_against(written: Path, **changes: Any) -> None:
    target = written.parent / "target"
    target.mkdir(exist_ok=True)
    own = make_model("llama", **changes).config.to_dict()
    (target / "config.json").write_text(json.dumps(own))
    check_head(target, written)


def test_the_authors_form_is_read_as_it_is(head: PlainHead, tmp_path: Path) -> None:
    """Flat configuration, `midlayer`, no embeddings, and the layers that the authors chose."""
    flat = head.config.layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": head.config.draft_vocab,
        "num_hidden_layers": 1,
        "norm_before_residual": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(flat))
    theirs = {name.replace("layers.0.", "midlayer."): w for name, w in head.weights.items()}
    save_file(theirs, tmp_path / "model.safetensors")
    config = read_config(tmp_path)
    assert config.taps is None
    assert config.taps_of(30) == (2, 15, 27)
    loaded = load_head(ModelConfig(str(tmp_path), dtype="float32"))
    runner = loaded.make_runner(30, 4)
    assert isinstance(runner, HeadRunner)
    runner.model.attach(lambda ids: head.embeddings[ids], 20)
    found = paged_rounds(runner, *text(head))[:, head.ids]
    torch.testing.assert_close(found, head.rounds(*text(head)), atol=1e-4, rtol=1e-4)


def test_embeddings_of_its_own_are_used(head: PlainHead, written: Path) -> None:
    rewrite(written, lambda w: w.update({"embed_tokens.weight": head.embeddings.clone()}))
    runner = load_head(ModelConfig(str(written), dtype="float32")).make_runner(30, 4)
    assert isinstance(runner, HeadRunner)
    runner.model.attach(None, 20)
    found = paged_rounds(runner, *text(head))[:, head.ids]
    torch.testing.assert_close(found, head.rounds(*text(head)), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_library_reads_what_is_written(head: PlainHead, written: Path) -> None:
    config = pytest.importorskip("speculators.models.eagle3.config")
    core = pytest.importorskip("speculators.models.eagle3.core")
    own = config.Eagle3SpeculatorConfig.from_pretrained(written)
    assert own.draft_vocab_size == head.config.draft_vocab
    assert own.norm_before_residual
    assert own.eagle_aux_hidden_state_layer_ids == [0, 1, 2]
    assert own.transformer_layer_config.head_dim == 12
    model = core.Eagle3DraftModel(own)
    _missing, unexpected = model.load_state_dict(load_file(written / "model.safetensors"), False)
    assert not unexpected
    saved = written.parent / "saved"
    model.embed_tokens.weight.data = head.embeddings.clone()
    model.save_pretrained(saved)
    ours, theirs = read_config(saved), head.config
    assert ours.taps == theirs.taps
    assert ours.hidden == theirs.hidden
    weights = read_weights(saved, ours)
    assert all(torch.equal(weights[name], head.weights[name]) for name in head.weights)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"speculators_model_type": "medusa"}, "holds a medusa head"),
    ({"num_hidden_layers": 2}, "2 decoder layers, and EAGLE-3 has one"),
    ({"hidden_act": "gelu"}, "activation is gelu"),
    ({"model_type": "gemma"}, "family gemma"),
    ({"draft_vocab_size": VOCAB + 1}, "guesses 98 tokens of a vocabulary of 97"),
    ({"rope_parameters": {"rope_type": "dynamic"}}, "rotary embedding is dynamic"),
    ({"layer_types": ["sliding_attention"]}, "sliding window"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED)
def test_heads_that_would_be_computed_wrong_are_refused(
    written: Path, changes: dict[str, Any], why: str
) -> None:
    change(written, **changes)
    with pytest.raises(ModelNotSupported, match=why):
        read_config(written)


def test_weights_must_be_complete_and_fit(head: PlainHead, written: Path) -> None:
    def refused(edit: Callable[[dict[str, torch.Tensor]], object], why: str) -> None:
        rewrite(written, edit)
        with pytest.raises(ModelNotSupported, match=why):
            read_weights(written, read_config(written))
        write_head(written, head.config, head.weights, {})

    refused(lambda w: w.pop("fc.weight"), r"lacks fc\.weight")
    refused(lambda w: w.pop("d2t"), "lacks d2t")
    refused(
        lambda w: w.update({"lm_head.weight": torch.ones(3, 32)}), r"lm_head\.weight with shape"
    )
    refused(lambda w: w.update({"surprise": torch.ones(3)}), "surprise with shape")
    refused(lambda w: w["d2t"].fill_(VOCAB), "does not map 50 draft tokens")
    (written / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ModelNotSupported, match="cannot be read"):
        read_weights(written, read_config(written))
    (written / "model.safetensors").unlink()
    with pytest.raises(ModelNotSupported, match="holds no safetensors"):
        read_weights(written, read_config(written))


def test_a_head_of_another_model_is_refused(written: Path) -> None:
    with pytest.raises(ModelNotSupported, match="hidden states are 32 wide, those of target 64"):
        check_head_against(written, hidden_size=64)
    with pytest.raises(ModelNotSupported, match="vocabulary is 97 wide, those of target 98"):
        check_head_against(written, vocab_size=98)
    with pytest.raises(ModelNotSupported, match="reads layers 0, 1, 2, but target has 1"):
        check_head_against(written, num_hidden_layers=1)


def test_a_model_is_no_head(tmp_path: Path) -> None:
    own = make_model("llama").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(ModelNotSupported, match="holds no head"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelNotSupported, match="no head's configuration"):
        read_config(tmp_path)


def test_where_a_head_is_looked_for(written: Path, tmp_path: Path) -> None:
    assert resolve_head(str(written)) == written.resolve()
    with pytest.raises(ConfigurationError, match="neither a directory here nor a hub id"):
        resolve_head("no/such/place/here")
    with pytest.raises(ModelNotSupported, match=r"no config\.json"):
        resolve_head(str(tmp_path))
    (written / "model.safetensors").rename(written / "pytorch_model.bin")
    with pytest.raises(ModelNotSupported, match="can run code"):
        resolve_head(str(written))


def test_the_draft_vocabulary_has_a_map_each_way() -> None:
    ids = torch.tensor([1, 4, 5])
    found = vocabulary(ids, 7)
    assert found["t2d"].nonzero().flatten().tolist() == [1, 4, 5]
    config = dataclasses.replace(random_head().config, draft_vocab=3)
    assert draft_ids(config, found).tolist() == [1, 4, 5]


def test_the_registry_knows_how_heads_are_named() -> None:
    own = registry.get("eagle").model
    assert own is not None
    assert own.setting == "draft_head"
