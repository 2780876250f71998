"""Where a step's rows lie: the layout and the packed batch agree on every one of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from engine.batch import build_batch
from engine.cache.pages import TARGET, PagePool
from engine.layout import lay_out
from engine.scheduler import ScheduledSequence, StepPlan
from engine.sequence import Sequence
from engine.types import Request, SamplingParams
from tests.fakes import FakeRunner, fake_features

PAGES, PAGE_SIZE = 64, 4


def make_sequence(pool: PagePool, dice: random.Random, wants: int | None, cached: int) -> Sequence:
    """One that the target has read up to `cached` tokens of."""
    prompt = tuple(dice.randrange(3, 90) for _ in range(dice.randint(cached + 1, cached + 12)))
    request = Request("r", prompt, SamplingParams(max_tokens=20, prompt_logprobs=wants))
    sequence = Sequence(request, 0, 0, 0, pool.new_table(""), "none", 4, len(prompt) + 20)
    assert pool.reserve(sequence.table, len(prompt) + 8)
    sequence.table.num_cached[TARGET] = cached
    if wants is not None:  # what earlier steps have found
        sequence.prompt_logprobs = [None] * (cached + 1)
    return sequence


def scheduled_at_random(
    pool: PagePool, dice: random.Random
) -> Iterator[tuple[ScheduledSequence, list[int]]]:
    for _ in range(dice.randint(1, 5)):
        wants = dice.choice((None, None, 0, 2))
        sequence = make_sequence(pool, dice, wants, dice.choice((0, 3, 8)))
        fed = dice.choice((1, sequence.num_uncached, dice.randint(1, sequence.num_uncached)))
        samples = fed == sequence.num_uncached
        draft = [dice.randrange(3, 90) for _ in range(dice.randint(0, 4))] if samples else []
        yield ScheduledSequence(sequence, fed, samples, 4), draft


@pytest.mark.parametrize("seed", range(40))
def test_layout_and_batch_agree(seed: int) -> None:
    pool, dice, runner = PagePool(PAGES, PAGE_SIZE), random.Random(seed), FakeRunner(PAGES, 4)
    parts, drafts = zip(*scheduled_at_random(pool, dice), strict=True)
    for part in parts:  # what is cached has been computed
        table = part.sequence.table
        for i in range(table.num_cached[TARGET]):
            slot = table.pages[i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE
            runner._tokens[slot] = part.sequence.tokens[i]
    layout = lay_out(StepPlan(parts, 0, 0, 0), drafts, ["lookup"] * len(parts))
    batch = build_batch(layout.spans(), PAGE_SIZE, PAGES, min_rows=1)
    passed = runner.forward(batch, (1,))
    assert (layout.num_rows, layout.num_logits) == (batch.input_ids.numel(), batch.num_logits)
    assert [rows.sequence for rows in layout.sequences] == [part.sequence for part in parts]
    seen = 0
    for i, rows in enumerate(layout.sequences):
        tokens = rows.sequence.tokens
        assert rows.first_row == rows.rows.start == int(batch.query_starts[i])
        assert rows.rows.stop == int(batch.query_starts[i + 1])
        assert rows.position == int(batch.positions[rows.first_row])
        assert (rows.num_fed, rows.num_drafts) == (parts[i].num_feed, len(drafts[i]))
        text = tokens[: rows.position + rows.num_fed] + list(rows.draft)
        for row in rows.rows:  # features are cut by sequence with nothing but the layout
            prefix = text[: rows.position + row - rows.first_row + 1]
            assert passed.features[1][row].tolist() == fake_features(1, prefix).tolist()
        assert rows.first_logit == rows.logit_rows.start == seen
        seen += rows.num_logits
        own = [int(batch.logit_rows[logit]) for logit in rows.logit_rows]
        assert own == list(rows.rows)[rows.rows.stop - rows.rows.start - rows.num_logits :]
        check_prompt_rows(rows.num_prompt_logprobs, parts[i], own)
        if parts[i].samples:
            assert rows.num_logits >= 1 + rows.num_drafts
    assert seen == layout.num_logits


def check_prompt_rows(count: int, part: ScheduledSequence, own: list[int]) -> None:
    """The first `count` rows of logits predict the prompt's next tokens."""
    sequence = part.sequence
    if sequence.request.sampling.prompt_logprobs is None or count == 0:
        assert count == 0 or sequence.wants_prompt_logprobs
        return
    start = sequence.table.num_cached[TARGET]
    assert count <= len(own)
    assert start + count <= sequence.prompt_length - 1
    assert start + count in (sequence.prompt_length - 1, start + part.num_feed)


def test_a_layout_outlives_the_commit() -> None:
    """Whoever reads it afterwards finds the rows as they were."""
    pool = PagePool(PAGES, PAGE_SIZE)
    sequence = make_sequence(pool, random.Random(1), None, 3)
    part = ScheduledSequence(sequence, sequence.num_uncached, True, 2)
    layout = lay_out(StepPlan((part,), 0, 0, 0), [[5, 6]], ["lookup"])
    before = layout.sequences[0].position, layout.sequences[0].rows, layout.num_logits
    sequence.append([5, 9])
    sequence.table.num_cached[TARGET] = len(sequence.tokens) - 1
    assert (layout.sequences[0].position, layout.sequences[0].rows, layout.num_logits) == before
