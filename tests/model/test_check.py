"""The first load: a model that would be served wrong is refused, and the sentence names why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DiffLlamaConfig,
    GPTNeoXConfig,
    Lfm2Config,
    Llama4TextConfig,
    MiniMaxConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    RecurrentGemmaConfig,
)

from engine.config import ModelConfig
from engine.errors import ConfigurationError, ModelNotSupported
from engine.model import check, probe, runner
from engine.model.checked import load_checked
from engine.model.lessons import rows_of, schedule
from engine.model.loader import LoadedModel
from tests.caches import own_cache
from tests.tiny_models import CONTEXT, make_model

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 40,
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [1.5, 3.0, 5.0, 7.0],
}
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for each test, with the kernels of all."""
    place = own_cache(tmp_path / "home")
    monkeypatch.setenv("SPECSERVE_HOME", str(place))
    return place


def load(model: PreTrainedModel, path: Path, **settings: Any) -> LoadedModel:
    """The model, by way of its files."""
    model.save_pretrained(path / "model")
    return again(path, **settings)


def again(path: Path, **settings: Any) -> LoadedModel:
    return load_checked(path / "model", ModelConfig("tiny", **({"dtype": "float32"} | settings)))


def of(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedModel:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(kind(**(SIZES | changes))).float()


# -- what is found, and what is kept -----------------------------------------------------------


@pytest.mark.parametrize("settings", [{"runner": "native"}, {"runner": "torch"}])
def test_a_sound_model_says_what_was_compared(settings: dict[str, Any], tmp_path: Path) -> None:
    said = load(make_model("mistral"), tmp_path, **settings).checked
    assert "rows equal transformers' own forward but for" in said
    assert "beyond 8 tokens" in said


def test_bfloat16_passes(tmp_path: Path) -> None:
    assert "rows equal" in load(make_model("qwen2"), tmp_path, dtype="bfloat16").checked


def test_it_is_done_once_for_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    expect = check.expect

    def counted(*args: Any, **kwargs: Any) -> check.Expected:
        runs.append("")
        return expect(*args, **kwargs)

    monkeypatch.setattr(check, "expect", counted)
    first = load(make_model(), tmp_path)
    assert again(tmp_path).checked == first.checked
    assert len(runs) == 1
    again(tmp_path, runner="torch")
    assert len(runs) == 2
    again(tmp_path, max_model_len=50)
    assert len(runs) == 3
    path = tmp_path / "model" / "model.safetensors"
    save_file(load_file(path), path, {"format": "pt", "other": "more"})
    again(tmp_path)
    assert len(runs) == 4
    for damaged in (tmp_path / "home" / "checked").iterdir():
        damaged.write_text("{")
    assert again(tmp_path).checked == first.checked
    assert len(runs) == 5


def test_a_border_that_takes_too_long_is_said_to_be_unreached() -> None:
    model = make_model("mistral", attention=runner.ATTENTION)
    expected = check.expect(model, [8], CONTEXT, seconds=0.0)
    assert (expected.beyond, expected.unreached) == ([], [8])
    assert check.expect(model, [0, 8, CONTEXT], CONTEXT).beyond == [8]


@pytest.mark.parametrize(("length", "borders"), [(44, []), (90, [30, 66]), (3, []), (1, [])])
def test_the_passes_read_every_text_to_its_end(length: int, borders: list[int]) -> None:
    passes = schedule([21, 10, length], borders)
    read = [0, 0, 0]
    for parts in passes:
        for part in parts:
            if part.start:
                assert part.start in (read[part.text], length - 1)
            read[part.text] = part.start + part.count
            assert part.start + part.count + part.refused <= [21, 10, length][part.text]
    assert read == [21, 10, length]
    for border in borders:
        assert any(p.text == 2 and p.start + p.count < border < p.start + p.count + p.refused
                   for parts in passes for p in parts)  # fmt: skip
    rows = {row for parts in passes for row in rows_of(parts, 2)}
    assert rows >= set(range(length - min(16, length), length))


# -- faults, injected --------------------------------------------------------------------------


def test_a_window_that_is_not_kept_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_window", lambda _: 0)
    with pytest.raises(ModelNotSupported, match="MistralForCausalLM would be served wrong"):
        load(make_model("mistral"), tmp_path, runner="torch")
    with pytest.raises(ModelNotSupported, match="Qwen2ForCausalLM would be served wrong"):
        load(make_model("qwen2-window"), tmp_path, runner="native")


def test_experts_excuse_a_few_rows_and_not_all_of_those_behind_a_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_window", lambda _: 0)
    with pytest.raises(ModelNotSupported, match=r"MixtralForCausalLM would be served wrong"):
        load(of(MixtralConfig, num_local_experts=2, sliding_window=220), tmp_path)


def test_state_outside_the_cache_is_found_though_every_layer_attends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that looks at the row before is right in one piece, and wrong in chunks."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward: Callable[..., torch.Tensor] = LlamaMLP.forward

    def mixing(self: Any, x: torch.Tensor) -> torch.Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        return forward(self, x + 0.2 * before)

    monkeypatch.setattr(LlamaMLP, "forward", mixing)
    with pytest.raises(ModelNotSupported, match="differ from transformers' own forward in"):
        load(make_model(), tmp_path, runner="torch")


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_rotary_factors_chosen_by_the_longest_row_are_found(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the limit below keeps out, would be seen as well."""
    monkeypatch.setattr(probe, "_turning_points", lambda _: [])
    with pytest.raises(ModelNotSupported, match="would be served wrong"):
        load(long_rope(kind), tmp_path)


# -- rope, state, stray settings ---------------------------------------------------------------


def long_rope(kind: str) -> PreTrainedModel:
    if kind == "llama":
        return make_model("llama", rope_parameters=dict(LONG_ROPE))
    return of(Phi3Config, rope_parameters=dict(LONG_ROPE), original_max_position_embeddings=40)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_long_rope_is_served_up_to_its_border(kind: str, tmp_path: Path) -> None:
    model = load(long_rope(kind), tmp_path)
    assert model.max_model_len == 40
    with pytest.raises(ConfigurationError, match="max_model_len is 41, but its longrope rotary"):
        again(tmp_path, max_model_len=41)
    assert again(tmp_path, max_model_len=30).max_model_len == 30


def test_dynamic_rope_is_served_up_to_its_border(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert load(make_model(rope_parameters=rope), tmp_path).max_model_len == CONTEXT


def test_a_chunk_that_forgets_is_a_border_only_where_the_code_has_it(tmp_path: Path) -> None:
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8}
    chunked = of(Llama4TextConfig, attention_chunk_size=24, **experts)
    assert load(chunked, tmp_path).max_model_len == 24
    assert load(make_model(attention_chunk_size=24), tmp_path / "b").max_model_len == CONTEXT


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Lfm2Config, {"layer_types": ["conv", "full_attention", "conv"]}),
        (MiniMaxConfig, {"num_local_experts": 2, "head_dim": 8}),
        (RecurrentGemmaConfig, {"lru_width": 32, "head_dim": 8}),
        (DiffLlamaConfig, {}),
    ],
)
def test_state_outside_keys_and_values_is_refused(
    kind: type[PreTrainedConfig], changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(
        ModelNotSupported, match=r"ForCausalLM (has \d of 3 layers|attends 2 times)"
    ):
        load(of(kind, **changes), tmp_path)


@pytest.mark.parametrize("settings", ["native", "torch"])
def test_a_stray_window_is_ignored_as_the_model_ignores_it(settings: str, tmp_path: Path) -> None:
    assert load(make_model(sliding_window=5), tmp_path, runner=settings).runner_name == settings


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (GPTNeoXConfig, {}),
        (OPTConfig, {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    ],
)
def test_stray_groups_are_ignored_as_the_model_ignores_them(
    kind: type[PreTrainedConfig], changes: dict[str, Any], tmp_path: Path
) -> None:
    model = load(of(kind, **changes), tmp_path)
    assert model.shape.num_heads == 4
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_key_value_heads"] == 2


# -- weights -----------------------------------------------------------------------------------


def spoil(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = path / "model" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


K = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(K), rf"lacks {K}, which would be random"),
        (lambda t: [t.pop(K), t.pop("model.norm.weight")], rf"lacks 2 tensors, first {K}"),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(8)}),
            r"holds model.layers.1.self_attn.q_norm.weight, which the model .* does not use",
        ),
        (lambda t: t.update({K: torch.ones(8, 32)}), rf"{K} with shape \(8, 32\), .*\(16, 32\)"),
        (lambda t: t[K].fill_(torch.nan), rf"values in {K} that are not finite"),
        (lambda t: t["lm_head.weight"].fill_(torch.inf), "values in lm_head.weight that are not"),
    ],
)
def test_weights_that_are_not_the_models_are_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], Any], said: str, tmp_path: Path
) -> None:
    load(make_model(), tmp_path)
    spoil(tmp_path, change)
    with pytest.raises(ModelNotSupported, match=said):
        again(tmp_path)


def test_what_may_be_missing_or_spare_is_no_reason(tmp_path: Path) -> None:
    """Tied output layers are not stored; old files hold rotary tables, some parts for pictures."""
    load(make_model("smollm"), tmp_path)
    spare = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    spare["model.visual.patch.weight"] = torch.ones(2)
    spoil(tmp_path, lambda tensors: tensors.update(spare))
    again(tmp_path)


def test_one_token_that_is_no_number_does_not_stop_the_start(tmp_path: Path) -> None:
    """Its requests fail alone."""
    load(make_model(), tmp_path)
    spoil(tmp_path, lambda tensors: tensors["model.embed_tokens.weight"][7].fill_(torch.nan))
    assert "rows equal" in again(tmp_path).checked


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, name: tensors.pop(name),
        lambda tensors, name: tensors.update({name: torch.ones(3, 3)}),
    ],
)
def test_an_expert_that_is_missing_or_misshapen_is_named(
    change: Callable[[dict[str, torch.Tensor], str], Any], tmp_path: Path
) -> None:
    """transformers joins the experts of a layer into one tensor, and names none if that fails."""
    load(of(MixtralConfig, num_local_experts=2), tmp_path)
    expert = "model.layers.1.block_sparse_moe.experts.1.w1.weight"
    spoil(tmp_path, lambda tensors: change(tensors, expert))
    with pytest.raises(ModelNotSupported, match=r"model\.layers\.1\.mlp\.experts.* is incomplete"):
        again(tmp_path)
