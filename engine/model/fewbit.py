"""Weights in few bits, in the order and the forms in which the kernels multiply them.

All kinds of blocks that are known here are `scale * q`, or `scale * q + minimum`, with q a whole
number of at most eight bits and scales shared by 16 or 32 inputs. `FORMS` says which of them the
kernels have; every kind has one that holds it exactly, with q as it is, scales of float16 as they
are, and products of two such scales in float32, where they are exact, too. Layouts are described
in `kernels/fewbit.h`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.model.packing import BLOCK, pad_rows
from engine.model.quantized import QuantizedWeight

GROUP = 32  #: inputs that are quantised together in rows, `kBlockInputs`


@dataclass(frozen=True)
class Form:
    """How the kernels hold weights: see `Form` in kernels/fewbit.h.

    Attributes:
        number: what the kernels call it.
        bits: of a weight; four without a sign, eight with one.
        minimum: whether weights have one.
        scale: dtype of scales and minimums.
        shared: inputs that share a scale.
        zero: what is taken from a weight of four bits.
    """

    number: int
    bits: int
    minimum: bool
    scale: torch.dtype
    shared: int
    zero: int = 0


_NIBBLES = Form(1, 4, False, torch.float16, 32, 8)
_NIBBLES_FROM = Form(2, 4, True, torch.float16, 32)
_NIBBLES_FROM_FINE = Form(3, 4, True, torch.float32, 32)
_BYTES = Form(4, 8, False, torch.float16, 32)
_BYTES_FROM = Form(5, 8, True, torch.float32, 32)
_BYTES_OF_SIXTEEN = Form(6, 8, False, torch.float32, 16)
ANYTHING = Form(7, 8, True, torch.float32, 16)

#: The form that takes the least room for a kind of blocks.
FORMS = {
    "Q4_0": _NIBBLES,
    "Q4_1": _NIBBLES_FROM,
    "Q4_K": _NIBBLES_FROM_FINE,
    "Q5_0": _BYTES,
    "Q5_1": _BYTES_FROM,
    "Q5_K": _BYTES_FROM,
    "Q6_K": _BYTES_OF_SIXTEEN,
    "Q8_0": _BYTES,
}


@dataclass(frozen=True)
class _Parts:
    """A matrix as whole numbers and scales.

    Attributes:
        q: int8 [outputs, inputs]; in Q4_0 what is stored, from which 8 is to be taken.
        scale: float16 or float32 [outputs, inputs / shared].
        minimum: alike, or none.
    """

    q: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None = None


def pack_blocks(data: torch.Tensor, kind: str) -> torch.Tensor:
    """Blocks of a GGUF file -> what the kernels read, in the form for their kind.

    Args:
        data: uint8 [outputs, bytes of a row].
        kind: of its blocks, one of `FORMS`.

    Returns:
        uint8 [outputs / 32, inputs / 32, bytes]: each with the weights of 32 outputs and 32
        inputs, then their scales and minimums. Missing outputs are zeros.
    """
    return _pack(_KINDS[kind](pad_rows(data)), FORMS[kind])


def pack_mixed(
    weights: Sequence[QuantizedWeight], order: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[Form, torch.Tensor]:
    """Weights of several kinds as one matrix, in the form that holds them all.

    Args:
        weights: of equally many inputs, all of kinds in `FORMS`.
        order: makes one tensor of what belongs to their outputs: [[N1, ...], [N2, ...], ...] ->
            [N, ...].

    Returns:
        The form, and the matrix as `pack_blocks` gives it.
    """
    every = [_anything(_KINDS[weight.kind](weight.data), FORMS[weight.kind]) for weight in weights]
    q, scale, minimum = (pad_rows(order(list(parts))) for parts in zip(*every, strict=True))
    return ANYTHING, _pack(_Parts(q, scale, minimum), ANYTHING)


def _anything(parts: _Parts, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same numbers as `ANYTHING` has them: q, scales and minimums."""
    minimum = torch.zeros_like(parts.scale) if parts.minimum is None else parts.minimum
    scales = [
        t.float().repeat_interleave(form.shared // ANYTHING.shared, 1)
        for t in (parts.scale, minimum)
    ]
    return parts.q - form.zero, scales[0], scales[1]


def _pack(parts: _Parts, form: Form) -> torch.Tensor:
    inputs = parts.q.shape[1]
    # Of each eight inputs two words: 0 4 1 5 and 2 6 3 7.
    words = parts.q.view(torch.uint8).view(-1, BLOCK, inputs // GROUP, 4, 2, 2, 2)
    # [block, output, group, eight, half, word, pair] -> [..., eight, word, output, pair, half]
    words = words.permute(0, 2, 3, 5, 1, 6, 4).reshape(-1, inputs // GROUP, 4, 2, BLOCK, 4)
    if form.bits == 4:
        words = words[:, :, :, 0] | words[:, :, :, 1] << 4
    pieces = [words.flatten(2), _scales(parts.scale, inputs, form)]
    if parts.minimum is not None:
        pieces.append(_scales(parts.minimum, inputs, form))
    return torch.cat(pieces, dim=2)


def _scales(scale: torch.Tensor, inputs: int, form: Form) -> torch.Tensor:
    """[outputs, n] -> bytes [outputs / 32, inputs / 32, ...], one for each `shared` inputs."""
    blocks = scale.view(-1, BLOCK, inputs // GROUP, GROUP // form.shared).permute(0, 2, 3, 1)
    return blocks.to(form.scale).contiguous().view(torch.uint8).flatten(2)


# -- kinds of blocks: where their bits lie ---------------------------------------------------


def _blocks(data: torch.Tensor, size: int) -> torch.Tensor:
    """[outputs, bytes of a row] -> [outputs, blocks, bytes of a block]."""
    return data.view(len(data), -1, size)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a place in each block; [outputs, blocks, bytes] -> [outputs, blocks]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(bytes_: torch.Tensor, together: int) -> torch.Tensor:
    """Low halves of so many bytes, then high halves; int8 [outputs, blocks, inputs]."""
    runs = bytes_.reshape(*bytes_.shape[:2], -1, 1, together)
    return torch.cat([runs & 15, runs >> 4], dim=3).flatten(2).view(torch.int8)


def _bits(bytes_: torch.Tensor) -> torch.Tensor:
    """Bit after bit of each byte, the lowest first: [..., n] -> [..., 8 n]."""
    return (bytes_.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2)


def _simple(size: int, minimum: bool, fifth: bool) -> Callable[[torch.Tensor], _Parts]:
    """Q4_0, Q4_1, Q5_0 and Q5_1: scale, minimum, fifth bits, and halves of bytes."""

    def parts(data: torch.Tensor) -> _Parts:
        blocks = _blocks(data, size)
        at = 4 if minimum else 2
        q = _nibbles(blocks[:, :, size - 16 :], 16)
        if fifth:
            q = q | (_bits(blocks[:, :, at : at + 4]) << 4).view(torch.int8)
            q = q if minimum else q - 16
        return _Parts(q.flatten(1), _halves(blocks, 0), _halves(blocks, 2) if minimum else None)

    return parts


def _q8_0(data: torch.Tensor) -> _Parts:
    blocks = _blocks(data, 34)
    return _Parts(blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1), _halves(blocks, 0))


def _fine_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of Q4_K and Q5_K: eight of six bits each, in twelve bytes.

    The first four of each stand in the low six bits of the first eight bytes; the others have
    their low four bits in the last four bytes, and the two above in what the first left free.
    """
    low, middle, high = blocks[:, :, 4:16].reshape(*blocks.shape[:2], 3, 4).unbind(2)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=2)
    minimums = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=2)
    scale = _halves(blocks, 0).float().unsqueeze(2) * scales
    minimum = _halves(blocks, 2).float().unsqueeze(2) * minimums
    return scale.flatten(1), minimum.neg().flatten(1)


def _q4_k(data: torch.Tensor) -> _Parts:
    blocks = _blocks(data, 144)
    return _Parts(_nibbles(blocks[:, :, 16:], 32).flatten(1), *_fine_scales(blocks))


def _q5_k(data: torch.Tensor) -> _Parts:
    blocks = _blocks(data, 176)
    # Bit i of byte j belongs to input 32 i + j.
    fifth = blocks[:, :, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    q = _nibbles(blocks[:, :, 48:], 32) | (fifth << 4).flatten(2).view(torch.int8)
    return _Parts(q.flatten(1), *_fine_scales(blocks))


def _q6_k(data: torch.Tensor) -> _Parts:
    blocks = _blocks(data, 210)
    low = _nibbles(blocks[:, :, :128], 64)
    # Two bits each: the lowest of 32 bytes belong to 32 inputs, the next to the 32 after them.
    pairs = blocks[:, :, 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = pairs >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    q = (low | (high << 4).flatten(2).view(torch.int8)) - 32
    fine = blocks[:, :, 192:208].contiguous().view(torch.int8)
    return _Parts(q.flatten(1), (_halves(blocks, 208).float().unsqueeze(2) * fine).flatten(1))


_KINDS: dict[str, Callable[[torch.Tensor], _Parts]] = {
    "Q4_0": _simple(18, minimum=False, fifth=False),
    "Q4_1": _simple(20, minimum=True, fifth=False),
    "Q4_K": _q4_k,
    "Q5_0": _simple(22, minimum=False, fifth=True),
    "Q5_1": _simple(24, minimum=True, fifth=True),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
