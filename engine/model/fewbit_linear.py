"""Linear layers and embeddings of transformers' own modules on the kernels for few bits.

The rows are quantised, too: by groups of 32 inputs, to 16 bits or to eight. Sums of whole numbers
are exact and scales are applied in one order, so a row comes out as if it were alone, and with the
same bits on every instruction set.
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from engine.cache.huge_pages import Arena
from engine.model.fewbit import FORMS, GROUP, pack_blocks
from engine.model.native import check_layouts, fields, load_kernels
from engine.model.packing import pad_rows
from engine.model.quantized import QuantizedWeight

#: What rows are multiplied as, and how many bytes a number then has.
PLANES = {"int16": 2, "int8": 1}

#: Bytes of a group of a row beside its 32 numbers: `Group` in kernels/quantized.h.
_SCALES = 16

_DTYPES = (torch.float32, torch.bfloat16)


def group_bytes(planes: int) -> int:
    """What 32 numbers of a row take, with their scale and sums."""
    return planes * GROUP + _SCALES


class _FewbitLinear(ctypes.Structure):
    """Mirrors `FewbitLinear` in kernels/fewbit_linear.h."""

    _fields_ = [
        *fields(ctypes.c_void_p, "packed bias"),
        *fields(ctypes.c_int32, "inputs outputs form planes bfloat16 unused"),
    ]


class FewbitPacker:
    """Makes layers that share one kernel, and whose weights lie side by side.

    Args:
        activations: what rows are multiplied as: int16, which changes about as much as float32
            does, or int8, which is faster and coarser.
        kernels: the library; by default the one made for this machine.

    Raises:
        NativeUnavailable: the kernels cannot be compiled here.
    """

    def __init__(self, activations: str = "int16", kernels: ctypes.CDLL | None = None) -> None:
        library = kernels or load_kernels()
        check_layouts(library, _FewbitLinear)
        self.kernel = library.specserve_fewbit_linear
        self.kernel.restype = None
        self.planes = PLANES[activations]
        self.arena = Arena()

    def linear(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> PackedFewbitLinear:
        """The layer of a weight and a bias [outputs]; both may be freed afterwards."""
        return PackedFewbitLinear(self, weight, None if bias is None else bias.detach())


class PackedFewbitLinear(nn.Module):
    """`y = x W^T + b` with W in few bits; made by `FewbitPacker.linear`."""

    def __init__(
        self, packer: FewbitPacker, weight: QuantizedWeight, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self._kernel = packer.kernel
        self.out_features, self.in_features = weight.outputs, weight.inputs
        self._packed = packer.arena.keep(pack_blocks(weight.data, weight.kind))
        self._bias = None if bias is None else pad_rows(bias.float()).contiguous()
        self._layers = {dtype: self._layer(packer, weight.kind, dtype) for dtype in _DTYPES}

    def _layer(self, packer: FewbitPacker, kind: str, dtype: torch.dtype) -> _FewbitLinear:
        return _FewbitLinear(
            packed=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            inputs=self.in_features,
            outputs=self.out_features,
            form=FORMS[kind].number,
            planes=packer.planes,
            bfloat16=dtype is torch.bfloat16,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], both in float32 or both in bfloat16."""
        if x.dtype not in _DTYPES or x.shape[-1] != self.in_features:
            raise ValueError(
                f"a layer of {self.in_features} inputs in float32 or bfloat16 was given "
                f"{list(x.shape)} in {x.dtype}"
            )
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if out.numel():
            self._kernel(
                ctypes.byref(self._layers[x.dtype]),
                ctypes.c_void_p(rows.data_ptr()),
                ctypes.c_int64(rows.stride(0)),
                ctypes.c_int64(rows.shape[0]),
                ctypes.c_void_p(out.data_ptr()),
            )
        return out
