"""Weights read in place from GGUF files, and matrices rounded at load: values, names, refusals."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from engine.config import ModelConfig
from engine.errors import ConfigurationError, ModelNotSupported
from engine.model import sources
from engine.model.checked import load_checked
from engine.model.choices import choose_weights
from engine.model.fill import KEPT
from engine.model.gguf_file import GgufFile
from engine.model.inventory import describe_weights, in_blocks
from engine.model.loader import open_model
from engine.model.probe import probe
from engine.model.quantized import QuantizedEmbedding, QuantizedLinear
from engine.model.weights import name_bad_tensor, read_model
from engine.model.widen import in_float32
from tests.caches import own_cache
from tests.gguf_models import Kinds, assert_equal, make_source, weights_of, write_model
from tests.tiny import Weights, write_gguf
from tests.tiny_models import make_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSERVE_HOME", str(own_cache(tmp_path / "cache")))


def mixed(name: str) -> str:
    """As files of a few bits are: other kinds for some matrices, and some that nothing keeps."""
    for part, kind in (("attn_v", "Q6_K"), ("ffn_down", "Q5_0"), ("ffn_up", "BF16")):
        if part in name:
            return kind
    return {"token_embd.weight": "Q8_0", "output.weight": "F16"}.get(name, "Q4_K")


def only(kind: str) -> Kinds:
    return lambda _name: kind


def by_transformers(path: Path) -> PreTrainedModel:
    """What transformers' own reader makes of a file."""
    with contextlib.redirect_stderr(io.StringIO()):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            attn_implementation="eager",
            quantization_config=GgufConfig(dequantize=True),
        )
    return model


# -- values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kinds", "width"),
    [
        ("llama", only("Q4_1"), 64),
        ("smollm", only("Q8_0"), 64),
        ("llama", mixed, 256),
        ("qwen2", only("Q4_0"), 64),
        ("qwen3", only("Q8_0"), 64),
    ],
    ids=["llama-Q4_1", "tied-Q8_0", "llama-mixed", "qwen2-Q4_0", "qwen3-Q8_0"],
)
def test_all_tensors_are_those_of_transformers_reader(
    family: str, kinds: Kinds, width: int, tmp_path: Path
) -> None:
    own = {"head_dim": 128} if family == "qwen3" else {}  # the reader knows no other
    source = make_source(family, width, **own)
    path = write_model(tmp_path / "tiny.gguf", source, kinds)
    directory = sources.resolve(str(path))
    expected = by_transformers(path)
    unpacked, kept = (read_model(directory, torch.float32, keep) for keep in ("float", "file"))
    assert not in_blocks(unpacked)
    assert_equal(unpacked, expected)
    assert_equal(kept, expected)
    for name, module in kept.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            assert module.weight.kind in KEPT, name
    file = GgufFile(path)
    in_file = {t.kind for t in file.tensors.values() if len(t.shape) == 2} & KEPT
    assert {m.weight.kind for m in kept.modules() if isinstance(m, QuantizedLinear)} <= in_file
    assert set(describe_weights(kept).kinds.split(", ")) >= in_file
    if source.config.tie_word_embeddings:
        assert kept.lm_head.weight is kept.model.embed_tokens.weight
    with torch.inference_mode():
        ids = torch.tensor([[3, 1, 4, 1, 5]])
        assert torch.equal(kept(ids).logits, expected.eval()(ids).logits)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Also against the model itself: transformers' reader might err as ours does."""
    for family in ("llama", "smollm", "qwen2", "qwen3"):
        source = make_source(family)
        path = write_model(tmp_path / f"{family}.gguf", source, only("F32"))
        model = read_model(sources.resolve(str(path)), torch.float32, "file")
        assert_equal(model, source)


def test_blocks_stay_where_they_lie_in_the_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", make_source(), only("Q4_1"))
    file = GgufFile(path)
    blocks = file.blocks("blk.0.ffn_up.weight")
    assert blocks is not None
    assert np.shares_memory(blocks.data.numpy(), file._bytes)


def test_factors_of_rotary_frequencies_are_applied(tmp_path: Path) -> None:
    """Llama 3 stretches its rotary embedding; its files hold no setting for it but a table."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain, stretched = make_source(), make_source(rope_parameters=rope)
    factors = plain.model.rotary_emb.inv_freq / stretched.model.rotary_emb.inv_freq
    assert len(set(factors.tolist())) > 1
    table = {"rope_freqs.weight": factors.numpy()}
    path = write_model(tmp_path / "tiny.gguf", plain, only("F32"), table)
    model = read_model(sources.resolve(str(path)), torch.float32)
    ids = torch.arange(2, 102)[None]
    with torch.inference_mode():
        expected = stretched.eval()
        expected.set_attn_implementation("eager")
        difference = (model.eval()(ids).logits - expected(ids).logits).abs().max()
        scale = expected(ids).logits.std()
    assert difference < 1e-4 * scale


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", make_source(width=256), mixed)
    file, reader = GgufFile(path), gguf.GGUFReader(path)
    assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        stored = file.tensors[tensor.name]
        assert stored.kind == tensor.tensor_type.name
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))
        assert (stored.start, stored.size) == (tensor.data_offset, tensor.n_bytes)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(file.values(tensor.name).float(), torch.tensor(values).float())
    for key, value in file.metadata.items():
        found = reader.fields[key].contents()
        assert value == (len(found) if isinstance(found, list) else found), key


@pytest.mark.parametrize(("keep", "most"), [("int8", 0.02), ("int4", 0.2)])
def test_safetensors_are_rounded_matrix_by_matrix(keep: str, most: float, tmp_path: Path) -> None:
    source = make_source("qwen2", attention="eager")
    source.save_pretrained(tmp_path)
    model = read_model(tmp_path, torch.float32, keep)
    kinds = {"int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}[keep]
    assert model.model.layers[0].mlp.up_proj.weight.kind == kinds[0]
    assert model.model.embed_tokens.weight.kind == model.lm_head.weight.kind == kinds[1]
    found, wanted = weights_of(model), weights_of(source)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        if values.dim() == 1:
            assert torch.equal(found[name], values), name
        else:
            kind = GGMLQuantizationType[kinds["layers" not in name]]
            blocks = gguf.quants.quantize(values.numpy(), kind)
            assert torch.equal(
                found[name], torch.from_numpy(gguf.quants.dequantize(blocks, kind))
            ), name
            assert (found[name] - values).norm() < most * values.norm()


def test_rows_that_are_no_whole_blocks_are_not_rounded(tmp_path: Path) -> None:
    make_source(intermediate_size=80, attention="eager").save_pretrained(tmp_path)
    model = read_model(tmp_path, torch.float32, "int8")
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is QuantizedLinear


@pytest.mark.parametrize("family", ["smollm", "llama-biased", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_are_what_transformers_makes_of_them(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(family, attention="eager").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    monkeypatch.setattr("engine.model.weights._read_by_transformers", None)
    model = read_model(tmp_path, dtype)
    assert_equal(model, expected)
    tied = expected.lm_head.weight is expected.model.embed_tokens.weight
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.dtype is dtype
    for (name, found), (_, wanted) in zip(
        model.named_buffers(), expected.named_buffers(), strict=True
    ):
        assert torch.equal(found, wanted), name
        assert found.dtype is wanted.dtype
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


# -- refusals ------------------------------------------------------------------------------


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    source = make_source()
    directory = sources.resolve(str(write_model(tmp_path / "a.gguf", source, only("Q8_0"))))
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), np.float32)}
    spare = write_model(tmp_path / "spare.gguf", source, only("Q8_0"), extra)
    with pytest.raises(ModelNotSupported, match=r"holds blk\.0\.ffn_gate_inp\.weight, which"):
        read_model(sources.resolve(str(spare)), torch.float32)
    narrow = make_source(intermediate_size=96)
    write_model(tmp_path / "narrow.gguf", narrow, only("Q8_0")).replace(tmp_path / "a.gguf")
    with pytest.raises(ModelNotSupported, match=r"mlp\.down_proj\.weight with shape \(64, 96\)"):
        read_model(directory, torch.float32)
    small = make_source(num_hidden_layers=1)
    write_model(tmp_path / "small.gguf", small, only("Q8_0")).replace(tmp_path / "a.gguf")
    with pytest.raises(ModelNotSupported, match=r"lacks 9 tensors, first model\.layers\.1\."):
        read_model(directory, torch.float32)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.9, 0.999])
def test_damaged_files_are_one_sentence(share: float, tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", make_source(), only("Q8_0"))
    content = path.read_bytes()
    path.write_bytes(content[: max(4, int(share * len(content)))])
    with pytest.raises(ModelNotSupported, match=r"is damaged: it.*; fetch it again"):
        GgufFile(path)


def test_headers_of_any_bytes_end_in_a_sentence(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", make_source(), only("Q8_0"))
    content, random = path.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        changed = bytearray(content)
        changed[int(random.integers(0, 1200))] = int(random.integers(0, 256))
        path.write_bytes(changed)
        with contextlib.suppress(ModelNotSupported):
            GgufFile(path)


def test_stretched_positions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_name",
        lambda writer, _name: (
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            writer.add_rope_scaling_factor(4.0),
        ),
    )
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelNotSupported, match=r"stretches its positions \(yarn, by 4\)"):
        sources.resolve(str(path))


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="weights is 'q4'; choose one of auto, file"):
        ModelConfig("x", weights="q4")
    with pytest.raises(ConfigurationError, match="activations is 'int4'; choose one of int16"):
        ModelConfig("x", activations="int4")
    with pytest.raises(ConfigurationError, match="weights is bfloat16, but dtype is float32"):
        ModelConfig("x", weights="bfloat16", dtype="float32")
    with pytest.raises(ConfigurationError, match=r"weights is int4.*the device is cuda"):
        choose_weights("int4", torch.device("cuda"))
    assert choose_weights("auto", torch.device("cuda")) == "float"
    make_model("llama", attention="eager").save_pretrained(tmp_path)
    plain = open_model(tmp_path, ModelConfig("x", dtype="float32", weights="file"))
    assert describe_weights(plain).kinds == "float32"  # that is how the file has them
    wide = open_model(tmp_path, ModelConfig("x", weights="bfloat16"))
    assert wide.dtype is torch.bfloat16


def test_other_families_are_not_rounded(tmp_path: Path) -> None:
    make_model("llama", attention="eager").save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"llama"', '"granite"'))
    with pytest.raises(ModelNotSupported, match="weights is int8, but GraniteForCausalLM is none"):
        read_model(tmp_path, torch.float32, "int8")


def test_safetensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    source = make_source(attention="eager")
    source.save_pretrained(tmp_path)
    tensors = dict(source.state_dict())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotSupported, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        read_model(tmp_path, torch.float32, "int8")


# -- the check at first load ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_blocks_is_checked_once(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "tiny.gguf", make_source("smollm"), only("Q4_1"))
    directory = sources.resolve(str(path))
    config = ModelConfig(str(directory), dtype=dtype, weights="file")
    loaded = load_checked(directory, config)
    assert "rows equal transformers' own forward" in loaded.checked
    assert loaded.weights.kinds == "Q4_1"
    assert 5.0 <= loaded.weights.bits < 5.5
    others = [replace(config, weights=dtype), replace(config, activations="int8")]
    monkeypatch.setattr("engine.model.check.expect", None)
    assert load_checked(directory, config).checked == loaded.checked
    for other in others:
        with pytest.raises(TypeError):  # it is compared anew
            load_checked(directory, other)


def test_the_reference_is_in_float32_and_no_trace_of_it_is_left(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", make_source("smollm"), only("Q4_1"))
    directory = sources.resolve(str(path))
    half, full = (
        open_model(directory, ModelConfig("x", dtype=dtype, weights="file"))
        for dtype in ("bfloat16", "float32")
    )
    ids = torch.tensor([[3, 1, 4]])
    for model in (half, full):
        model.set_attn_implementation("eager")
        for module in model.modules():  # norms of this model are rounded in the narrower one
            if type(module).__name__ == "LlamaRMSNorm":
                module.weight.data.fill_(1)
    with torch.inference_mode():
        expected = full(ids).logits
        with in_float32(half):
            assert torch.equal(half(ids).logits, expected)
        assert half(ids).logits.dtype is torch.bfloat16


def test_looking_at_layers_unpacks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "tiny.gguf", make_source(), only("Q4_1"))
    directory = sources.resolve(str(path))
    kept, plain = (
        open_model(directory, ModelConfig("x", dtype="float32", weights=weights))
        for weights in ("file", "float32")
    )
    monkeypatch.setattr(QuantizedLinear, "weight", property(lambda _: None), raising=False)
    assert probe(kept) == probe(plain)


def test_blocks_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", make_source(), only("Q4_1"))
    directory = sources.resolve(str(path))
    model = open_model(directory, ModelConfig("x", dtype="float32", weights="file"))
    assert name_bad_tensor(model) is None
    layer = model.model.layers[1].mlp.up_proj
    layer.weight.data[3, :2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # a scale
    assert name_bad_tensor(model) == "model.layers.1.mlp.up_proj.weight"


def test_a_token_that_is_no_number_is_not_asked_for(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", weights=Weights(poisoned=70))
    directory = sources.resolve(str(path))
    config = ModelConfig("x", dtype="float32", weights="file", runner="torch")
    assert "rows equal" in load_checked(directory, config).checked


# -- the default model ---------------------------------------------------------------------
