"""Makes a transformers model compute every row as if it were alone.

Three kinds of operation do not, on CPUs: matrix products, whose order of summation depends on the
number of rows; activations such as SiLU, whose last few numbers of a piece are computed otherwise
than the rest; and mixtures of experts, which are made of both. All are replaced in place:

- `nn.Linear`, `Conv1D`, `QuantizedLinear` and experts by layers on our own kernels;
- activation modules by themselves, on pieces that have no such rest;
- what a module does without a layer of its own, as routers do, is caught where it is called.

Attention is replaced elsewhere. What else a model does row by row stays as it is; the self-test
at start tells whether anything was missed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from engine.model.experts import PackedExperts, is_experts
from engine.model.fewbit_linear import FewbitPacker
from engine.model.linear import PackedLinear, Packer
from engine.model.matrices import is_fewbit
from engine.model.quantized import QuantizedLinear

#: torch computes elements two vectors at a time, and what is left of a thread's piece one by one:
#: two vectors are 64 numbers of two bytes in AVX-512. A piece has 32,768 numbers at least, or, from
#: 16,384 on and for some functions, each thread has one.
_WHOLE, _PIECE, _SHARED = 64, 32_768, 16_384

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_NOT_BY_ELEMENT = (
    nn.Softmax,
    nn.LogSoftmax,
    nn.Softmax2d,
    nn.Softmin,
    nn.GLU,
    nn.MultiheadAttention,
)

_FUNCTIONS = frozenset(
    {
        functional.gelu,
        functional.mish,
        functional.silu,
        functional.softplus,
        torch.sigmoid,
        torch.Tensor.sigmoid,
    }
)


def make_invariant(model: nn.Module, activations: str = "int16") -> None:
    """Replaces what depends on the other rows of a pass, in place.

    Args:
        model: transformers' own.
        activations: what rows are multiplied as with weights in few bits; see `PLANES`.

    Raises:
        NativeUnavailable: the kernels cannot be compiled here; nothing was replaced.
    """
    loose = [m for m in model.modules() if _has_loose_weights(m)]
    callers = [m for m in model.modules() if m in loose or any(c in loose for c in m.children())]
    packer = Packer()
    mode = _Rows(packer, {id(w): packer.linear(w) for m in loose for w in _matrices(m)})
    _widen_others(model)
    _replace_layers(model, packer, FewbitPacker(activations))
    for module in model.modules():
        if type(module).__module__ in _ACTIVATIONS and not isinstance(module, _NOT_BY_ELEMENT):
            _wrap(
                module, lambda inner: lambda x, *more, **kw: in_whole_pieces(inner, x, *more, **kw)
            )
    for module in callers:
        _wrap(module, mode.around)


def in_whole_pieces(
    function: Callable[..., torch.Tensor], x: torch.Tensor, *more: Any, **named: Any
) -> torch.Tensor:
    """`function` of every element of `x`, none of which depends on where it stands."""
    count = x.numel()
    missing = _whole(count) - count
    if not missing and x.is_contiguous():
        return function(x, *more, **named)
    padded = functional.pad(x.reshape(-1), (0, missing))
    return function(padded, *more, **named)[:count].view(x.shape)


def _whole(count: int) -> int:
    """The next number of elements from `count` on that gives every thread whole vectors."""
    threads = torch.get_num_threads()
    while True:
        pieces = min(threads, -(-count // _PIECE)) or 1
        unit = _WHOLE * math.lcm(pieces, threads if count > _SHARED else 1)
        if count % unit == 0:
            return count
        count += -count % unit


class _Rows(TorchFunctionMode):
    """Catches what modules do without a layer of their own.

    Args:
        packer: makes the layers of weights that are computed on the way.
        layers: by the id of a parameter, which must live as long as this.
    """

    def __init__(self, packer: Packer, layers: dict[int, PackedLinear]) -> None:
        super().__init__()
        self._packer = packer
        self._layers = layers

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with all that it calls caught."""

        def caught(*args: Any, **named: Any) -> Any:
            with self:
                return function(*args, **named)

        return caught

    def __torch_function__(
        self,
        function: Any,
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if function is functional.linear:
            return self._linear(*args, **named)
        if function in _FUNCTIONS:
            return in_whole_pieces(function, *args, **named)
        return function(*args, **named)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        layer = self._layers.get(id(weight)) or self._packer.linear(weight)
        out: torch.Tensor = layer(input)
        return out if bias is None else out + bias


def _has_loose_weights(module: nn.Module) -> bool:
    known = isinstance(module, (nn.Linear, nn.Embedding, Conv1D, PackedLinear))
    return not known and any(p.dim() > 1 for p in module.parameters(recurse=False))


def _matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.dim() == 2]


def _widen_others(model: nn.Module) -> None:
    """Layers in blocks that no kernel multiplies become plain ones in the model's dtype."""
    dtype = next(model.parameters()).dtype
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, QuantizedLinear) and not is_fewbit(child):
                plain = nn.Linear(child.in_features, child.out_features, False, device="meta")
                plain.weight = nn.Parameter(child.weight.dequantize().to(dtype), False)
                if child.bias is not None:
                    plain.bias = nn.Parameter(child.bias, False)
                setattr(parent, name, plain)


def _replace_layers(module: nn.Module, packer: Packer, fewbit: FewbitPacker) -> None:
    children: list[tuple[str, Any]] = list(module.named_children())
    for name, child in children:
        if is_fewbit(child):
            setattr(module, name, fewbit.linear(child.weight, child.bias))
        elif type(child) in (nn.Linear, Conv1D):
            weight = child.weight if type(child) is nn.Linear else child.weight.T
            setattr(module, name, packer.linear(weight, child.bias))
        elif is_experts(child):
            setattr(module, name, PackedExperts(child, packer))
        else:
            _replace_layers(child, packer, fewbit)


def _wrap(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts a function around what one module does."""
    module.forward = around(module.forward)
