"""Keyed randomness: every draw is a pure function of what it is for, and nothing is stored.

A key names a draw: (seed, choice, position, purpose, step, index) hashed to 64 bits. A token's
noise is SplitMix64's finaliser over key + id * golden ratio, so it depends on the key and the
token id alone: not on the row, the support, the vocabulary's size or the batch.

Sampling is an exponential race (Gumbel-max): the token with the largest log p + Gumbel noise
is distributed as p.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from engine.sampling.rows import SamplingRow

_64_BITS = (1 << 64) - 1
_BITS = 52  # random bits of a uniform: (bits + 0.5) * 2**-52 is exact in float64, never 0 or 1

#: A support larger than this is screened in float32 before the race is run in float64.
_SCREEN_ABOVE = 2048

#: The screen errs by less than 0.8: by log(36.7 / 16.6) where a float32 uniform is rounded away
#: from 1, and by less than 0.01 elsewhere. So the winner is within this of the screen's best.
_SCREEN_MARGIN = 1.0


class Purpose(enum.IntEnum):
    """What a draw is for. Draws of different purposes are independent."""

    TOKEN = 0  # the target's own token; a draft model in match mode shares it on purpose
    ACCEPT = 1  # the coin of rejection and block verification
    RESIDUAL = 2  # the correction after a rejected draft
    BONUS = 3  # the token after a fully accepted draft
    DRAFT = 4  # a draft model's token under rejection or block verification


def noise_key(
    seed: int, choice: int, position: int, purpose: Purpose, step: int = 0, index: int = 0
) -> int:
    """64 bits that name one draw.

    Args:
        seed: of the request, 64 bits, signed or not.
        choice: which of the request's n choices.
        position: absolute index of the token that the draw is about.
        purpose: what is drawn.
        step: the sequence's step, for draws that must not repeat when a position is judged
            again (block verification).
        index: number of the draw among those that share all the rest.
    """
    name = struct.pack("<6Q", seed & _64_BITS, choice, position, purpose, step, index)
    digest = hashlib.blake2b(name, digest_size=8, person=b"specserve noise").digest()
    return int.from_bytes(digest, "little")


def uniform(key: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    return (key >> 11) * 2.0**-53


def gumbel(key: int, ids: Tensor) -> Tensor:
    """Standard Gumbel noise of the tokens `ids` (int64), float64 of the same shape.

    It is -log(-log1p(-u)) with u in [2**-53, 1 - 2**-53]: finest where winners live, and
    between -3.7 and 36.8.
    """
    return _gumbel_of(_bits(key, ids * _GOLDEN))


def gumbel_rows(keys: Sequence[int], size: int, device: torch.device) -> Tensor:
    """The noise of the tokens 0 to `size` - 1 under several keys, float64 [len(keys), size]; the
    same numbers as `gumbel` gives on that device."""
    signed = torch.tensor(list(map(_signed, keys)), device=device).unsqueeze(1)
    return _gumbel_of(_bits(signed, _all_weyl(size, device)))


def _gumbel_of(bits: Tensor) -> Tensor:
    u = bits.double().add_(0.5).mul_(2.0**-_BITS)
    return u.neg_().log1p_().neg_().log_().neg_()


def race(
    processed: Tensor, rows: Sequence[SamplingRow], purpose: Purpose = Purpose.TOKEN
) -> list[int]:
    """Draws one token per row.

    Args:
        processed: [R, V] log weights up to a constant per row; -inf outside the support. Each
            row must have at least one finite entry and no NaN.
        rows: R rows; only seed, choice, position and step matter here.
        purpose: what the tokens are for.

    Returns:
        R token ids; equal scores go to the lowest id.
    """
    chosen = []
    for log_weights, row in zip(processed, rows, strict=True):
        key = noise_key(row.seed, row.choice, row.position, purpose, row.step)
        inside = log_weights.isfinite()
        if bool(inside.all()):
            chosen.append(race_row(key, None, log_weights))
        else:
            ids = inside.nonzero().squeeze(1)
            chosen.append(race_row(key, ids, log_weights[ids]))
    return chosen


def race_row(key: int, ids: Tensor | None, log_weights: Tensor) -> int:
    """Draws one of `ids` (ascending int64 [N]; None: 0 to N-1) by its log weight [N].

    The winner is the same whether a token outside the support is left out or weighs -inf.
    """
    return int(race_winner(key, ids, log_weights))


def race_winner(key: int, ids: Tensor | None, log_weights: Tensor) -> Tensor:
    """As `race_row`; the winner stays where the weights are, int64 without dimensions."""
    if log_weights.numel() > _SCREEN_ABOVE:
        near = _screen(key, ids, log_weights)
        ids = near if ids is None else ids[near]
        log_weights = log_weights[near]
    elif ids is None:
        ids = torch.arange(log_weights.numel(), device=log_weights.device)
    score = gumbel(key, ids).add_(log_weights)
    return ids.take(score.argmax())  # an index in brackets would be read, and waited for


def _screen(key: int, ids: Tensor | None, log_weights: Tensor) -> Tensor:
    """Indices (ascending) of the entries that can win, found in float32 at a third of the cost."""
    weyl = _all_weyl(log_weights.numel(), log_weights.device) if ids is None else ids * _GOLDEN
    u = _bits(key, weyl).float().add_(0.5).mul_(2.0**-_BITS).clamp_(max=1.0 - 2.0**-24)
    score = log_weights - log_weights.max()  # near 0, where float32 is fine
    score = score.float().sub_(u.neg_().log1p_().neg_().log_())
    return (score >= score.max() - _SCREEN_MARGIN).nonzero().squeeze(1)


def _signed(bits: int) -> int:
    """The int64 with the same 64 bits."""
    return bits - (1 << 64) if bits >= 1 << 63 else bits


# SplitMix64 (Steele, Lea, Flood 2014): the Weyl increment and the finaliser's multipliers.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


@lru_cache(maxsize=8)
def _all_weyl(size: int, device: torch.device) -> Tensor:
    """id * golden ratio for every id of a vocabulary; shared, so never write to it."""
    return torch.arange(size, device=device) * _GOLDEN


def _bits(key: int | Tensor, weyl: Tensor) -> Tensor:
    """52 random bits (int64) for each of `weyl` = id * golden ratio; int64 wraps as wanted."""
    z = weyl + (_signed(key) if isinstance(key, int) else key)
    shifted = torch.empty_like(z)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        z ^= _logical_shift(z, shift, shifted)
        z *= factor
    z ^= _logical_shift(z, 31, shifted)
    return _logical_shift(z, 64 - _BITS, z)


def _logical_shift(z: Tensor, shift: int, out: Tensor) -> Tensor:
    """z >> shift filled with zeros: torch's own shift of int64 drags the sign along."""
    torch.bitwise_right_shift(z, shift, out=out)
    out &= (1 << (64 - shift)) - 1
    return out
