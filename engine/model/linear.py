"""Linear layers, chosen at load.

On CPUs, weights are reordered once for oneDNN. That is faster than `torch.nn.Linear`, and its
rows do not depend on how many of them share a pass (from two rows up), which plain float32
`nn.Linear` does not offer. A layer that stays `nn.Linear` still works.
"""

from __future__ import annotations

import torch
from torch import nn


class PackedLinear(nn.Module):
    """`y = x W^T + b` with W in oneDNN's own layout, in float32 or bfloat16.

    Args:
        linear: the layer to take weights from; its weight may be freed afterwards.
    """

    packed: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self.bias = linear.bias
        self.register_buffer(
            "packed", torch.ops.mkldnn._reorder_linear_weight(weight), persistent=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN computes in `dtype` on `device` natively."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and has_native_bfloat16())


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def pack_linears(module: nn.Module) -> int:
    """Replaces every `nn.Linear` below `module` by a `PackedLinear`, in place.

    Returns:
        Number of layers replaced.
    """
    count = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child))
            count += 1
        else:
            count += pack_linears(child)
    return count
