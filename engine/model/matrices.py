"""Weight matrices as the native decoder's kernel takes them, dense or in few bits.

Layers whose outputs are computed together may hold their weights in different kinds of blocks, as
GGUF files do: a matrix then has several pieces, or, where outputs of both stand in one block of
the kernel, a form that holds everything.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from engine.model.fewbit import FORMS, Form, pack_blocks, pack_mixed
from engine.model.native import fields
from engine.model.packing import BLOCK, num_blocks, pack
from engine.model.quantized import QuantizedEmbedding, QuantizedLinear

Order = Callable[[list[torch.Tensor]], torch.Tensor]
"""Makes one tensor of what belongs to the outputs of some layers, [[N1, ...], ...] -> [N, ...]."""

_DENSE = 0  # `kDense` in kernels/fewbit.h


class _Piece(ctypes.Structure):
    """Mirrors `Piece` in kernels/layouts.h."""

    _fields_ = [("packed", ctypes.c_void_p), *fields(ctypes.c_int32, "form end")]


class Matrix(ctypes.Structure):
    """Mirrors `Matrix` in kernels/layouts.h."""

    _fields_ = [("pieces", _Piece * 3)]


class Matrices:
    """Packs layers.

    Args:
        keep: takes a tensor, for as long as the kernel runs, and gives its address.
        dtype: of what is dense.
    """

    def __init__(self, keep: Callable[[torch.Tensor], int], dtype: torch.dtype) -> None:
        self._keep, self._dtype = keep, dtype

    def single(self, layer: nn.Module) -> Matrix:
        """One layer's weight; see `is_fewbit`."""
        return self.joined([layer], lambda tensors: tensors[0])

    def joined(self, layers: Sequence[nn.Module], order: Order) -> Matrix:
        """Several layers whose outputs are mingled."""
        outputs = sum(_outputs(layer) for layer in layers)
        if not all(is_fewbit(layer) for layer in layers):
            return self._whole(pack(order([self._dense(layer) for layer in layers])), outputs)
        weights = [layer.weight for layer in layers if isinstance(layer, QuantizedLinear)]
        if len({weight.kind for weight in weights}) > 1:
            form, packed = pack_mixed(weights, order)
            return self._whole(packed, outputs, form)
        kind = weights[0].kind
        packed = pack_blocks(order([weight.data for weight in weights]), kind)
        return self._whole(packed, outputs, FORMS[kind])

    def in_turn(self, layers: Sequence[nn.Module], orders: Sequence[Order]) -> Matrix:
        """Several layers, at most three, one after the other.

        Args:
            layers: the layers.
            orders: what to do with the outputs of each, which is given alone.
        """

        def together(chosen: Sequence[Order]) -> Order:
            return lambda tensors: torch.cat(
                [order([tensor]) for order, tensor in zip(chosen, tensors, strict=True)]
            )

        aligned = all(_outputs(layer) % BLOCK == 0 for layer in layers)
        if not aligned or not all(is_fewbit(layer) for layer in layers):
            return self.joined(layers, together(orders))
        matrix, end = Matrix(), 0
        pairs = zip(layers, orders, strict=True)
        runs = itertools.groupby(pairs, key=lambda pair: pair[0].weight.kind)  # type: ignore[union-attr]
        for i, (_kind, run) in enumerate(runs):
            mine, chosen = zip(*run, strict=True)
            piece = self.joined(mine, together(chosen)).pieces[0]
            end += piece.end
            matrix.pieces[i] = _Piece(packed=piece.packed, form=piece.form, end=end)
        return matrix

    def table(self, embedding: nn.Module) -> Matrix:
        """The rows of an embedding."""
        if isinstance(embedding, QuantizedEmbedding):
            rows = QuantizedLinear(embedding.weight)
            if is_fewbit(rows):
                return self.single(rows)
            return self._whole(embedding.weight.dequantize().to(self._dtype), 0)
        return self._whole(embedding.weight.detach(), 0)  # type: ignore[operator]

    def _whole(self, packed: torch.Tensor, outputs: int, form: Form | None = None) -> Matrix:
        matrix = Matrix()
        number = _DENSE if form is None else form.number
        matrix.pieces[0] = _Piece(packed=self._keep(packed), form=number, end=num_blocks(outputs))
        return matrix

    def _dense(self, layer: nn.Module) -> torch.Tensor:
        if isinstance(layer, QuantizedLinear):
            return layer.weight.dequantize().to(self._dtype)
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return weight.detach()


def _outputs(layer: nn.Module) -> int:
    return int(layer.out_features)  # type: ignore[arg-type]


def is_fewbit(layer: nn.Module) -> bool:
    """Whether a layer's weight is in blocks that the kernels can multiply."""
    return isinstance(layer, QuantizedLinear) and layer.weight.kind in FORMS
