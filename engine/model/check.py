"""The first load of a model: does our runner say what transformers' own forward says?

The plain module, with transformers' own attention and without a cache, reads three texts, each
alone and whole. Our runner reads the same texts in one schedule of packed passes that has all
that serving has: chunks, neighbours that are shorter and longer, one token at a time, drafts
that are refused and fed anew, texts begun anew. One of them goes beyond every window and border
of the model, if time and memory allow. Each row must be the plain one but for rounding.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from engine.batch import Span, build_batch
from engine.cache.pages import PRIVATE, PagePool, PageTable
from engine.errors import ModelNotSupported
from engine.model.inventory import in_blocks
from engine.model.lessons import Part, rows_of, schedule
from engine.model.passes import Runner
from engine.model.probe import packed_rows_of
from engine.model.quantized import QuantizedWeight
from engine.model.runner import ATTENTION
from engine.model.weights import in_a_line, name_bad_tensor
from engine.model.widen import in_float32

logger = logging.getLogger(__name__)

#: Tokens of the texts: two short ones, and a long one where there is no border to cross.
_SHORT = (21, 10)
_LONG = 44
_BEYOND = 24  # tokens of the long text behind the last border
_PAGE_SIZE = 16

#: Seconds that the long text may take; where it would take more, borders are not reached.
_SECONDS = 20.0
#: Most elements of a layer's attention scores that transformers' eager attention may hold.
_MOST_SCORES = 2**26

#: Largest distance of two rows of logits, relative to their spread, that rounding explains.
_ROUNDING = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.4, torch.int8: 0.4}
#: The same where rows are rounded, by groups, before they are multiplied with blocks: to sixteen
#: bits (0.003 was the worst of 563 rows of real text, at a mean KL of 8e-8), or to eight.
_ROUNDED = {"int16": 0.01, "int8": 0.4}
#: Share of rows that may be further apart if the model chooses among experts: where two score
#: alike, rounding decides which of them speaks.
_TURNED = 1 / 8


@dataclass(frozen=True, slots=True)
class Expected:
    """What transformers says, and what our runner is to be fed.

    Attributes:
        texts: token ids.
        passes: of our runner.
        rows: by text and position, logits [V] in float32.
        beyond: borders that the long text crosses.
        unreached: borders that it does not.
        experts: whether the model chooses among experts.
        name: of the model's class.
    """

    texts: list[list[int]]
    passes: list[list[Part]]
    rows: dict[tuple[int, int], torch.Tensor]
    beyond: list[int] = field(default_factory=list)
    unreached: list[int] = field(default_factory=list)
    experts: bool = False
    name: str = ""


@torch.inference_mode()
def expect(
    model: PreTrainedModel,
    borders: Seq[int],
    longest: int,
    seconds: float = _SECONDS,
) -> Expected:
    """Runs transformers' own forward.

    Args:
        model: untouched; its attention is `ATTENTION` again afterwards.
        borders: numbers of tokens beyond which something changes, such as windows.
        longest: most tokens of a sequence.
        seconds: the long text may take.

    Raises:
        ModelNotSupported: it does not run, or computes no numbers.
    """
    borders = sorted(border for border in set(borders) if 0 < border < longest)
    known = _sound_tokens(model)
    plain = _Plain(model)
    try:
        with in_float32(model):
            short = [_text(known, min(length, longest), i) for i, length in enumerate(_SHORT)]
            rows: dict[tuple[int, int], torch.Tensor] = {}
            for i, text in enumerate(short):
                rows |= {(i, j): r for j, r in enumerate(plain.logits(text, range(len(text))))}
            pace = plain.per_token()
            beyond = [b for b in borders if plain.can_read(b + _BEYOND, pace, seconds)]
            length = min(longest, max([_LONG, *(b + _BEYOND for b in beyond)]))
            texts = [*short, _text(known, length, 2)]
            passes = schedule([len(text) for text in texts], beyond)
            wanted = sorted({row for parts in passes for row in rows_of(parts, 2)})
            long = plain.logits(texts[2], wanted)
            rows |= {(2, j): row for j, row in zip(wanted, long, strict=True)}
    finally:
        model.set_attn_implementation(ATTENTION)
    unreached = [border for border in borders if border not in beyond]
    name = type(model).__name__
    return Expected(texts, passes, rows, beyond, unreached, _has_experts(model), name)


def compare(
    expected: Expected, runner: Runner, pool: PagePool, *, rounded: str | None = None
) -> str:
    """Feeds our runner and compares.

    Args:
        expected: of the same model.
        runner: ours.
        pool: of `make_pool`.
        rounded: what rows are rounded to where they are multiplied with blocks: see
            `ModelConfig.activations`. None = there are no blocks.

    Returns:
        What was found, in words.

    Raises:
        ModelNotSupported: rows differ by more than rounding; says where.
    """
    feeder = _Feeder(expected, runner, pool)
    feeder.run()
    limit = max(_ROUNDING[runner.store.shape.dtype], _ROUNDED[rounded] if rounded else 0.0)
    far = [one for one in feeder.found if not one[0] <= limit]
    worst = max((one[0] for one in feeder.found), key=lambda value: (math.isnan(value), value))
    bearable = _TURNED if expected.experts else 0
    for i in range(len(expected.texts)):  # each for itself: a border concerns the long one only
        rows, wrong = (sum(one[1] == i for one in several) for several in (feeder.found, far))
        if wrong <= bearable * rows:
            continue
        raise ModelNotSupported(
            f"{expected.name} would be served wrong: its logits differ from transformers' own "
            f"forward in {len(far)} of {len(feeder.found)} rows, by up to {worst:.2g} of their "
            f"spread (rounding explains {limit:g}), first at position {far[0][2]} of a text of "
            f"{len(expected.texts[far[0][1]])} tokens."
        )
    crossed = f", beyond {_listed(expected.beyond)} tokens" if expected.beyond else ""
    missed = f"; {_listed(expected.unreached)} tokens not reached" if expected.unreached else ""
    return (
        f"{len(feeder.found)} rows equal transformers' own forward but for {worst:.1g} of their "
        f"spread (chunked, batched, fed anew{crossed}{missed})"
    )


def make_pool(expected: Expected) -> PagePool:
    """A pool with room for all texts."""
    return PagePool(sum(-(-len(text) // _PAGE_SIZE) for text in expected.texts), _PAGE_SIZE)


class _Plain:
    """transformers' own forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._heads = getattr(model.config.get_text_config(), "num_attention_heads", 1)
        self._took: list[tuple[int, float]] = []  # tokens of each text, and its seconds

    def per_token(self) -> float:
        """Seconds of a token, as far as the last two texts tell. What is in blocks is unpacked once
        a text, however long it is: only what the longer of them took more counts there."""
        (longer, most), (tokens, seconds) = self._took[-2:]
        if longer > tokens and in_blocks(self._model):
            return max((most - seconds) / (longer - tokens), 0.1 * seconds / tokens)
        return seconds / tokens

    def can_read(self, length: int, per_token: float, seconds: float) -> bool:
        """Whether a text of so many tokens takes bearable time and memory, there and here."""
        eager = self._heads * length**2 <= _MOST_SCORES
        return 3 * length * per_token <= seconds and (eager or bool(self._model._supports_sdpa))

    def logits(self, tokens: list[int], rows: Seq[int]) -> torch.Tensor:
        """[len(rows), V] in float32."""
        model = self._model
        eager = self._heads * len(tokens) ** 2 <= _MOST_SCORES
        model.set_attn_implementation("eager" if eager else "sdpa")
        ids = torch.tensor([tokens], device=model.device)
        keep = torch.tensor(list(rows), device=model.device)
        began = time.monotonic()
        try:
            out: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0]
        except Exception as error:
            logger.debug("the plain forward failed", exc_info=True)
            raise ModelNotSupported(
                f"transformers' own forward of {type(model).__name__} fails: {in_a_line(error)}"
            ) from error
        if not bool(torch.isfinite(out).all()):
            raise ModelNotSupported(_not_numbers(model))
        self._took.append((len(tokens), time.monotonic() - began))
        return out.float().cpu()


class _Feeder:
    """Runs the passes; collects how far every row is from what is expected.

    Attributes:
        found: (distance, text, position) of every row.
    """

    def __init__(self, expected: Expected, runner: Runner, pool: PagePool) -> None:
        self._expected, self._runner, self._pool = expected, runner, pool
        self._tables: list[PageTable] = []
        self.found: list[tuple[float, int, int]] = []

    def run(self) -> None:
        """All passes, one after the other."""
        self._tables = [self._pool.new_table(PRIVATE) for _ in self._expected.texts]
        for table, text in zip(self._tables, self._expected.texts, strict=True):
            self._pool.reserve(table, len(text))
        for parts in self._expected.passes:
            self._pass(parts)
        for table in self._tables:
            self._pool.free(table)

    def _pass(self, parts: Seq[Part]) -> None:
        spans = []
        for part in parts:
            text = self._expected.texts[part.text]
            committed = text[part.start : part.start + part.count]
            wrong = text[::-1][: part.refused]
            table = self._tables[part.text]
            spans.append(Span(committed + wrong, part.start, table, part.wanted + part.refused))
        runner, pool = self._runner, self._pool
        batch = build_batch(spans, pool.page_size, pool.num_pages, runner.device, runner.min_rows)
        with packed_rows_of(self._expected.name):
            out, first = runner.forward(batch).logits.float().cpu(), 0
        for part in parts:
            for offset, row in enumerate(rows_of([part], part.text)):
                wanted = self._expected.rows[part.text, row]
                distance = _distance(out[first + offset], wanted)
                self.found.append((distance, part.text, row))
            first += part.wanted + part.refused


def _distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far apart two rows of logits [V] are, relative to the spread of the second."""
    spread = (wanted - wanted.mean()).norm().clamp_min(1e-30)
    return float((found - wanted).norm() / spread)


def _sound_tokens(model: PreTrainedModel) -> list[int]:
    """Ids to make texts of: those whose embeddings are numbers, and that stand for words."""
    text = model.config.get_text_config()
    table = model.get_input_embeddings().weight
    if isinstance(table, QuantizedWeight):
        table = table.dequantize()
    table = table[: text.vocab_size]
    sound = torch.isfinite(table).all(dim=-1)
    for config in (model.config, text):
        for name, value in vars(config).items():
            if (
                name.endswith(("token_id", "token_index"))
                and isinstance(value, int)
                and 0 <= value < len(sound)
            ):
                sound[value] = False
    ids: list[int] = sound.nonzero()[:, 0].tolist()
    if not ids:
        raise ModelNotSupported(_not_numbers(model))
    return ids


def _text(known: Seq[int], length: int, seed: int) -> list[int]:
    dice = torch.Generator().manual_seed(seed)
    return [known[i] for i in torch.randint(len(known), (length,), generator=dice).tolist()]


def _not_numbers(model: PreTrainedModel) -> str:
    kind = str(model.dtype).removeprefix("torch.")
    if (name := name_bad_tensor(model)) is not None:
        return f"the weights hold values in {name} that are not finite numbers; fetch them again."
    return f"{type(model).__name__} computes no finite numbers in {kind}; try another dtype."


def _has_experts(model: PreTrainedModel) -> bool:
    return any("expert" in name for name, _ in model.named_modules())


def _listed(numbers: Seq[int]) -> str:
    return ", ".join(map(str, numbers))
