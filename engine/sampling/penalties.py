"""Penalties, biases and masks of one row: what depends on the tokens before it.

Each touches the token ids it concerns and no others, so what is off costs nothing and changes
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.sampling.rows import SamplingRow
from engine.sampling.threads import one_thread

_LARGEST = torch.finfo(torch.float32).max

_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
#: [256, 8] the limits of eight tokens, by the byte that allows them.
_BYTE_LIMITS = np.where(_BITS == 1, np.inf, -np.inf).astype(np.float32)


class Prompts:
    """Prompt ids as tensors, made once per call: the rows of a sequence share their prompt."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Sequence[int], Tensor]] = {}

    def get(self, prompt: Sequence[int], device: torch.device) -> Tensor:
        """int64 [len(prompt)]; the prompt itself is kept, so that its id stays its own."""
        if id(prompt) not in self._tensors:
            ids = torch.tensor(prompt, dtype=torch.int64, device=device)
            self._tensors[id(prompt)] = (prompt, ids)
        return self._tensors[id(prompt)][1]


def adjusts(row: SamplingRow) -> bool:
    """Whether `adjust` would change this row's logits."""
    params = row.params
    return (
        params.repetition_penalty != 1.0
        or (bool(row.generated) and _counts_matter(row))
        or bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or row.allowed is not None
        or bool(params.bad_words)
        or len(row.generated) < params.min_tokens
    )


@one_thread()
def adjust(logits: Tensor, row: SamplingRow, prompts: Prompts) -> None:
    """Applies penalties, bias and masks in place.

    If the masks leave no token at all, bad_words and min_tokens are dropped for this row, and
    then allowed_token_ids: a grammar binds hardest. See `repair` for what remains impossible.

    Args:
        logits: [V] float32.
        row: the tokens before this position and the caller's wishes.
        prompts: shared by the rows of one call.
    """
    params = row.params
    if params.repetition_penalty != 1.0:
        _repetition(logits, row, prompts)
    if row.generated and _counts_matter(row):
        _counts(logits, row)
    if params.logit_bias:
        ids = _inside(params.logit_bias, logits)
        _add(logits, ids, [params.logit_bias[i] for i in ids])
    limits = _limits(row, logits)
    if limits is not None:
        torch.minimum(logits, limits, out=logits)
    banned = _tensor(_inside(banned_ids(row), logits), logits)
    if banned.numel():
        before = logits[banned]
        logits[banned] = -torch.inf
        if logits.max() == -torch.inf:
            logits[banned] = before


def banned_ids(row: SamplingRow) -> set[int]:
    """Tokens that would complete a bad word, or end the text before `min_tokens`."""
    params = row.params
    banned: set[int] = set()
    for word in params.bad_words:
        is_eos = len(word) == 1 and word[0] in row.eos_token_ids
        if not is_eos and _ends_with(row, word[:-1]):
            banned.add(word[-1])
    if len(row.generated) < params.min_tokens:
        banned |= params.stop_token_ids
        if params.ends_at_eos:
            banned |= row.eos_token_ids
    return banned


def repair(logits: Tensor, row: SamplingRow) -> None:
    """Makes a row drawable in place: NaN is never drawn, +inf is merely very likely.

    A row without any possible token (each one masked, NaN or -inf) becomes uniform over what its
    grammar and allowed_token_ids allow, or over the vocabulary. The engine never emits NaN
    probabilities.
    """
    logits.nan_to_num_(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    if logits.max() == -torch.inf:
        logits.zero_()
        limits = _limits(row, logits)
        if limits is not None and limits.max() > 0:
            torch.minimum(logits, limits, out=logits)


def _limits(row: SamplingRow, logits: Tensor) -> Tensor | None:
    """Float32 [V], inf for what grammar and allowed_token_ids allow and -inf for all else; of the
    grammar alone where they agree on nothing, None where all is allowed."""
    limits = None if row.allowed is None else _unpacked(row.allowed, logits)
    if row.params.allowed_token_ids is not None:
        listed = torch.full_like(logits, -torch.inf)
        listed[_tensor(_inside(row.params.allowed_token_ids, logits), logits)] = torch.inf
        both = listed if limits is None else torch.minimum(listed, limits)
        if limits is None or both.max() > 0:
            limits = both
    return limits


def _unpacked(mask: bytes, like: Tensor) -> Tensor:
    """A mask of one bit a token, the lowest first, as limits; by a table of bytes, since choosing
    entry by entry takes twenty times as long."""
    known = np.take(_BYTE_LIMITS, np.frombuffer(mask, np.uint8), axis=0).reshape(-1)
    missing = like.numel() - len(known)
    if missing > 0:
        known = np.pad(known, (0, missing), constant_values=-np.inf)
    return torch.from_numpy(known[: like.numel()]).to(like.device)


def _counts_matter(row: SamplingRow) -> bool:
    return row.params.presence_penalty != 0.0 or row.params.frequency_penalty != 0.0


def _repetition(logits: Tensor, row: SamplingRow, prompts: Prompts) -> None:
    """Divides positive and multiplies negative logits of every token seen so far."""
    ids = torch.cat([prompts.get(row.prompt, logits.device), _tensor(row.generated, logits)])
    ids = ids[ids < logits.numel()]
    seen = logits[ids]  # a token seen twice is read and written twice, with the same value
    penalty = row.params.repetition_penalty
    logits[ids] = torch.where(seen < 0, seen * penalty, seen / penalty)


def _counts(logits: Tensor, row: SamplingRow) -> None:
    """OpenAI's rule: logit - count * frequency_penalty - (count > 0) * presence_penalty."""
    params = row.params
    counts = Counter(row.generated)
    ids = _inside(counts, logits)
    frequency, presence = params.frequency_penalty, params.presence_penalty
    _add(logits, ids, [-(counts[i] * frequency + presence) for i in ids])


def _add(logits: Tensor, ids: list[int], amounts: list[float]) -> None:
    """logits[id] += amount in place, for distinct ids."""
    added = torch.tensor(amounts, dtype=torch.float32, device=logits.device)
    logits[_tensor(ids, logits)] += added


def _ends_with(row: SamplingRow, tail: tuple[int, ...]) -> bool:
    """Whether prompt and generated tokens end with `tail`."""
    missing = len(tail) - len(row.generated)
    if missing > 0:
        return (*row.prompt[-missing:], *row.generated) == tail
    return tuple(row.generated[len(row.generated) - len(tail) :]) == tail


def _inside(ids: Iterable[int], logits: Tensor) -> list[int]:
    """Those of `ids` that the row has a logit for."""
    return [i for i in ids if 0 <= i < logits.numel()]


def _tensor(ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64, device=like.device)
