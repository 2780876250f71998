"""Packed linear layers: rows that do not know how many they are, on every instruction set."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from engine.model import native
from engine.model.linear import PackedLinear, Packer, can_pack

DTYPES = [torch.float32, torch.bfloat16]
ROWS = 67
SHAPES = [(32, 97), (64, 64), (96, 32), (20, 33), (7, 5), (1, 1), (45, 70), (200, 48)]

#: What GCC and Clang call an instruction set, and what a CPU must say to run it.
SETS = {
    "x86-64": {"sse2"},
    "x86-64-v3": {"avx2", "fma", "bmi2", "f16c"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "sapphirerapids": {"avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"},
}


#: bfloat16 in tiles, as a CPU with AMX computes it, by plain code.
TILES = "emulated tiles"


#: What tells a CPU from one of x86-64-v3, to these kernels.
_BEYOND_V3 = {"avx512f", "avx_vnni"}


def why_not(instructions: str) -> str:
    """Why nothing is computed with an instruction set here; empty if it is."""
    here = set(native._cpu_flags().split())
    if missing := SETS.get(instructions, set()) - here:
        return f"this CPU has no {', '.join(sorted(missing))}"
    if instructions == "x86-64-v3" and not here & _BEYOND_V3:
        return "this CPU's own instructions are those; to compile them once more takes a minute"
    return ""


@functools.cache
def packer(instructions: str = "native") -> Packer:
    """Makes layers for an instruction set, where this CPU has it."""
    if instructions == TILES:
        return Packer(native.load_kernels(emulate_tiles=True))
    if reason := why_not(instructions):
        pytest.skip(reason)
    return Packer(native.load_kernels(instructions))


on_every_set = pytest.mark.parametrize("instructions", ["native", TILES, *SETS])


def layer(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(inputs + outputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def packed(linear: nn.Linear, instructions: str = "native") -> PackedLinear:
    return packer(instructions).linear(linear.weight, linear.bias)


def exactly(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return nn.functional.linear(x.double(), linear.weight.double(), bias)


def check_parts(
    linear: PackedLinear, x: torch.Tensor, truth: torch.Tensor, counts: Iterable[int]
) -> None:
    """Passes of so many rows, from the first row and up to the last, give those of `truth`."""
    for rows in counts:
        assert torch.equal(linear(x[:rows]), truth[:rows]), rows
        assert torch.equal(linear(x[-rows:]), truth[-rows:]), rows


@on_every_set
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_is_what_it_is_alone(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype, instructions: str
) -> None:
    """In passes of 1 to 67 rows."""
    linear = packed(layer(inputs, outputs, bias, dtype), instructions)
    x = torch.randn(ROWS, inputs).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    check_parts(linear, x, alone, range(1, ROWS + 1))


@on_every_set
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_layers_and_many_rows(dtype: torch.dtype, instructions: str) -> None:
    """Widths of a real model, and passes of several panels."""
    linear = packed(layer(576, 1536, False, dtype), instructions)
    x = torch.randn(260, 576).to(dtype)
    check_parts(linear, x, linear(x), (1, 2, 3, 4, 7, 12, 13, 25, 67, 100))


@on_every_set
@pytest.mark.parametrize("dtype", DTYPES)
def test_company_does_not_matter(dtype: torch.dtype, instructions: str) -> None:
    """Not even company that cannot be computed with."""
    linear = packed(layer(45, 70, True, dtype), instructions)
    x = torch.randn(13, 45).to(dtype)
    alone = linear(x[6:7])
    for other in (0.0, 1e30, float("inf"), float("nan")):
        crowd = torch.full_like(x, other)
        crowd[6] = x[6]
        assert torch.equal(linear(crowd)[6:7], alone), other


@on_every_set
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_equals_a_linear_layer(
    inputs: int, outputs: int, bias: bool, dtype: torch.dtype, instructions: str
) -> None:
    linear = layer(inputs, outputs, bias, dtype)
    for rows in (1, 5, 20):
        x = torch.randn(rows, inputs).to(dtype)
        exact = exactly(linear, x)
        # bfloat16 is rounded once, at the end; sums are float32 in both.
        rounding = 0 if dtype is torch.float32 else 2**-8 * exact.abs()
        error = (packed(linear, instructions)(x).double() - exact).abs()
        assert (error <= rounding + 3e-6 * inputs**0.5).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_matter(dtype: torch.dtype) -> None:
    linear = packed(layer(576, 1536, True, dtype))
    x = torch.randn(ROWS, 576).to(dtype)
    truth = linear(x)
    before = torch.get_num_threads()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(linear(x), truth)
            assert torch.equal(linear(x[3:4]), truth[3:4])
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_layout_and_leading_dimensions(dtype: torch.dtype) -> None:
    linear = packed(layer(20, 33, True, dtype))
    x = torch.randn(2, 3, 20).to(dtype)
    truth = linear(x.view(6, 20))
    assert torch.equal(linear(x), truth.view(2, 3, 33))
    wide = torch.randn(6, 50).to(dtype)
    wide[:, 10:30] = x.view(6, 20)
    assert torch.equal(linear(wide[:, 10:30]), truth)  # rows apart
    assert torch.equal(linear(x.view(6, 20).T.contiguous().T), truth)  # elements apart
    assert torch.equal(linear(x[0, 0]), truth[0])
    assert linear(x[:0]).shape == (0, 3, 33)


def test_weights_of_many_layers_lie_side_by_side() -> None:
    both, plain = Packer(), layer(40, 50, True, torch.float32)
    first = both.linear(plain.weight, plain.bias)
    both.linear(plain.weight * 2)
    x = torch.randn(3, 40)
    assert torch.equal(first(x), packed(plain)(x))


def test_another_width_or_dtype_is_refused() -> None:
    linear = packed(layer(20, 33, False, torch.float32))
    with pytest.raises(ValueError, match=r"20 inputs in torch.float32 was given \[2, 21\]"):
        linear(torch.zeros(2, 21))
    with pytest.raises(ValueError, match=r"in torch.bfloat16"):
        linear(torch.zeros(2, 20, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_tells_the_type_of_its_weight(dtype: torch.dtype) -> None:
    """Some models look at it before they call the layer."""
    layer = Packer().linear(torch.zeros(7, 20, dtype=dtype))
    assert layer.weight.dtype is dtype
    assert layer.weight.numel() == 0  # who computes with it gets nothing, and is found out


def test_what_can_be_packed() -> None:
    cpu = torch.device("cpu")
    assert can_pack(torch.float32, cpu)
    assert can_pack(torch.bfloat16, cpu)
    assert not can_pack(torch.float16, cpu)
    assert not can_pack(torch.float32, torch.device("meta"))


def test_tiles_are_what_is_tested() -> None:
    """They sum even and odd inputs apart, wherever the width fills them, for any rows."""
    for instructions, inputs, wanted in ((TILES, 96, 1.0), (TILES, 94, 0.0), ("x86-64", 96, 0.0)):
        weight = torch.zeros(64, inputs)
        weight[:, :3] = torch.tensor([2.0**30, 1.0, -(2.0**30)])  # in turn, the 1 is lost
        linear = packer(instructions).linear(weight.bfloat16())
        for rows in (1, 40):
            found = linear(torch.ones(rows, inputs).bfloat16())
            assert (found == wanted).all(), (instructions, inputs, rows)


def test_the_unit_has_a_name() -> None:
    assert native.tile_unit(native.load_kernels(emulate_tiles=True)) == "an emulated tile unit"
    here = set(native._cpu_flags().split())
    if "amx_bf16" not in here:
        assert "no tile unit" in native.tile_unit(native.load_kernels())


@pytest.mark.parametrize("name", SETS)
def test_compiles_for_every_instruction_set(name: str) -> None:
    """Also for those that nothing is computed with here; they are not optimised, which would take
    a minute."""
    path = native.build_kernels(name, ("-O0",) if why_not(name) else ())
    assert path.suffix == ".so"
    assert path.stat().st_size > 10_000
    assert path != native.build_kernels("native")
