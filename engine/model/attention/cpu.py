"""Paged attention for CPUs: a C++ kernel that reads the pages in place."""

from __future__ import annotations

import ctypes

import torch

from engine.batch import Batch
from engine.cache.store import KVStore
from engine.model.attention.base import Attend, AttentionCall
from engine.model.native import check_layouts, fields, load_kernels

#: Query heads per key/value head that one tile of the kernel can hold (`kTileRows`).
MAX_GROUP = 16
DTYPES = (torch.float32, torch.bfloat16)


class _Attention(ctypes.Structure):
    """Mirrors `Attention` in kernels/pages.h."""

    _fields_ = [
        *fields(ctypes.c_void_p, "queries key_cache value_cache output"),
        *fields(ctypes.c_void_p, "query_starts context_lengths page_tables branches paths"),
        *fields(ctypes.c_int64, "query_stride query_head_stride"),
        *fields(ctypes.c_int32, "sequences table_width page_size"),
        *fields(ctypes.c_int32, "heads groups head_size window"),
        ("scale", ctypes.c_float),
        *fields(ctypes.c_int32, "output_rows num_branches unused"),
    ]


class _Arguments(ctypes.Structure):
    """Mirrors `Arguments` in kernels/kernels.cpp."""

    _fields_ = [
        ("attention", _Attention),
        *fields(ctypes.c_void_p, "keys values slots"),
        *fields(ctypes.c_int64, "key_stride key_head_stride value_stride value_head_stride"),
        *fields(ctypes.c_int32, "rows bfloat16 eight_bits unused"),
    ]


class _Move(ctypes.Structure):
    """Mirrors `Move` in kernels/kernels.cpp."""

    _fields_ = [
        ("store", _Attention),
        *fields(ctypes.c_void_p, "from to"),
        ("slots", ctypes.c_int64),
        *fields(ctypes.c_int32, "count layers bfloat16 eight_bits"),
    ]


def branches_of(batch: Batch) -> dict[str, int]:
    """What the kernels are told of drafts that branch; nothing where none does."""
    if batch.branches is None or batch.paths is None:
        return {}
    return {
        "branches": batch.branches.data_ptr(),
        "paths": batch.paths.data_ptr(),
        "num_branches": len(batch.branches),
    }


def move_tokens(store: KVStore, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Moves the keys and values of tokens of all layers, in a store that the kernels write.

    Args:
        store: is changed.
        sources: [N] int64 slots; they are read in order, so none may be an earlier target.
        targets: [N] int64 slots.
    """
    library, shape = load_kernels(), store.shape
    check_layouts(library, _Attention, _Move)
    first = _Attention(
        key_cache=store.keys.data_ptr(),
        value_cache=store.values.data_ptr(),
        page_size=store.page_size,
        groups=shape.num_heads,
        head_size=shape.head_size,
    )
    move = _Move(
        store=first,
        slots=store.keys.shape[1],
        count=len(sources),
        layers=shape.num_layers,
        bfloat16=shape.dtype is torch.bfloat16,
        eight_bits=shape.dtype is torch.int8,
        **{"from": sources.data_ptr(), "to": targets.data_ptr()},
    )
    library.specserve_move_tokens.argtypes = [ctypes.POINTER(_Move)]
    library.specserve_move_tokens.restype = None
    library.specserve_move_tokens(ctypes.byref(move))


class CpuAttention:
    """Attends in one call per layer, without gathering or copying a page.

    Raises:
        NativeUnavailable: the kernel cannot be compiled here.
    """

    name = "cpu"

    def __init__(self) -> None:
        library = load_kernels()
        check_layouts(library, _Attention, _Arguments)
        self._kernel = library.specserve_paged_attention
        self._kernel.argtypes = [ctypes.POINTER(_Arguments)]
        self._kernel.restype = None

    def move(self, store: KVStore, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """See `TreeAttention.move`."""
        move_tokens(store, sources, targets)

    def prepare(self, batch: Batch, store: KVStore) -> Attend:
        """See `AttentionBackend.prepare`."""
        shape = store.shape
        shared = _Attention(
            query_starts=batch.query_starts.data_ptr(),
            context_lengths=batch.context_lengths.data_ptr(),
            page_tables=batch.page_tables.data_ptr(),
            sequences=batch.context_lengths.numel(),
            table_width=batch.page_tables.shape[1],
            page_size=batch.page_size,
            groups=shape.num_heads,
            head_size=shape.head_size,
            **branches_of(batch),
        )
        arguments = _Arguments(
            attention=shared,
            slots=batch.slots.data_ptr(),
            rows=batch.input_ids.numel(),
            eight_bits=shape.dtype is torch.int8,
        )
        padding = batch.num_padding_rows

        def attend(call: AttentionCall) -> torch.Tensor:
            queries, keys, values = (
                t if t.stride(-1) == 1 else t.contiguous()
                for t in (call.queries, call.keys, call.values)
            )
            out = torch.empty(queries.shape, dtype=queries.dtype)
            arguments.bfloat16 = queries.dtype is torch.bfloat16
            if padding:
                out[-padding:] = 0
            layer = arguments.attention
            layer.queries, layer.output = queries.data_ptr(), out.data_ptr()
            layer.query_stride, layer.query_head_stride = queries.stride()[:2]
            layer.key_cache = store.keys[call.layer].data_ptr()
            layer.value_cache = store.values[call.layer].data_ptr()
            layer.heads, layer.window, layer.scale = queries.shape[1], call.window, call.scale
            arguments.keys, arguments.values = keys.data_ptr(), values.data_ptr()
            arguments.key_stride, arguments.key_head_stride = keys.stride()[:2]
            arguments.value_stride, arguments.value_head_stride = values.stride()[:2]
            self._kernel(ctypes.byref(arguments))
            return out

        return attend
