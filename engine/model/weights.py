"""Reads a model's weights from a directory, of safetensors or GGUF: all of them, and no others.

A tensor that is missing would be made up at random, and one that nobody wants was trained to do
something that the model then does not do. Both are refused by name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.errors import ModelNotSupported
from engine.model import fill
from engine.model.checkpoints import GgufTensors, SafeTensors
from engine.model.files import WEIGHTS_FILE
from engine.model.gguf_file import GgufFile
from engine.model.quantized import QuantizedEmbedding, QuantizedLinear

logger = logging.getLogger(__name__)

#: Tensors of a checkpoint that a text model may leave out: tables that are computed anew, and
#: parts that read pictures or sounds, or guess several tokens ahead.
_SPARE = re.compile(
    r"rotary_emb|inv_freq|masked_bias|attn(ention)?\.bias$|position_ids$"
    r"|(^|\.)(visual|vision\w*|audio\w*|multi_modal_projector|mm_projector|mtp\w*)\."
)

#: Families whose weights are called in safetensors what their modules are.
PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MOST_WORDS = 240  # characters of what a library says that are worth repeating


def read_model(directory: Path, dtype: torch.dtype, keep: str = "float") -> PreTrainedModel:
    """The causal language model of a directory, on the CPU; no remote code.

    Args:
        directory: holds config.json, and safetensors or a GGUF file.
        dtype: of the weights that are in no blocks.
        keep: what weights are kept in: "float", "file", "int8" or "int4"; see `fill`.

    Raises:
        ModelNotSupported: there is none, or it cannot be read completely; names what is amiss.
    """
    if holds_gguf(directory):
        model = _explained(directory, fill.make_empty, dtype)
        tensors = GgufTensors(GgufFile(directory / WEIGHTS_FILE), model)
        _check(directory, fill.compare(model, tensors))
        fill.fill(model, tensors, dtype, keep)
        tensors.finish(model)
        return model
    rounded = keep in fill.ROUNDED
    if not rounded and not _is_plain(directory):
        return _read_by_transformers(directory, dtype)
    model = _explained(directory, fill.make_empty, dtype)
    if type(model).__name__ not in PLAIN:
        if not rounded:
            return _read_by_transformers(directory, dtype)
        raise ModelNotSupported(
            f"weights is {keep}, but {type(model).__name__} is none of {', '.join(PLAIN)}; "
            "use auto."
        )
    stored = _explained(directory, SafeTensors)
    misfits = fill.compare(model, stored)
    if not rounded and any(misfits.values()):
        return _read_by_transformers(directory, dtype)  # it knows more names
    _check(directory, misfits)
    fill.fill(model, stored, dtype, keep)
    return model


def _is_plain(directory: Path) -> bool:
    """Whether a configuration names one of the families in `PLAIN`, and nothing that changes how
    its weights are to be read."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        named = config.get("architectures") or [None]
        return named[0] in PLAIN and "quantization_config" not in config
    except (OSError, ValueError, AttributeError):
        return False


def _explained(directory: Path, function: Callable[..., Any], *more: Any) -> Any:
    """What a function makes of a directory; in a sentence, if that is nothing."""
    try:
        return function(directory, *more)
    except ModelNotSupported:
        raise
    except Exception as error:  # whatever a library makes of files that others wrote
        logger.debug("%s cannot be loaded", directory, exc_info=True)
        raise ModelNotSupported(f"{directory} cannot be loaded: {in_a_line(error)}") from error


def holds_gguf(directory: Path) -> bool:
    """Whether a model's weights are in a GGUF file."""
    return (directory / WEIGHTS_FILE).is_file() and not any(directory.glob("*.safetensors"))


def _read_by_transformers(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Any family, put together as transformers knows how."""
    report = _Report()
    try:
        with report:
            model, found = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # it would not say which; `_check` does
            )
    except Exception as error:  # whatever a library makes of files that others wrote
        logger.debug("%s cannot be loaded", directory, exc_info=True)
        why = in_a_line(error)
        if broken := report.unconverted():
            why = f"what belongs into {broken} is incomplete, or does not fit together"
        raise ModelNotSupported(f"{directory} cannot be loaded: {why}") from error
    _check(directory, found)
    return model


class _Report(logging.Filter):
    """Catches the tables that transformers logs of what `_check` says in a sentence."""

    _logger = logging.getLogger("transformers.modeling_utils")

    def __enter__(self) -> _Report:
        self._said: list[str] = []
        self._logger.addFilter(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Keeps the text of warnings to itself."""
        if record.levelno == logging.WARNING:
            self._said.append(record.getMessage())
        return record.levelno != logging.WARNING

    def unconverted(self) -> str | None:
        """A tensor that could not be put together from those of the checkpoint, if that was it:
        the exception does not name it."""
        lines = _COLOURS.sub("", "\n".join(self._said)).splitlines()
        names = [
            line.split("|")[0].strip() for line in lines if re.search(r"\|\s*CONVERSION", line)
        ]
        return names[0] if names else None


def in_a_line(error: BaseException) -> str:
    """What an exception says, without line breaks and endless lists; its type, if that says more
    than its words do."""
    words = " ".join(str(error).split())
    if len(words) > _MOST_WORDS:
        whole, dot, _ = words[:_MOST_WORDS].rpartition(". ")
        words = whole + dot.strip() if dot else words[:_MOST_WORDS] + " ..."
    plain = isinstance(error, (OSError, ValueError, ImportError)) and words
    return words if plain else f"{type(error).__name__}: {words}".rstrip(": ")


def name_bad_tensor(model: PreTrainedModel) -> str | None:
    """The first of a model's weights that holds values that are not finite numbers, or None."""
    tensors: dict[str, torch.Tensor] = model.state_dict()
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding) and not bool(
            torch.isfinite(module.weight.dequantize()).all()
        ):
            return f"{name}.weight"
    return None


def _check(directory: Path, found: dict[str, Any]) -> None:
    """Refuses what transformers would only have warned of."""
    for name, stored, wanted in sorted(found["mismatched_keys"]):
        raise ModelNotSupported(
            f"{directory} holds {name} with shape {tuple(stored)}, but its configuration asks for "
            f"{tuple(wanted)}; the two do not belong together."
        )
    if missing := found["missing_keys"]:
        raise ModelNotSupported(
            f"{directory} lacks {_name(missing)}, which would be random numbers; fetch or convert "
            "the model again."
        )
    if spare := {name for name in found["unexpected_keys"] if not _SPARE.search(name)}:
        raise ModelNotSupported(
            f"{directory} holds {_name(spare)}, which the model of its configuration does not "
            "use, so it would not be the model that was trained."
        )


def _name(names: Collection[str]) -> str:
    first = min(names)
    return first if len(names) == 1 else f"{len(names)} tensors, first {first}"
