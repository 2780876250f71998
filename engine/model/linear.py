"""Linear layers of transformers' own modules, computed by the native decoder's matrix kernel.

Every row comes out as if it were alone, whatever the number of rows, in float32 and bfloat16 and
on every instruction set (see `kernels/matmul.h`). Neither torch nor oneDNN promises that: theirs
choose other orders of summation for other numbers of rows.
"""

from __future__ import annotations

import ctypes

import torch
from torch import nn

from engine.cache.huge_pages import Arena
from engine.model.native import check_layouts, fields, load_kernels
from engine.model.packing import pack, pad_rows
from engine.model.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedWeight


class _Linear(ctypes.Structure):
    """Mirrors `Linear` in kernels/linear.h."""

    _fields_ = [
        *fields(ctypes.c_void_p, "packed bias"),
        *fields(ctypes.c_int32, "inputs outputs bfloat16 unused"),
    ]


class Packer:
    """Makes layers that share one kernel, and whose weights lie side by side.

    Args:
        kernels: the library; by default the one made for this machine.

    Raises:
        NativeUnavailable: the kernels cannot be compiled here.
    """

    def __init__(self, kernels: ctypes.CDLL | None = None) -> None:
        library = kernels or load_kernels()
        check_layouts(library, _Linear)
        self.kernel = library.specserve_linear
        self.kernel.restype = None
        self.arena = Arena()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """The layer of a weight [N, K], float32 or bfloat16, and a bias [N]; both may be freed
        afterwards."""
        return PackedLinear(self, weight.detach(), None if bias is None else bias.detach())


class PackedLinear(nn.Module):
    """`y = x W^T + b` with W in blocks, summed in float32; made by `Packer.linear`."""

    def __init__(self, packer: Packer, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._kernel = packer.kernel
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        #: Holds nothing; some models look at its type before they call the layer.
        self.weight = weight.new_empty(0, self.in_features)
        self._packed = packer.arena.keep(pack(weight))
        self._bias = None if bias is None else pad_rows(bias.float()).contiguous()
        self._layer = _Linear(
            packed=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            inputs=self.in_features,
            outputs=self.out_features,
            bfloat16=self.dtype is torch.bfloat16,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], both in the weight's dtype."""
        if x.dtype is not self.dtype or x.shape[-1] != self.in_features:
            raise ValueError(
                f"a layer of {self.in_features} inputs in {self.dtype} was given "
                f"{list(x.shape)} in {x.dtype}"
            )
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=self.dtype)
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if out.numel():
            self._kernel(
                ctypes.byref(self._layer),
                ctypes.c_void_p(rows.data_ptr()),
                ctypes.c_int64(rows.stride(0)),
                ctypes.c_int64(rows.shape[0]),
                ctypes.c_void_p(out.data_ptr()),
            )
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a kernel for `dtype` on `device`; it may still not compile."""
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def give_back(module: nn.Module) -> None:
    """Frees the memory of a module's weights, once they are packed."""
    for parameter in module.parameters():
        parameter.data = parameter.data.new_empty(0)
    for part in module.modules():
        if isinstance(part, (QuantizedLinear, QuantizedEmbedding)):
            weight = part.weight
            none = weight.data.new_empty(0, weight.data.shape[1])
            part.weight = QuantizedWeight(weight.kind, 0, weight.inputs, none)
