"""The tokenizer that comes with a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from engine.errors import ConfigurationError, ModelNotSupported


@runtime_checkable
class Tokenizer(Protocol):
    """What the server needs of a transformers tokenizer."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> str: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def __len__(self) -> int: ...


def load_tokenizer(model_path: str, chat_template: str | None = None) -> Tokenizer:
    """Loads the tokenizer that lies beside a model's weights; never runs code from there.

    Args:
        model_path: a local directory, or a ``.gguf`` file.
        chat_template: a file whose template stands in for the tokenizer's own.

    Raises:
        ModelNotSupported: there is none that can be read.
        ConfigurationError: the template cannot be read.
    """
    from transformers import AutoTokenizer

    template = None if chat_template is None else read_template(chat_template)

    path = Path(model_path)
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(path)}
    if path.suffix == ".gguf":
        source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            **source, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # whatever libraries make of a damaged file
        words = " ".join(str(error).split())[:300]
        raise ModelNotSupported(
            f"the tokenizer of {path} cannot be read: {type(error).__name__}: {words}"
        ) from error
    if template is not None:
        tokenizer.chat_template = template
    return cast(Tokenizer, tokenizer)


def read_template(path: str) -> str:
    """The text of a file with a chat template.

    Raises:
        ConfigurationError: it cannot be read, or there is nothing in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"chat_template {path} cannot be read: {words}.") from None
    if not text.strip():
        raise ConfigurationError(f"chat_template {path} is empty.")
    return text


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE vocabularies use for the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted
