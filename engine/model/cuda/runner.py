"""Feeds packed batches to a decoder on a GPU.

There are two ways through it. A pass that decodes or verifies (few rows, most of which need
logits) is padded to one of a few dozen sizes, and its launches are a CUDA graph. All others read
prompts: they are launched one by one. Both give the same bits under exact numerics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from engine.batch import Batch
from engine.cache.store import KVStore
from engine.model.cuda.forward import (
    WIDE_TILE,
    Buffers,
    Forward,
    Numerics,
    make_workspace,
)
from engine.model.cuda.graphs import Graphs, padded_rows
from engine.model.cuda.inputs import Inputs
from engine.model.cuda.kernels.attention import TILE, rows_per_tile
from engine.model.cuda.weights import CudaDecoder
from engine.model.passes import Pass, check_layers, start_timer

#: Most rows of a pass that is run as a graph.
GRAPH_ROWS = 256
#: Programs of attention that a multiprocessor can work on at the same time, about.
_PROGRAMS = 4
#: What the driver takes for a graph, and how many there are at most, with some that keep features.
_GRAPH_BYTES, _MOST_GRAPHS = 8 * 2**20, 64


class CudaRunner:
    """Runs a `CudaDecoder` over packed batches; the counterpart of `NativeRunner`.

    Args:
        decoder: the weights.
        numerics: "exact": a row does not depend on the batch; "fast": vendors' products.
        num_pages: pages of the pool; the store is allocated here.
        page_size: tokens per page.
    """

    #: One row is computed like any other.
    min_rows = 1
    #: Batches are made on the host, and copied in one piece.
    device = torch.device("cpu")

    def __init__(self, decoder: CudaDecoder, numerics: str, num_pages: int, page_size: int) -> None:
        self.store = KVStore(decoder.shape, num_pages, page_size, decoder.device)
        self._decoder, self._exact = decoder, numerics == "exact"
        self._forward = Forward(decoder, self.store.keys, self.store.values)
        self._graphs = Graphs(decoder.device)
        self._buffers = Buffers(decoder, GRAPH_ROWS, GRAPH_ROWS, exact=self._exact)
        self._inputs = self._make_inputs(GRAPH_ROWS, _most_pages(decoder, page_size))
        self._workspace = make_workspace(decoder, GRAPH_ROWS)
        self._large: tuple[Buffers, Inputs] | None = None
        self._states: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Pass:
        """See `Runner.forward`; the logits are float32 under exact numerics, else of the
        decoder's type."""
        check_layers(features, self.store.shape.num_layers)
        rows, picks = batch.input_ids.numel(), batch.num_logits
        if rows <= GRAPH_ROWS and rows <= 2 * picks:
            return self._decode(batch, features)
        return self._read(batch, features)

    def _decode(self, batch: Batch, features: tuple[int, ...]) -> Pass:
        """A pass as a graph. As many rows are picked as there are."""
        own = batch.input_ids.numel()
        rows = padded_rows(own, GRAPH_ROWS)
        buffers, device = self._buffers, self._decoder.device
        if features not in self._states:
            self._states[features] = buffers.residual.new_zeros(
                len(features), GRAPH_ROWS, self._decoder.hidden
            )
        kept = dict(zip(features, self._states[features], strict=True))
        views = self._inputs.load(batch, rows, rows, self.store.page_size)
        numerics = Numerics(self._exact)
        workspace = replace(self._workspace, programs=self._programs(rows))

        def work() -> None:
            states = {layer: state[:rows] for layer, state in kept.items()}
            self._forward.run(views, buffers, numerics, workspace, states)

        ready = self._graphs.ready((rows, features), work)
        end = start_timer(device)
        ready()
        return Pass(buffers.logits[: batch.num_logits], end(), _without_padding(kept, batch))

    def _read(self, batch: Batch, features: tuple[int, ...]) -> Pass:
        """A pass that reads prompts."""
        rows, picks = batch.input_ids.numel(), batch.num_logits
        buffers, inputs = self._make_room(rows, picks, batch.page_tables.numel())
        end = start_timer(self._decoder.device)
        views = inputs.load(batch, rows, picks, self.store.page_size)
        kept = {layer: buffers.residual.new_empty(rows, self._decoder.hidden) for layer in features}
        numerics = Numerics(self._exact, self._tile)
        self._forward.run(views, buffers, numerics, None, kept)
        return Pass(buffers.logits[:picks], end(), _without_padding(kept, batch))

    @property
    def _tile(self) -> int:
        """Query vectors of a tile of attention where rows are many."""
        return TILE if self._exact else WIDE_TILE

    def _programs(self, rows: int) -> int:
        """Splits of a tile that are looked at at the same time: enough to fill the device."""
        if self._decoder.device.type != "cuda":
            return 1
        found = torch.cuda.get_device_properties(self._decoder.device)
        wanted = _PROGRAMS * int(found.multi_processor_count)
        splits = int(self._workspace.peaks.shape[1])
        return max(1, min(splits, wanted // (rows * self._decoder.groups)))

    def _make_inputs(self, rows: int, pages: int, tile: int = TILE) -> Inputs:
        decoder, store = self._decoder, self.store
        per_tile = rows_per_tile(decoder.heads, decoder.groups, tile)
        scratch = store.num_pages * store.page_size
        return Inputs(rows, pages, decoder.device, per_tile, scratch)

    def _make_room(self, rows: int, picks: int, pages: int) -> tuple[Buffers, Inputs]:
        """Buffers of passes that read prompts; they grow, and are just reused in the end."""
        if self._large is not None:
            buffers, inputs = self._large
            if rows <= buffers.rows and picks <= buffers.picks and pages <= inputs.pages:
                return self._large
            rows, picks = max(rows, buffers.rows), max(picks, buffers.picks)
            pages = max(pages, inputs.pages)
        self._large = None  # the old ones go first
        buffers = Buffers(self._decoder, rows, picks, exact=self._exact)
        self._large = buffers, self._make_inputs(rows, pages, self._tile)
        return self._large


def runner_bytes(decoder: CudaDecoder, numerics: str, page_size: int, max_rows: int) -> int:
    """Memory that a runner takes beside weights and pages.

    Args:
        decoder: its weights.
        numerics: see `CudaRunner`.
        page_size: tokens per page.
        max_rows: most rows of a pass that reads prompts.
    """
    buffers = [
        Buffers(decoder, rows, rows, exact=numerics == "exact", device="meta").num_bytes
        for rows in (GRAPH_ROWS, max_rows)
    ]
    found = make_workspace(decoder, GRAPH_ROWS, "meta")
    workspace = found.peaks.nbytes + found.totals.nbytes + found.sums.nbytes
    integers = 2 * 4 * _most_pages(decoder, page_size)
    return sum(buffers) + workspace + integers + _MOST_GRAPHS * _GRAPH_BYTES


def _most_pages(decoder: CudaDecoder, page_size: int) -> int:
    """Entries of the page tables of a graph's pass, all of its sequences as long as can be."""
    return GRAPH_ROWS * -(-decoder.max_model_len // page_size)


def _without_padding(states: Mapping[int, torch.Tensor], batch: Batch) -> dict[int, torch.Tensor]:
    own = batch.input_ids.numel() - batch.num_padding_rows
    return {layer: state[:own] for layer, state in states.items()}
