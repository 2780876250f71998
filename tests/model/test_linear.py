"""Packed linear layers: rows that do not know how many they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.model.linear import PackedLinear, can_pack, has_native_bfloat16, pack_linears

DTYPES = [torch.float32, torch.bfloat16]


def layer(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    if not can_pack(dtype, torch.device("cpu")):
        pytest.skip(f"this CPU does not multiply {dtype} natively")
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(32, 97), (64, 64), (96, 32), (20, 33), (576, 1536)]
)
def test_rows_are_bit_equal_from_two_up(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype
) -> None:
    linear = layer(inputs, outputs, bias, dtype)
    packed = PackedLinear(linear)
    x = torch.randn(67, inputs).to(dtype)
    full = packed(x)
    for start, end in [(0, 2), (1, 3), (0, 3), (5, 9), (0, 16), (3, 20), (0, 33), (2, 66)]:
        assert torch.equal(packed(x[start:end]), full[start:end]), (start, end)
    assert torch.equal(packed(x[None, 4:8])[0], full[4:8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_equals_a_linear_layer(bias: bool, dtype: torch.dtype) -> None:
    linear = layer(96, 97, bias, dtype)
    x = torch.randn(5, 96).to(dtype)
    exact = nn.functional.linear(
        x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()
    )
    error = (PackedLinear(linear)(x).double() - exact).abs().max()
    assert error < (1e-5 if dtype is torch.float32 else 2**-7 * exact.abs().max())


def test_only_plain_linear_layers_are_replaced() -> None:
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "a": nn.Linear(4, 4),
            "deep": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ModuleList([nn.Linear(4, 2)])),
            "special": Special(4, 4),
            "embedding": nn.Embedding(4, 4),
        }
    ).requires_grad_(False)
    assert pack_linears(model) == 3
    assert isinstance(model["a"], PackedLinear)
    assert type(model["special"]) is Special
    assert not any(type(m) is nn.Linear for m in model.modules())


def test_what_cannot_be_packed() -> None:
    assert not can_pack(torch.float16, torch.device("cpu"))
    assert not can_pack(torch.float32, torch.device("meta"))
    assert can_pack(torch.bfloat16, torch.device("cpu")) == has_native_bfloat16()
