"""Tiny worlds of tokens and texts, and every way to speculate in them that may change no answer."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from engine.config import ModelConfig
from engine.draft.drafter import DraftProposal
from engine.grammar import Grammar
from engine.model.loader import LoadedModel, adopt_model
from engine.sequence import Sequence
from engine.types import FinishReason, Request
from server.text.codec import TextCodec
from server.text.description import GrammarSource
from tests.draft.plain_eagle import random_head
from tests.drafters import ScriptedDrafter, guess
from tests.fakes import Run, Setup, ask
from tests.lossless.catalogue import DESCRIPTIONS, Description
from tests.server.support import make_tokenizer
from tests.tiny_models import make_model


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece makes them: words begin with a mark, rare characters are bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        *'▁{}[]",:0123456789-.truefalsn',
        *"bcdghijkmopqvwxyz_",
        '"}',
        '",',
        '":',
        "▁a",
        '▁"',
    ]
    ids = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [('"', "}"), ('"', ","), ('"', ":"), ("▁", "a"), ("▁", '"')]
    backend = Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


class World:
    """A tokenizer, a model that knows its tokens, and what compiles grammars for both."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.codec = TextCodec(tokenizer)
        self.end = frozenset({tokenizer.eos_token_id})
        # A few ids more than there are tokens, as output layers often have.
        model = make_model("qwen3", vocab_size=len(tokenizer) + 6)
        loaded = adopt_model(model, ModelConfig("tiny"))
        self.setup = Setup(
            dataclasses.replace(loaded, eos_token_ids=self.end), page_size=4, num_pages=600
        )

    def grammar(self, kind: str, text: Any) -> Grammar:
        source = GrammarSource(
            kind, text if isinstance(text, str) else json.dumps(text), "response_format"
        )  # type: ignore[arg-type]
        return asyncio.run(self.codec.grammars.compile(source, self.end))

    def ids(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def text(self, tokens: Any) -> str:
        inner = [token for token in tokens if token not in self.end]
        return self.codec.decode(inner, skip_special_tokens=False)

    def bytes_of(self, tokens: Any) -> bytes:
        """What tokens stand for; nothing for end tokens."""
        inner = [token for token in tokens if token not in self.end]
        return b"".join(self.codec.token_bytes(token) for token in inner)

    @functools.cached_property
    def closing(self) -> dict[int, float]:
        """Biases towards what ends strings, lists and objects: a random model rarely would."""
        texts = {token: self.codec.token_text(token) for token in range(len(self.tokenizer))}
        biased = {t: 9.0 for t, text in texts.items() if text.strip() in ('"', "}", "]", '"}')}
        return biased | dict.fromkeys(self.end, 20.0)

    @functools.cached_property
    def other(self) -> LoadedModel:
        """A model that drafts, and knows nothing of the first."""
        model = make_model("llama", vocab_size=len(self.tokenizer) + 6)
        return adopt_model(model, ModelConfig("tiny"))

    @functools.cached_property
    def head(self) -> LoadedModel:
        """A head on the model that drafts half of its tokens."""
        same = make_model("qwen3", vocab_size=len(self.tokenizer) + 6).requires_grad_(False)
        return random_head(same, draft_vocab=len(self.tokenizer) // 2).loaded()


def characters_tokenizer() -> PreTrainedTokenizerFast:
    """Each byte is a token, so that every text has one spelling."""
    backend = Tokenizer(
        models.BPE({c: i for i, c in enumerate(["<eos>", *ByteLevel.alphabet()])}, [])
    )
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


_TOKENIZERS = {
    "bytes": make_tokenizer,
    "byte fallback": byte_fallback_tokenizer,
    "characters": characters_tokenizer,
}


@functools.cache
def world(name: str = "bytes") -> World:
    """The world of a tokenizer: byte-level BPE, SentencePiece with bytes, or bytes alone."""
    return World(_TOKENIZERS[name]())


# -- ways to speculate -------------------------------------------------------------------------

#: Each changes an engine that decodes plainly and always drafts as far as it may.
WAYS: tuple[str, ...] = (
    "grammar", "lookup", "lookup, trees", "past answers", "model", "own model", "model, trees",
    "eagle", "all, planned", "all, few pages", "random tokens", "small steps",
)  # fmt: skip


def way(made: World, name: str) -> dict[str, Any]:
    """What `make_engine` is told for one of `WAYS`."""
    model = {"drafter": "model", "draft": made.other}
    every = {"drafters": ("lookup", "model", "eagle"), "draft": made.other, "head": made.head}
    size = len(made.tokenizer)
    ways: dict[str, dict[str, Any]] = {
        "grammar": {"drafter": "grammar", "max_draft": 8},
        "lookup": {"drafter": "lookup"},
        "lookup, trees": {"drafter": "lookup", "max_nodes": 9},
        "past answers": {"drafter": "lookup", "store": 1 << 20},
        "model": model,
        "own model": {"drafter": "model", "draft": made.setup.loaded},
        "model, trees": {**model, "max_nodes": 9},
        "eagle": {"drafter": "eagle", "head": made.head},
        "all, planned": {**every, "mode": "auto", "max_nodes": 6},
        "all, few pages": {**every, "mode": "auto", "num_pages": 150},
        "random tokens": {"drafter": ScriptedDrafter(guess(1, size))},
        "small steps": {"drafter": "lookup", "max_batch_tokens": 17, "page_size": 1,
                        "num_pages": 900},
    }  # fmt: skip
    return ways[name]


# -- requests and what becomes of them ---------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A request, and the description that its answer must match; None for a neighbour."""

    request: Request
    description: Description | None


def case(made: World, number: int, sampled: bool, **sampling: Any) -> Case:
    """A request with one of `DESCRIPTIONS`, helped to come to an end.

    Args:
        sampled: with a seed; otherwise greedy.
    """
    described = DESCRIPTIONS[number]
    how = {"temperature": float(sampled), "seed": number, "logit_bias": made.closing, **sampling}
    prompt = made.ids("the fox said " + described.name[: number % 7])
    grammar = made.grammar(described.kind, described.text)
    name = f"{number}/{'sampled' if sampled else 'greedy'}"
    return Case(ask(name, prompt, 100, grammar=grammar, **how), described)


def neighbours(made: World, count: int) -> list[Case]:
    """Requests without a grammar, which share steps with the others."""
    return [
        Case(
            ask(f"neighbour {i}", made.ids("story of a fox"), 60, temperature=0.8 * (i % 2), seed=i,
                repetition_penalty=1.1, min_tokens=20, logprobs=1),
            None,
        )
        for i in range(count)
    ]  # fmt: skip


def broken(made: World, done: Run, cases: list[Case]) -> tuple[int, list[str]]:
    """How many answers with a grammar came to their end, and what is wrong with which."""
    count, wrong = 0, []
    for one in cases:
        if one.description is None:
            continue
        answer = done.answers[one.request.request_id]
        if answer.failed is not None:
            wrong.append(f"{one.description.name} failed: {answer.failed.error}")
        for choice in answer.choices.values():
            if choice.end is not None and choice.end.reason is FinishReason.STOP:
                text = made.text(choice.tokens)
                count += 1
                if not one.description.fits(text):
                    wrong.append(f"{text!r} is not of {one.description.name}")
    return count, wrong


def ended(made: World, done: Run, cases: list[Case]) -> int:
    """How many answers with a grammar came to their end.

    Raises:
        AssertionError: one of them is not what its description asks for.
    """
    count, wrong = broken(made, done, cases)
    assert not wrong, wrong
    return count


def drafts(run_: Run) -> Iterator[tuple[Sequence, list[int], DraftProposal, int]]:
    """Runs to the end, and yields whatever is going to be verified: a sequence, its output so
    far, the step's proposal and the sequence's place in it."""
    engine, found = run_.engine, []
    draft = engine._draft

    def noting(plan: Any, chosen: Any) -> DraftProposal:
        proposal = draft(plan, chosen)
        for i, sequence in enumerate(plan.sequences):
            if proposal.tokens[i]:
                found.append((sequence, list(sequence.output), proposal, i))
        return proposal

    engine._draft = noting  # type: ignore[method-assign]
    run_.finish()
    yield from found
