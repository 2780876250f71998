"""The tokenizer that comes with a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from engine.errors import ModelNotSupported


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


def load_tokenizer(model_path: str) -> Tokenizer:
    """Loads the tokenizer that lies beside a model's weights; never runs code from there.

    Args:
        model_path: a local directory, or a ``.gguf`` file.

    Raises:
        ModelNotSupported: there is none that can be read.
    """
    from transformers import AutoTokenizer

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
    return cast(Tokenizer, tokenizer)


def byte_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE vocabularies use for the 256 bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    shifted = {chr(256 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted
