"""Log probabilities of chosen tokens under the model's own, unprocessed distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from engine.sampling.threads import one_thread
from engine.types import TokenLogprobs

#: Rows in the works at a time: enough to spread the cost of a call, few enough for the cache.
_BLOCK = 8


@one_thread()
def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], top: int, vocab_size: int | None = None
) -> list[TokenLogprobs]:
    """What the model itself thought of each chosen token.

    A few rows are in the works at a time, so memory beyond `logits` is some V floats however many
    rows there are (a long prompt's, for instance). All of it is one thread's work: a row is a dozen
    small operations, and if threads shared each of them, they would wait for each other a dozen
    times a row, on a busy machine for a time slice of somebody else's every time.

    Args:
        logits: [R, V] as the model gave them, any floating dtype.
        token_ids: R chosen tokens.
        top: how many of the most likely tokens to add; capped at the vocabulary's size.
        vocab_size: ids from here on are padding and take no part; None = V.

    Returns:
        R entries. Ranks count from 1; of equally likely tokens the lower id ranks first, in
        `rank` as in `top`.

    Raises:
        ValueError: there are not as many tokens as rows.
    """
    if len(logits) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens cannot be looked up in {len(logits)} rows")
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _BLOCK):
        rows = logits[start : start + _BLOCK, :vocab_size].float()
        entries += _block_logprobs(rows, token_ids[start : start + _BLOCK], top)
    return entries


def _block_logprobs(rows: Tensor, tokens: Sequence[int], top: int) -> Iterator[TokenLogprobs]:
    """The entries of a few rows, [R, V] float32. Each is computed as if it were alone."""
    ids = torch.tensor(tokens, device=rows.device).unsqueeze(1)
    peaks = rows.amax(dim=1, keepdim=True)
    weights = (rows - peaks).exp_()
    totals = [float(row.sum(dtype=torch.float64)) for row in weights]
    mine = rows.gather(1, ids)
    above = (rows > mine).count_nonzero(dim=1)
    equal = (rows == mine).count_nonzero(dim=1)
    best = _best(rows, min(top, rows.shape[1]))
    columns = (column.tolist() for column in (peaks[:, 0], mine[:, 0], above, equal))
    for token, row, found, total, peak, logit, ahead, alike in zip(
        tokens, rows, best, totals, *columns, strict=True
    ):
        log_total = peak + math.log(total)
        if alike > 1:
            ahead += int((row[:token] == logit).count_nonzero())
        yield TokenLogprobs(
            token_id=token,
            logprob=logit - log_total,
            rank=ahead + 1,
            top=tuple((i, value - log_total) for i, value in found),
        )


def _best(rows: Tensor, number: int) -> list[list[tuple[int, float]]]:
    """Ids and values of the `number` largest entries of each row, best first, equal ones by
    ascending id."""
    if number == 0:
        return [[] for _ in rows]
    values, ids = torch.topk(rows, number)
    least = values[:, -1:]
    reach = (rows >= least).count_nonzero(dim=1)
    found = []
    for i, (pairs, count) in enumerate(
        zip(zip(ids.tolist(), values.tolist(), strict=True), reach.tolist(), strict=True)
    ):
        best = list(zip(*pairs, strict=True))
        if count > number:  # which of those that equal the last one are in is arbitrary
            maybe = (rows[i] >= least[i]).nonzero().squeeze(1).tolist()
            best = list(zip(maybe, rows[i][maybe].tolist(), strict=True))
        found.append(sorted(best, key=lambda pair: (-pair[1], pair[0]))[:number])
    return found
