"""Draws all tokens of a step on the device that holds its logits, and reads back once.

Every row of every draft is drawn, also behind what will turn out to be refused: that costs a
device little, while looking in between costs it a pause. All operations are elementwise, exact
selections, or reductions over a single row, so a row still does not depend on the others.

Drafts that are judged by their probabilities are weighed one by one, as on a CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.sampling.edits import Edits
from engine.sampling.noise import Purpose, gumbel_rows, noise_key
from engine.sampling.penalties import adjusts
from engine.sampling.rows import SamplingRow
from engine.sampling.sampler import Draw, Drawn, deciding, drawn_from, weigh_draft

_LARGEST = torch.finfo(torch.float32).max
_ONE = 0x3F800000  # the bits of 1.0 in float32; of what is not negative, larger means more

#: Numbers that are in the works at a time: noise takes several times as much memory as logits.
_AT_ONCE = 1 << 23


class BatchSampler:
    """Draws a step's rows side by side; the tokens of `RowSampler` wherever rows are sound.

    On another device than the CPU exponentials and logarithms may be rounded otherwise, so
    between devices near-ties may differ; on one device nothing depends on batch or draft.

    Args:
        vocab_size: ids from here on are padding of the model's output layer.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """See `Sampler.draw`."""
        logits = logits[:, : self.vocab_size]
        kept = [self._weigh(logits, draw) for draw in draws]
        wanted = [
            (i, row)
            for i, (draw, tokens) in enumerate(zip(draws, kept, strict=True))
            if draw.draft is not None and not tokens
            for row in range(len(draw.draft) + 1)
        ]
        rows = [draws[i].context(row) for i, row in wanted]
        places = [drawn_from(draws[i]).start + row for i, row in wanted]
        tokens, sound = select(logits, places, rows)
        drawn: dict[int, dict[int, int]] = defaultdict(dict)
        for (i, row), token in zip(wanted, tokens, strict=True):
            drawn[i][row] = token
        for i, own in drawn.items():
            kept[i] = _walk(draws[i], own)
        return [
            Drawn(said, all(sound[row] for row in deciding(draw, said)))
            for draw, said in zip(draws, kept, strict=True)
        ]

    def _weigh(self, logits: Tensor, draw: Draw) -> list[int]:
        if draw.draft is None or draw.proposal is None or draw.rule == "match":
            return []
        own = logits[drawn_from(draw)]
        return weigh_draft(draw, own)


def _walk(draw: Draw, tokens: Mapping[int, int]) -> list[int]:
    """What a text says that goes along its draft for as long as the draft says the same.

    Args:
        tokens: by row, of those that are drawn from.
    """
    said = [tokens[0]]
    while len(way := draw.way(said)) == len(said):
        said.append(tokens[way[-1] + 1])
    return said


def select(
    logits: Tensor, places: Sequence[int], rows: Sequence[SamplingRow]
) -> tuple[list[int], list[bool]]:
    """The tokens of some rows, read back together.

    Args:
        logits: [R, V], any floating type, without padding of the vocabulary; never changed.
        places: which rows of the logits.
        rows: what each of those asks for.

    Returns:
        A token for each place, and which of the R rows are sound: without NaN or +inf, and not
        -inf throughout.
    """
    if not len(logits):
        return [], []
    peaks, best = torch.max(logits, -1)
    harder = [i for i, row in enumerate(rows) if not row.params.greedy or adjusts(row)]
    found = [peaks.isfinite().long(), best]
    step = max(1, _AT_ONCE // logits.shape[1])
    for start in range(0, len(harder), step):
        part = harder[start : start + step]
        own = logits[[places[i] for i in part]].float()
        found.append(_winners(own, [rows[i] for i in part]))
    numbers = torch.cat(found).tolist()
    count = len(logits)
    tokens = [numbers[count + place] for place in places]
    for i, token in zip(harder, numbers[2 * count :], strict=True):
        tokens[i] = token
    return tokens, list(map(bool, numbers[:count]))


def _winners(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One token for each row, int64 [M]; `logits` [M, V] float32 are changed."""
    edits = Edits(rows, logits.shape[1])
    edits.apply(logits)
    logits = _repair(logits, edits)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if not drawn:
        return logits.argmax(-1)
    some = [rows[i] for i in drawn]
    keys = [noise_key(r.seed, r.choice, r.position, Purpose.TOKEN, r.step) for r in some]
    if len(drawn) == len(rows):
        return _race(_truncate(logits, some), keys)
    chosen = logits.argmax(-1)
    chosen[drawn] = _race(_truncate(logits[drawn], some), keys)
    return chosen


def _race(log_weights: Tensor, keys: Sequence[int]) -> Tensor:
    """See `engine.sampling.noise.race`."""
    noise = gumbel_rows(keys, log_weights.shape[1], log_weights.device)
    return noise.add_(log_weights).argmax(-1)


def _repair(logits: Tensor, edits: Edits) -> Tensor:
    """Makes every row drawable: see `engine.sampling.penalties.repair`."""
    broken = ~logits.amax(-1, keepdim=True).isfinite()
    mended = logits.nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    logits = torch.where(broken, mended, logits)
    empty = logits.amax(-1, keepdim=True) == -torch.inf
    return torch.where(empty, edits.anything(logits), logits)


def _truncate(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Scaled logits [M, V], -inf outside of the support: see `engine.sampling.truncation`."""

    def column(name: str) -> Tensor:
        values = [getattr(row.params, name) for row in rows]
        return torch.tensor(values, device=logits.device).unsqueeze(1)

    scaled = (logits / column("temperature").float()).clamp_(max=_LARGEST)
    tops = [row.params.top_k for row in rows]
    if any(0 < top < logits.shape[1] for top in tops):
        scaled = _top_k(scaled, column("top_k"))
    nucleus = any(row.params.top_p < 1.0 for row in rows)
    if not nucleus and all(row.params.min_p <= 0.0 for row in rows):
        return scaled
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp_()
    kept = weights >= column("min_p").float()
    if nucleus:
        kept &= _nucleus(weights, column("top_p").double())
    return scaled.masked_fill(~kept, -torch.inf)


def _top_k(scaled: Tensor, tops: Tensor) -> Tensor:
    """-inf below the k-th largest of each row [M, 1]; 0 or more than all = all."""
    size = scaled.shape[1]
    limited = (tops > 0) & (tops < size)
    wanted = torch.where(limited, tops, 1)
    largest = torch.topk(scaled, int(wanted.max()), -1).values
    least = largest.gather(1, wanted - 1).clamp_(min=-_LARGEST)
    return scaled.masked_fill(limited & (scaled < least), -torch.inf)


def _nucleus(weights: Tensor, share: Tensor) -> Tensor:
    """Which tokens are in: those before which less than `share` [M, 1] of all weight lies, the
    heaviest first, and the lowest id first among equals.

    The weight at the edge is found by halving the range of its bits, without sorting.
    """
    bits, mass = weights.view(torch.int32), weights.double()
    limit = share * mass.sum(-1, keepdim=True)

    def above(edge: Tensor) -> Tensor:
        return torch.where(bits > edge, mass, 0.0).sum(-1, keepdim=True)

    low = torch.zeros_like(share, dtype=torch.int32)
    high = torch.full_like(low, _ONE)
    for _ in range(30):
        middle = (low + high) // 2
        inside = above(middle) < limit
        low, high = torch.where(inside, low, middle + 1), torch.where(inside, middle, high)
    equal = bits == high
    before = above(high) + (equal.cumsum(-1) - 1) * high.view(torch.float32).double()
    return (bits > high) | (equal & (before < limit)) | (share >= 1.0)
