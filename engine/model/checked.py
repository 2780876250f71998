"""Loads a model that has been compared with transformers' own forward: now, or at an earlier start.

::

    CACHE/checked/<hash of the model's files, settings and the code>    what was found, as JSON

Only what was found right is kept; a model that was refused is compared anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedModel

from engine.cache import huge_pages
from engine.config import ModelConfig
from engine.model import check
from engine.model.inventory import describe_weights, in_blocks
from engine.model.loader import LoadedModel, adopt_model, open_model
from engine.model.native import NativeUnavailable, load_kernels
from engine.model.paths import cache_directory
from engine.model.probe import longest_sequence, probe
from engine.model.version import passes_version

logger = logging.getLogger(__name__)

#: Small files that decide what is computed; their content counts, the weights' size and time do.
_DECISIVE = ("config.json", "model.safetensors.index.json")


_WEIGHTS = (".safetensors", ".gguf")


def load_checked(directory: Path, config: ModelConfig) -> LoadedModel:
    """Loads a causal language model from a local directory; no pickles, no remote code.

    Raises:
        ModelNotSupported: the model cannot be run here, or would be served wrong, and why.
        ConfigurationError: dtype, device or attention cannot be had.
    """
    model = open_model(directory, config)
    place = cache_directory() / "checked" / _key(directory, config, model)
    known = _read(place)
    if known is not None:
        loaded = replace(adopt_model(model, config), checked=known)
    else:
        loaded = _compare(model, config)
        _write(place, loaded.checked)
    logger.info("%s: %s", directory.name, loaded.checked)
    del model
    huge_pages.trim()
    return loaded


def _compare(model: PreTrainedModel, config: ModelConfig) -> LoadedModel:
    """Runs the plain model before its weights are rearranged for ours."""
    windows = [layer.window for layer in probe(model)]
    longest = longest_sequence(model, config.max_model_len)
    borders = [*windows, *_lengths_of(model)]
    expected = check.expect(model, borders, longest)
    rounded = config.activations if in_blocks(model) else None
    loaded = adopt_model(model, config)
    pool = check.make_pool(expected)
    runner = loaded.make_runner(pool.num_pages, pool.page_size)
    return replace(loaded, checked=check.compare(expected, runner, pool, rounded=rounded))


def _lengths_of(model: PreTrainedModel) -> list[int]:
    """Numbers of tokens in a configuration beyond which something might change. Those that
    nobody reads only make a text longer."""
    text = model.config.get_text_config().to_dict()
    rope = text.get("rope_parameters") or {}
    parts = [text, rope, *(part for part in rope.values() if isinstance(part, dict))]
    return [
        value
        for part in parts
        for name, value in part.items()
        if ("window" in name or "chunk" in name or name.startswith("original_max"))
        and "layers" not in name
        and "pattern" not in name
        and type(value) is int
        and value > 1
    ]


def _key(directory: Path, config: ModelConfig, model: PreTrainedModel) -> str:
    """Changes with whatever may change the logits."""
    try:
        load_kernels()
        kernels = True
    except NativeUnavailable:
        kernels = False
    how = (config.numerics, config.activations, config.kv_dtype)
    settings = (config.runner, how, config.max_model_len, kernels)
    kinds = describe_weights(model).kinds
    parts = [passes_version(), f"{model.dtype} {model.device} {kinds} {settings}"]
    for path in sorted(directory.iterdir()):
        if path.name in _DECISIVE:
            parts.append(hashlib.sha256(path.read_bytes()).hexdigest())
        elif path.suffix in _WEIGHTS:
            status = path.stat()
            parts.append(f"{path.name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _read(place: Path) -> str | None:
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return (
        found["found"] if isinstance(found, dict) and isinstance(found.get("found"), str) else None
    )


def _write(place: Path, found: str) -> None:
    """Keeps it for the next start, which else takes a second longer."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(".part")
        part.write_text(json.dumps({"found": found}), encoding="utf-8")
        part.replace(place)
    except OSError as error:
        logger.info("what was found cannot be kept: %s", error)
