"""Which sequences get how many draft tokens, so that the step yields the most tokens a second.

All draft tokens that could be checked, of all sequences, stand in one queue, the likeliest to
be kept first. Since a token is never likelier than the one before it, every front part of the
queue gives each sequence the beginning of its draft. Each front part is priced with the
measured costs, which rise in steps, and the best one wins. This is exact for independent
outcomes. Where the rounds of a draft model cost, there are several queues, each up to some number
of rounds, and what is left is below a per cent. Nothing depends on the tokens themselves, so
every verification rule stays lossless.

Where several drafters may guess for a sequence, there are several such queues: one for each
drafter alone, and one with the drafter for each sequence that gains most by itself. The best
front part of all of them wins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.control.candidates import Candidates, Queue
from engine.control.latency import CostModel, Load
from engine.control.means import Floats, Ints


@dataclass(frozen=True, slots=True)
class Allocation:
    """The best draft lengths, and why.

    Attributes:
        drafters: names that were considered for it.
        lengths: [R], above 0 in at most one line of each sequence.
        tokens: expected tokens of the step.
        seconds: expected seconds of the step.
        plain_seconds: of the same step without drafts.
        token_seconds: what a token is worth: seconds of pure decoding, at its best, for one.
        saved_seconds: expected gain over no drafts at all.
        chance: that any draft token is offered at all.
    """

    drafters: tuple[str, ...]
    lengths: Ints
    tokens: float
    seconds: float
    plain_seconds: float
    token_seconds: float
    saved_seconds: float
    chance: float

    @property
    def gain(self) -> float:
        """Expected saving as a share of the step without drafts."""
        return self.saved_seconds / self.plain_seconds


@dataclass(frozen=True, slots=True)
class Margins:
    """What one more draft token of each sequence would bring, in seconds.

    Attributes:
        brings: [R] expected worth of the token.
        price: [R] expected time it takes, whether it is accepted or not.
        joint: [R] the same where another sequence's token has its drafter called anyway.
        promise: [R] what there is to gain if all that is offered were surely accepted: by this
            token, or by longer drafts of everybody, who share calls and rounds. Where this is
            not positive, trying teaches nothing of use. Beyond the limit it is -inf.
        drafters: [R] names.
        token_seconds: what a token is worth.
    """

    brings: list[float]
    price: list[float]
    joint: list[float]
    promise: list[float]
    drafters: list[str]
    token_seconds: float


def allocate(
    rows: Candidates,
    decode: Load,
    whole: Load,
    costs: CostModel,
    like: Allocation | None = None,
) -> Allocation:
    """Chooses draft lengths, and the drafter of each sequence.

    Args:
        rows: what could be drafted.
        decode: the step's emitting sequences alone.
        whole: with the prefill that shares the pass. Its cost is paid either way, so a token
            is worth what it takes in pure decoding, and only what drafts add is weighed.
        costs: of this machine.
        like: an allocation for the same sequences shortly before. Only the drafters that it
            took are considered then, which saves pricing the others.
    """
    names = tuple(sorted(set(rows.drafters)))
    if like is not None and set(like.drafters) <= set(names):
        own = _one_line_each(rows, like.drafters, decode, costs, like.token_seconds)
        priced = [_price(rows, own, decode, whole, costs)]
    else:
        priced = [_price(rows, rows.of(name), decode, whole, costs) for name in names]
        if len(names) > 1:
            worth = min(p.token_seconds for p in priced)
            own = _one_line_each(rows, names, decode, costs, worth)
            priced.append(_price(rows, own, decode, whole, costs))
    token_seconds = min(p.token_seconds for p in priced)
    scores = [p.tokens * token_seconds - p.together for p in priced]
    number = max(range(len(scores)), key=lambda n: float(scores[n].max()))
    score, chosen = scores[number], priced[number]
    best = queue, first = divmod(int(score.argmax()), score.shape[1])
    lengths = np.zeros(len(rows.limits), dtype=np.int64)
    lengths[chosen.lines] = chosen.queue.lengths(queue, first)
    return Allocation(
        drafters=tuple(sorted({rows.drafters[line] for line in chosen.lines})),
        lengths=lengths,
        tokens=float(chosen.tokens[best]),
        seconds=float(chosen.together[best]),
        plain_seconds=float(chosen.together[0, 0]),
        token_seconds=token_seconds,
        saved_seconds=float(score[best] - score[0, 0]),
        chance=float(chosen.queue.chances[best]),
    )


@dataclass(frozen=True, slots=True)
class _Priced:
    """The queues of some lines, with expected tokens and seconds of every front part: [C, F]."""

    lines: Ints
    queue: Queue
    tokens: Floats
    alone: Floats  # seconds without the prefill
    together: Floats

    @property
    def token_seconds(self) -> float:
        """Of a token at its cheapest."""
        return float((self.alone / self.tokens).min())


def _price(rows: Candidates, lines: Ints, decode: Load, whole: Load, costs: CostModel) -> _Priced:
    own = rows if len(lines) == len(rows.limits) else rows.take(lines)
    queue = Queue(own, costs, decode)
    aside = costs.overhead(decode.batch) + queue.draft_seconds(costs)
    alone = aside + queue.pass_seconds(costs, decode)
    together = alone if whole == decode else aside + queue.pass_seconds(costs, whole)
    return _Priced(lines, queue, decode.batch + queue.gains, alone, together)


def _one_line_each(
    rows: Candidates, names: tuple[str, ...], load: Load, costs: CostModel, token_seconds: float
) -> Ints:
    """One line of each sequence: of these drafters the one that gains most if all lines of a
    drafter share its calls and rounds."""
    if len(names) == 1:
        return rows.of(names[0])
    depth = rows.acceptance.shape[1]
    table = costs.target.table(load, load.batch)
    depths = np.arange(1.0, depth + 1.0)
    net = (rows.acceptance.cumprod(axis=1) * rows.offers).cumsum(axis=1) * token_seconds
    net -= rows.offers.cumsum(axis=1) * ((table[-1] - table[0]) / load.batch)
    for name in names:
        own, draft = rows.of(name), costs.draft(name)
        sharing = np.full(depth, float(len(own)))
        net[own] -= draft.seconds(np.stack((sharing, depths, sharing * depths))) / len(own)
        if rows.backlog is not None:
            net[own] -= draft.read_seconds * rows.backlog[own, None]
    net[depths > rows.limits[:, None]] = -np.inf
    best, owners = net.max(axis=1), rows.sequences
    best[~np.isin(rows.drafters, names)] = -np.inf
    order = np.lexsort((-best, owners))
    return np.sort(order[np.diff(owners[order], prepend=-1) > 0])


def margins(
    rows: Candidates, lengths: Ints, load: Load, costs: CostModel, token_seconds: float
) -> Margins:
    """Prices one more draft token for every sequence.

    Args:
        lengths: [R] that are planned, at most the limits.
        load: of the pass without drafts.
        token_seconds: see `Allocation`.
    """
    survival = np.cumprod(rows.acceptance, axis=1)
    every, index = np.arange(len(lengths)), np.minimum(lengths, rows.limits - 1)
    kept, offer = survival[every, index], rows.offers[every, index]
    before = np.where(lengths > 0, survival[every, np.maximum(index - 1, 0)], 1.0)
    checked = offer * _next_pass_seconds(costs, load, int(lengths.sum()))
    alone, joint = _next_draft_seconds(costs, rows, lengths)
    promise = offer * before * token_seconds - checked - alone
    if ((promise <= 0.0) & (lengths == 0)).any():
        best = _best_case(costs, rows, load, token_seconds)
        promise = np.where(lengths > 0, promise, np.maximum(promise, best))
    return Margins(
        brings=(offer * kept * token_seconds).tolist(),
        price=(checked + alone).tolist(),
        joint=(checked + joint).tolist(),
        promise=np.where(lengths < rows.limits, promise, -np.inf).tolist(),
        drafters=rows.drafters,
        token_seconds=token_seconds,
    )


def _next_pass_seconds(costs: CostModel, load: Load, level: int) -> float:
    """What one more query token adds to the pass. Just before a step in the costs that is
    the step, and elsewhere at least the average of the next few tokens."""
    table = costs.target.table(load, level + 4)[level:]
    return float(max(table[1] - table[0], (table[4] - table[0]) / 4))


def _next_draft_seconds(costs: CostModel, rows: Candidates, lengths: Ints) -> tuple[Floats, Floats]:
    """[R] what one more draft token of each sequence adds to drafting; and what it adds where
    another sequence drafts its first token in the same step."""
    alone, joint = np.zeros(len(lengths)), np.zeros(len(lengths))
    for name in set(rows.drafters):
        own = np.array([drafter == name for drafter in rows.drafters])
        drafting, mine = lengths[own & (lengths > 0)], lengths[own]
        base = np.array([len(drafting), int(drafting.max(initial=0)), int(drafting.sum())])
        beside = np.array([base[0] + 1, max(base[1], 1), base[2] + 1])
        for result, (sequences, rounds, tokens) in ((alone, base), (joint, beside)):
            counts = np.empty((3, len(mine) + 1))
            counts[:, -1] = sequences, rounds, tokens
            counts[0, :-1] = sequences + (mine == 0)
            counts[1, :-1] = np.maximum(mine + 1, rounds)
            counts[2, :-1] = tokens + 1
            seconds = costs.draft(name).seconds(counts)
            result[own] = np.maximum(seconds[:-1] - seconds[-1], 0.0)
    return alone, np.minimum(alone, joint)


def _best_case(costs: CostModel, rows: Candidates, load: Load, token_seconds: float) -> Floats:
    """[R] what each sequence could gain if all of them drafted with the same drafter, to the best
    length, and everything that is offered were accepted. One sequence alone may never pay for
    the rounds of a draft model that many can share."""
    result = np.empty(len(rows.limits))
    depth = rows.acceptance.shape[1]
    depths = np.arange(1, depth + 1)
    for name in set(rows.drafters):
        own = rows.of(name)
        count = len(own)
        levels = count * depths
        table = costs.target.table(load, int(levels[-1]))
        sharing = np.full(depth, float(count))
        drafting = costs.draft(name).seconds(np.stack((sharing, 1.0 * depths, 1.0 * levels)))
        each = (table[levels] - table[0] + drafting) / count
        offered = rows.offers[own].cumsum(axis=1)
        gain = offered * token_seconds - offered / depths * each
        gain[depths > rows.limits[own, None]] = -np.inf
        result[own] = gain.max(axis=1)
    return result
