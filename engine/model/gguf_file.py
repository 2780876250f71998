"""GGUF files, read in place: what they say of themselves, and their tensors in a memory map.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md says how they are laid out. The gguf
package's reader makes an array of every token of the vocabulary, which takes seconds; this one
walks over them. Nothing of a tensor is read before it is used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import ModelNotSupported
from engine.model.quantized import QuantizedWeight

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
#: struct's letters for the numbers that metadata may hold, by the format's number of their type.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
#: Most dimensions of a tensor.
_MOST_DIMENSIONS = 4

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it lies in a file.

    Attributes:
        kind: the format's name of its type: F32, Q4_1 ...
        shape: as torch has it, the neighbours in memory last.
        start: of its bytes in the file.
        size: in bytes.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


class GgufFile:
    """One file.

    Attributes:
        metadata: numbers and strings by key; of arrays only how long they are.
        tensors: what lies where, by the file's own names.

    Raises:
        ModelNotSupported: it is no GGUF file, of a kind that is not known, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Private: torch takes only memory that could be written to; nobody does.
        self._bytes = np.memmap(path, mode="c", dtype=np.uint8)
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, ValueError, KeyError, ArithmeticError) as error:
            raise ModelNotSupported(f"{path} is damaged: {error}; fetch it again.") from error

    @property
    def architecture(self) -> str:
        """What family the model is of, in the format's words."""
        return str(self.metadata.get("general.architecture", ""))

    def blocks(self, name: str) -> QuantizedWeight | None:
        """A matrix in blocks, as it lies in the file; None if the tensor is of floats."""
        stored = self.tensors[name]
        if stored.kind in _FLOATS:
            return None
        if len(stored.shape) != 2:
            raise ModelNotSupported(
                f"{self.path} holds {name} in {stored.kind}, with {len(stored.shape)} dimensions; "
                "only matrices are read from blocks."
            )
        outputs, inputs = stored.shape
        data = torch.from_numpy(self._slice(stored)).view(outputs, -1)
        return QuantizedWeight(stored.kind, outputs, inputs, data)

    def values(self, name: str) -> torch.Tensor:
        """A tensor of floats: as it lies in the file, or float32 made of its blocks."""
        stored = self.tensors[name]
        blocks = self.blocks(name)
        if blocks is not None:
            return blocks.dequantize()
        return torch.from_numpy(self._slice(stored)).view(_FLOATS[stored.kind]).view(stored.shape)

    def _slice(self, stored: Stored) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._bytes[stored.start : stored.start + stored.size]

    def _read_header(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        cursor = _Cursor(self._bytes)
        if cursor.take(4) != _MAGIC:
            raise ModelNotSupported(f"{self.path} is not a GGUF file; it does not begin with GGUF.")
        version, num_tensors, num_fields = cursor.numbers("IQQ")
        if version not in _VERSIONS:
            raise ModelNotSupported(
                f"{self.path} is GGUF of version {version}; versions "
                f"{' and '.join(map(str, _VERSIONS))} are read here, with the low byte first."
            )
        metadata = {}
        for _ in range(num_fields):
            key = cursor.string()
            metadata[key] = cursor.value(*cursor.numbers("I"))
        entries = [cursor.entry() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        base = -(-cursor.place // alignment) * alignment
        return metadata, {
            name: self._stored(name, base, shape, kind, offset)
            for name, shape, kind, offset in entries
        }

    def _stored(
        self, name: str, base: int, shape: tuple[int, ...], number: int, offset: int
    ) -> Stored:
        kind = GGMLQuantizationType(number)
        block, size = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise ValueError(f"rows of {name} have {shape[-1]} numbers in blocks of {block}")
        count = int(np.prod(shape, dtype=object)) // block * size
        start = base + offset
        if start + count > len(self._bytes):
            raise ValueError(f"it ends at byte {len(self._bytes)}, within or before {name}")
        return Stored(kind.name, shape, start, count)


class _Cursor:
    """Reads one thing after the other.

    Attributes:
        place: the next byte.
    """

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._data, self.place = data, 0

    def take(self, count: int) -> bytes:
        """The next bytes."""
        found = self._data[self.place : self.place + count].tobytes()
        if len(found) < count:
            raise ValueError(f"its header ends at byte {len(self._data)}")
        self.place += count
        return found

    def numbers(self, letters: str) -> tuple[Any, ...]:
        """The next numbers, by their letters in `struct`."""
        return struct.unpack(f"<{letters}", self.take(struct.calcsize(f"<{letters}")))

    def string(self) -> str:
        """The next string."""
        (length,) = self.numbers("Q")
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        """The next value of metadata; of an array its length."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            (number,) = self.numbers(_NUMBERS[kind])
            return number
        inner, count = self.numbers("IQ")
        if inner in _NUMBERS:
            self.place += count * struct.calcsize(f"<{_NUMBERS[inner]}")
        elif inner == _STRING:
            for _ in range(count):
                (length,) = self.numbers("Q")
                self.place += length
        else:
            raise ValueError(f"an array of its metadata holds values of type {inner}")
        return count

    def entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """The next line of the table of tensors: name, shape, type, offset."""
        name = self.string()
        (dimensions,) = self.numbers("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(reversed(self.numbers(f"{dimensions}Q")))
        kind, offset = self.numbers("IQ")
        return name, shape, kind, offset
