"""Products with weights in few bits: values, and rows that do not know how many they are."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch import nn

from engine.model import native
from engine.model.fewbit import FORMS, pack_blocks, pack_mixed
from engine.model.fewbit_linear import PLANES, FewbitPacker, PackedFewbitLinear
from engine.model.matrices import is_fewbit
from engine.model.quantized import QuantizedLinear, QuantizedWeight
from tests.blocks import KINDS, random_weight
from tests.model.test_linear import SETS, why_not

ROWS, OUTPUTS, INPUTS = 67, 70, 512
LARGEST = {"int16": 32512, "int8": 127}

every_kind = pytest.mark.parametrize("kind", KINDS)
every_rounding = pytest.mark.parametrize("activations", PLANES)
on_every_set = pytest.mark.parametrize("instructions", ["native", *SETS])


@functools.cache
def packer(activations: str, instructions: str = "native") -> FewbitPacker:
    """Makes layers for an instruction set, where this CPU has it."""
    if reason := why_not(instructions):
        pytest.skip(reason)
    return FewbitPacker(activations, native.load_kernels(instructions))


@functools.cache
def layer(kind: str, activations: str, instructions: str = "native") -> PackedFewbitLinear:
    return packer(activations, instructions).linear(random_weight(kind, OUTPUTS, INPUTS))


@functools.cache
def rows() -> torch.Tensor:
    """Random rows, with some in which single numbers stand out, and one group of zeros."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, INPUTS)
    x[5, 40] = 300.0
    x[7] *= 1e-6
    x[9, 64:96] = 0.0
    return x


def rounded(x: torch.Tensor, activations: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows as whole numbers [N, groups, 32] and scales [N, groups], by the rule."""
    groups = x.numpy().reshape(len(x), -1, 32)
    most = np.abs(groups).max(axis=2)
    largest = np.float32(LARGEST[activations])
    inverse = np.divide(largest, most, out=np.zeros_like(most), where=most >= 1e-30)
    scale = np.where(most >= 1e-30, most / largest, np.float32(0))
    return np.rint(groups * inverse[:, :, None]).astype(np.int64), scale


@every_kind
@every_rounding
@on_every_set
def test_a_row_is_what_it_is_alone(kind: str, activations: str, instructions: str) -> None:
    """Passes of 1 to 67 rows, from the first row and up to the last; the same bits everywhere."""
    linear, x = layer(kind, activations, instructions), rows()
    alone = torch.cat([linear(row[None]) for row in x])
    for count in range(1, ROWS + 1):
        assert torch.equal(linear(x[:count]), alone[:count]), count
        assert torch.equal(linear(x[-count:]), alone[-count:]), count
    assert torch.equal(layer(kind, activations)(x), alone)


@every_kind
@every_rounding
def test_equals_the_product_of_rounded_rows(kind: str, activations: str) -> None:
    """Nothing is lost but what rounding rows takes: against float64, with the rows as rounded."""
    weight = random_weight(kind, OUTPUTS, INPUTS)
    q, scale = rounded(rows(), activations)
    x = torch.from_numpy(q * scale[:, :, None].astype(np.float64)).view(ROWS, INPUTS)
    plain = weight.dequantize().double()
    # A float32 sum of sixteen groups, of which each is rounded a few times; and of a weight that
    # gguf rounds to float32, we take scale and minimum apart.
    bound = 20 * 2**-24 * (x.abs() @ plain.abs().T + x.abs() @ torch.full_like(plain, 0.5).T)
    error = (layer(kind, activations)(rows()).double() - x @ plain.T).abs()
    assert (error <= bound).all(), (error / bound).max()


@every_kind
def test_sixteen_bits_are_faithful_and_eight_are_coarser(kind: str) -> None:
    exact = rows().double() @ random_weight(kind, OUTPUTS, INPUTS).dequantize().double().T
    errors = {
        activations: ((layer(kind, activations)(rows()) - exact).norm() / exact.norm()).item()
        for activations in PLANES
    }
    assert errors["int16"] < 1e-4
    assert 1e-3 < errors["int8"] < 3e-2


def test_the_arithmetic_by_hand() -> None:
    """Q4_1, one group after the other, each operation rounded to float32 once."""
    for activations in PLANES:
        weight = random_weight("Q4_1", 40, 96)
        blocks = weight.data.numpy().reshape(40, 3, 20)
        scales = np.ascontiguousarray(blocks[:, :, :4]).view(np.float16).astype(np.float32)
        low, high = blocks[:, :, 4:] & 15, blocks[:, :, 4:] >> 4
        w = np.concatenate([low, high], axis=2).astype(np.int64)
        x = rows()[:5, :96].contiguous()
        q, scale = rounded(x, activations)
        total = np.zeros((5, 40), np.float32)
        for g in range(3):
            products = np.einsum("rk,ok->ro", q[:, g], w[:, g]).astype(np.float32)
            factor = scale[:, g, None] * scales[None, :, g, 0]
            total = fused(factor, products, total)
            sums = scale[:, g] * q[:, g].sum(axis=1).astype(np.float32)
            total = fused(scales[None, :, g, 1], sums[:, None], total)
        found = packer(activations).linear(weight)(x)
        assert np.array_equal(found.numpy(), total), activations


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c, rounded to float32 once; products of two float32 are exact in float64."""
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)
    return exact.astype(np.float32)


@every_kind
def test_single_weights_come_out_of_their_places(kind: str) -> None:
    """Rows with a single 1: an output is one weight, whichever of its bits is set."""
    weight = random_weight(kind, OUTPUTS, INPUTS)
    found = packer("int16").linear(weight)(torch.eye(INPUTS)).T
    torch.testing.assert_close(found, weight.dequantize(), rtol=1e-6, atol=1e-7)


@every_rounding
@on_every_set
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_extremes_do_not_saturate(kind: str, activations: str, instructions: str) -> None:
    """All weights as large as their bits allow, all inputs as large as rounding makes them."""
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    for fill, value in {"Q8_0": ((0x80, -128), (0x7F, 127))}.get(kind, ((0xFF, 15), (0, 0))):
        blocks = np.full((33, 8, size), fill, dtype=np.uint8)
        blocks[:, :, : size - (32 if kind == "Q8_0" else 16)] = 0
        blocks[:, :, :2] = np.array([1.0], np.float16).view(np.uint8)
        weight = QuantizedWeight(kind, 33, 256, torch.from_numpy(blocks.reshape(33, -1)))
        value -= 8 * (kind == "Q4_0")
        linear = packer(activations, instructions).linear(weight)
        for sign in (1.0, -1.0):
            found = linear(torch.full((9, 256), sign))
            torch.testing.assert_close(
                found, torch.full((9, 33), sign * value * 256), rtol=1e-6, atol=0
            )


@every_rounding
def test_company_does_not_matter(activations: str) -> None:
    """Not even company that cannot be computed with, which no one takes for a number."""
    linear = layer("Q6_K", activations)
    alone = linear(rows()[6:7])
    for other in (0.0, 1e30, float("inf"), float("nan")):
        crowd = torch.full((13, INPUTS), other)
        crowd[6] = rows()[6]
        found = linear(crowd)
        assert torch.equal(found[6:7], alone), other
        assert found[5].isfinite().all() == (other in (0.0, 1e30))
    single = rows()[:2].clone()
    single[1, 77] = float("nan")
    assert linear(single)[1].isnan().all()


@on_every_set
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_scales_of_any_kind_are_read(kind: str, instructions: str) -> None:
    """Tiny ones, large ones, and those that are no number, which concern their output alone."""
    weight = random_weight(kind, 33, 256)
    place = {"Q4_1": 0, "Q6_K": 208}[kind]
    bits = [0x0001, 0x03FF, 0x8400, 0x7BFF, 0x7C00, 0xFE00]  # from the smallest to infinite and NaN
    for output, scale in enumerate(bits):
        weight.data[output, place : place + 2] = torch.tensor([scale & 255, scale >> 8])
    found = packer("int16", instructions).linear(weight)(torch.eye(256)).T
    with np.errstate(invalid="ignore"):
        truth = weight.dequantize()
    torch.testing.assert_close(found[:4], truth[:4], rtol=1e-6, atol=1e-7)
    assert not found[4:6].isfinite().all(dim=1).any()
    assert torch.equal(found[6:], packer("int16").linear(weight)(torch.eye(256)).T[6:])
    assert found[6:].isfinite().all()


@every_rounding
def test_threads_do_not_matter(activations: str) -> None:
    linear = layer("Q4_K", activations)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear(rows()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_biases_bfloat16_and_any_layout() -> None:
    weight, bias = random_weight("Q4_1", 33, 64), torch.randn(33)
    linear, plain = packer("int16").linear(weight, bias), packer("int16").linear(weight)
    x = torch.randn(2, 3, 64)
    truth = plain(x.view(6, 64)) + bias
    assert torch.equal(linear(x), truth.view(2, 3, 33))
    assert torch.equal(linear(x.bfloat16()), (plain(x.bfloat16().float()) + bias).bfloat16())
    wide = torch.randn(6, 100)
    wide[:, 10:74] = x.view(6, 64)
    assert torch.equal(linear(wide[:, 10:74]), truth)  # rows apart
    assert torch.equal(linear(x.view(6, 64).T.contiguous().T), truth)  # elements apart
    assert torch.equal(linear(x[0, 0]), truth[0])
    assert linear(x[:0]).shape == (0, 3, 33)


def test_what_cannot_be_multiplied_is_refused() -> None:
    linear = packer("int16").linear(random_weight("Q4_1", 33, 64))
    with pytest.raises(ValueError, match=r"64 inputs .* \[2, 65\]"):
        linear(torch.zeros(2, 65))
    with pytest.raises(ValueError, match=r"torch.float16"):
        linear(torch.zeros(2, 64, dtype=torch.float16))
    other = QuantizedWeight("Q2_K", 4, 256, torch.zeros(4, 84, dtype=torch.uint8))
    assert not is_fewbit(QuantizedLinear(other))
    assert not is_fewbit(nn.Linear(4, 4))


def test_several_kinds_in_one_matrix() -> None:
    """The form that holds everything, through the kernel: outputs in any order."""
    weights = [random_weight(kind, 24, 256, seed) for seed, kind in enumerate(KINDS)]
    order = torch.randperm(24 * len(KINDS), generator=torch.Generator().manual_seed(0))
    form, packed = pack_mixed(weights, lambda parts: torch.cat(parts)[order])
    linear = packer("int16").linear(random_weight("Q4_1", len(order), 256))
    linear._packed = packed
    for described in linear._layers.values():
        described.packed, described.form = packed.data_ptr(), form.number
    x = rows()[:, :256]
    exact = x.double() @ torch.cat([w.dequantize() for w in weights]).double()[order].T
    assert (linear(x) - exact).norm() / exact.norm() < 1e-4


@every_kind
def test_what_weights_take(kind: str) -> None:
    """Bits of a weight with its scales, in whole blocks."""
    packed = pack_blocks(random_weight(kind, 64, 512).data, kind)
    wanted = {"Q4_0": 4.5, "Q4_1": 5, "Q4_K": 6, "Q5_0": 8.5, "Q5_1": 10, "Q5_K": 10}
    assert packed.numel() * 8 / (64 * 512) == wanted.get(kind, 10 if kind == "Q6_K" else 8.5)
    assert FORMS[kind].number >= 1
