"""The layers of a decoder as launches over buffers that are there already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.model.cuda.inputs import Views
from engine.model.cuda.kernels.attention import Masks, Workspace, attend, split_size
from engine.model.cuda.kernels.matmul import linear
from engine.model.cuda.kernels.rows import add_norm, embed, rotate_and_store, silu_gate
from engine.model.cuda.weights import CudaDecoder, Matrix

#: Query vectors of a tile of attention where rows are many and need not be exact.
WIDE_TILE = 64


@dataclass(frozen=True, slots=True)
class Numerics:
    """How much a row may depend on the batch.

    Attributes:
        exact: not at all: products in tiles of one size; else by the vendor's library.
        tile: query vectors of a tile of attention.
    """

    exact: bool
    tile: int = 16

    def multiply(self, x: torch.Tensor, matrix: Matrix, out: torch.Tensor) -> None:
        """out [T, N] = x [T, K] times the matrix."""
        if self.exact:
            linear(x, matrix.weight, matrix.bias, out)
        elif matrix.bias is None:
            torch.mm(x, matrix.weight.t(), out=out)
        else:
            torch.addmm(matrix.bias.to(x.dtype), x, matrix.weight.t(), out=out)


class Buffers:
    """What lies between the operations of a pass.

    Args:
        decoder: decides the widths.
        rows: most rows of a pass.
        picks: most rows of logits.
        exact: logits are float32 if so; else of the decoder's type.
        device: where they lie; None = with the weights.
    """

    def __init__(
        self,
        decoder: CudaDecoder,
        rows: int,
        picks: int,
        *,
        exact: bool,
        device: str | None = None,
    ) -> None:
        self.rows, self.picks = rows, picks
        dtype, wide = decoder.dtype, torch.float32
        heads, groups, size = decoder.heads, decoder.groups, decoder.head_size

        def some(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device or decoder.device)

        self.residual = some(rows, decoder.hidden, dtype=wide)
        self.normed, self.delta = some(rows, decoder.hidden), some(rows, decoder.hidden)
        self.qkv = some(rows, (heads + 2 * groups) * size)
        self.queries, self.attended = some(rows, heads, size), some(rows, heads, size)
        self.gate_up = some(rows, 2 * decoder.intermediate)
        self.gated = some(rows, decoder.intermediate)
        self.picked = some(picks, decoder.hidden)
        self.logits = some(picks, decoder.vocab, dtype=wide if exact else dtype)

    @property
    def num_bytes(self) -> int:
        """Memory of all of them."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))


def make_workspace(decoder: CudaDecoder, rows: int, device: str | None = None) -> Workspace:
    """Room for what is found of single splits of the longest text."""
    splits = -(-decoder.max_model_len // split_size(decoder.max_model_len))
    outer, place = (rows, splits, decoder.heads), device or decoder.device
    peaks, totals = (torch.zeros(outer, device=place) for _ in range(2))
    sums = torch.zeros(*outer, decoder.head_size, device=place)
    return Workspace(peaks, totals, sums, programs=1)


@dataclass(frozen=True, slots=True)
class Forward:
    """A decoder with a cache.

    Attributes:
        decoder: the weights.
        keys, values: [L, slots, G, D] of the cache.
    """

    decoder: CudaDecoder
    keys: torch.Tensor
    values: torch.Tensor

    def run(
        self,
        views: Views,
        buffers: Buffers,
        numerics: Numerics,
        workspace: Workspace | None,
        states: Mapping[int, torch.Tensor],
    ) -> None:
        """One pass; the logits of the picked rows are in `buffers.logits` afterwards.

        Args:
            views: T rows.
            buffers: with room for them.
            numerics: how to multiply.
            workspace: for attention: see `attend`.
            states: by layer, where its hidden states [T, hidden] are to be kept, float32.
        """
        decoder, rows = self.decoder, views.ids.numel()
        residual, normed = buffers.residual[:rows], buffers.normed[:rows]
        embed(views.ids, decoder.embedding, residual)
        delta: torch.Tensor | None = None
        for i, layer in enumerate(decoder.layers):
            add_norm(residual, delta, (layer.input_norm, decoder.epsilon), normed)
            if i in states:
                states[i].copy_(residual)
            self._attend(i, views, buffers, numerics, workspace)
            delta = buffers.delta[:rows]
            numerics.multiply(buffers.attended[:rows].flatten(1), layer.output, delta)
            add_norm(residual, delta, (layer.post_norm, decoder.epsilon), normed)
            gate_up, gated = buffers.gate_up[:rows], buffers.gated[:rows]
            numerics.multiply(normed, layer.gate_up, gate_up)
            silu_gate(gate_up, gated)
            numerics.multiply(gated, layer.down, delta)
        last = len(decoder.layers)
        if last in states:
            assert delta is not None
            torch.add(residual, delta, out=states[last])
        picks = views.picks.numel()
        if picks:
            picked, norm = buffers.picked[:picks], (decoder.final_norm, decoder.epsilon)
            add_norm(residual, delta, norm, picked, views.picks)
            numerics.multiply(picked, decoder.head, buffers.logits[:picks])

    def _attend(
        self,
        i: int,
        views: Views,
        buffers: Buffers,
        numerics: Numerics,
        workspace: Workspace | None,
    ) -> None:
        """Queries, keys and values of layer `i`; what its rows see is in `buffers.attended`."""
        decoder, layer, rows = self.decoder, self.decoder.layers[i], views.ids.numel()
        qkv, queries = buffers.qkv[:rows], buffers.queries[:rows]
        numerics.multiply(buffers.normed[:rows], layer.qkv, qkv)
        norms = None if layer.head_norms is None else (*layer.head_norms, decoder.epsilon)
        cache = self.keys[i], self.values[i]
        places = views.rows.positions, views.slots
        rotate_and_store(qkv, decoder.tables, places, cache, queries, norms)
        split = split_size(decoder.max_model_len)
        masks = Masks(decoder.scale, split, layer.window, numerics.tile)
        attend(queries, cache, views.rows, buffers.attended[:rows], masks, workspace)
