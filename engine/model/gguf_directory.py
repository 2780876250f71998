"""What a GGUF file says besides its weights, as the files of a model's directory."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import ModelNotSupported
from engine.model.files import WEIGHTS_FILE

if TYPE_CHECKING:
    from engine.model.gguf_file import GgufFile

#: `tokenizer.ggml.pre` of vocabularies that cut digits apart before GPT-2's pattern.
_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
#: ... and of those that use GPT-2's pattern alone, which is what the reader falls back to.
_GPT2 = frozenset({"gpt-2", "default", "phi-2", "olmo"})


def convert_gguf(source: Path, target: Path) -> None:
    """Makes a model's directory of a GGUF file, which is linked to if its weights can be read.

    Args:
        source: the file, by its whole path.
        target: an existing, empty directory.

    Raises:
        ModelNotSupported: architecture, quantisation or tokenizer is not known.
    """
    from safetensors import SafetensorError

    from engine.model.checkpoints import GGUF_ARCHITECTURES
    from engine.model.gguf_file import GgufFile

    file = GgufFile(source)
    linked = file.architecture in GGUF_ARCHITECTURES
    if linked:
        _check_rope(file)
    head_size = file.metadata.get(f"{file.architecture}.attention.key_length")
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the readers' progress bars
            tokenizer, config, model = _read(source, weights=not linked)
            _repair_splitting(tokenizer, file.metadata.get("tokenizer.ggml.pre"), source)
    except (ValueError, KeyError, NotImplementedError, ImportError, OSError) as error:
        raise ModelNotSupported(f"{source.name} cannot be converted: {error}") from error
    tokenizer.model_max_length = config.get_text_config().max_position_embeddings
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tokenizer.save_pretrained(target)
            if linked:
                if head_size is not None:  # not read for each family
                    config.head_dim = head_size
                _save_rest(config, target)
                (target / WEIGHTS_FILE).symlink_to(source)
            else:
                model.save_pretrained(target)
    except Exception as error:
        # How a full disk is reported by libraries that are written in Rust.
        if isinstance(error, SafetensorError) or "(os error " in str(error):
            raise OSError(str(error)) from error
        raise


def _read(source: Path, *, weights: bool) -> tuple[Any, Any, Any]:
    """Tokenizer, configuration, and the model if its weights are wanted, else None.

    Quantised weights become float32, in which their values are exact.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(source.parent),
        "gguf_file": source.name,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    tokenizer = AutoTokenizer.from_pretrained(**where)
    if not weights:
        return tokenizer, AutoConfig.from_pretrained(**where), None
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # What is saved is a plain float32 model: nothing about it is quantised any more.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    return tokenizer, model.config, model


def _save_rest(config: Any, target: Path) -> None:
    """What a model would save beside its weights: its class, and the tokens that end a text."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(target)
    GenerationConfig.from_model_config(config).save_pretrained(target)


def _check_rope(file: GgufFile) -> None:
    """Refuses rotary embeddings that transformers' reader would take for plain ones."""
    prefix = f"{file.architecture}.rope.scaling"
    kind, factor = (file.metadata.get(f"{prefix}.{key}") for key in ("type", "factor"))
    if kind not in (None, "none") and factor not in (None, 1.0):
        raise ModelNotSupported(
            f"{file.path.name} stretches its positions ({kind}, by {factor:g}), which is not read "
            "from GGUF files; use the same model in safetensors."
        )


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
