"""Feeds packed batches to a native decoder: K/V store, buffers, and what a step points to."""

from __future__ import annotations

import ctypes

import torch

from engine.batch import Batch
from engine.cache.store import KVStore
from engine.model.attention.cpu import branches_of, move_tokens
from engine.model.fewbit_linear import group_bytes
from engine.model.native_decoder import NativeDecoder, Step
from engine.model.packing import BLOCK, num_blocks
from engine.model.passes import Pass, check_layers, start_timer


class NativeRunner:
    """Runs a `NativeDecoder` over packed batches; the counterpart of `ModelRunner`.

    Args:
        decoder: the weights.
        num_pages: pages of the pool; the store is allocated here.
        page_size: tokens per page.
    """

    #: One row is computed like any other.
    min_rows = 1
    branches = True

    def __init__(self, decoder: NativeDecoder, num_pages: int, page_size: int) -> None:
        self.device = torch.device("cpu")
        self.store = KVStore(decoder.shape, num_pages, page_size, self.device)
        self._decoder = decoder
        self._rows = self._num_logits = 0
        self._run = decoder.bind(self.store)

    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Pass:
        """See `Runner.forward`; the logits are float32."""
        end = start_timer(self.device)
        check_layers(features, self.store.shape.num_layers)
        rows = batch.input_ids.numel()
        self._make_room(rows, batch.num_logits)
        states = torch.empty(len(features), rows, self._decoder.hidden)
        layers = (ctypes.c_int32 * len(features))(*features)
        step = Step(
            features=states.data_ptr(),
            feature_layers=ctypes.addressof(layers),
            rows=rows,
            num_logits=batch.num_logits,
            sequences=batch.context_lengths.numel(),
            table_width=batch.page_tables.shape[1],
            page_size=batch.page_size,
            num_features=len(features),
            **branches_of(batch),
        )
        tokens = ("input_ids", "positions", "slots", "logit_rows")
        for name in (*tokens, "query_starts", "context_lengths", "page_tables"):
            setattr(step, name, getattr(batch, name).data_ptr())
        for name in ("residual", "squares", "normed", "queries", "qkv", "gated", "logits"):
            setattr(step, name, getattr(self, f"_{name}").data_ptr())
        step.normed_groups, step.gated_groups = (g.data_ptr() for g in self._groups)
        self._run(step)
        own = rows - batch.num_padding_rows
        kept = {layer: state[:own] for layer, state in zip(features, states, strict=True)}
        return Pass(self._logits[: batch.num_logits], end(), kept)

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `TreeRunner.move`."""
        move_tokens(self.store, sources, targets)

    def _make_room(self, rows: int, num_logits: int) -> None:
        """Grows the buffers; in the steady state they are just reused."""
        decoder = self._decoder
        # What waits to become whole numbers waits in float32.
        dtype = torch.float32 if decoder.fewbit else decoder.dtype
        if rows > self._rows:
            self._rows = rows
            attended = decoder.heads * decoder.head_size
            joined = attended + 2 * decoder.groups * decoder.head_size
            hidden, widest = num_blocks(decoder.hidden), num_blocks(max(decoder.hidden, attended))
            self._residual = torch.empty(hidden, rows, BLOCK)
            self._squares = torch.empty(hidden, rows)
            self._normed = torch.empty(widest, rows, BLOCK, dtype=dtype)
            self._queries = torch.empty(rows, attended, dtype=decoder.dtype)
            self._qkv = torch.empty(rows, num_blocks(joined) * BLOCK)
            gated = num_blocks(decoder.intermediate)
            self._gated = torch.empty(gated, rows, BLOCK, dtype=dtype)
            size = group_bytes(decoder.planes) if decoder.fewbit else 0
            self._groups = [
                torch.empty(n * rows * size, dtype=torch.uint8) for n in (widest, gated)
            ]
        if num_logits > self._num_logits or not hasattr(self, "_logits"):
            self._num_logits = num_logits
            self._logits = torch.empty(num_logits, decoder.vocab)
