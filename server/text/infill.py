"""Filling in the middle: prompts of what precedes a gap and what follows it, as models learned
them, from token ids, so that no text can play a control token."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import InvalidRequest
from server.text.guard import Guard
from server.text.lanes import Lanes
from server.text.tokenizer import Tokenizer

#: Text that no other merges with.
_MARK = "☺"


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """One family's control tokens, and their order.

    Args:
        prefix: stands before what precedes the gap.
        suffix: stands before what follows it.
        middle: stands before what fills it; "" = nothing does.
        suffix_first: whether what follows the gap comes first.
        ends: tokens that end what fills it, besides the model's own.
    """

    prefix: str
    suffix: str
    middle: str
    suffix_first: bool = False
    ends: tuple[str, ...] = ()


#: The first whose tokens a tokenizer has is its own. Where several models share tokens and differ
#: in their order, it is the order of those that the tokens come from.
FORMATS = (
    InfillFormat(  # Qwen2.5-Coder and Qwen3-Coder, CodeGemma
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>",
              "<|endoftext|>"),
    ),
    InfillFormat(  # StarCoder and those after it: StableCode, Granite Code
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>",
        ends=("<fim_pad>", "<reponame>", "<repo_name>", "<filename>", "<file_sep>",
              "<|endoftext|>"),
    ),
    InfillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>",)),
    InfillFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),  # Code Llama
    InfillFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    InfillFormat("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
    InfillFormat(  # Seed-Coder
        "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True
    ),
)  # fmt: skip


class InfillWriter:
    """Writes prompts around gaps for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        lanes: who may use it next.

    Attributes:
        form: how its model learned to fill gaps; None = it did not.
    """

    def __init__(self, tokenizer: Tokenizer, lanes: Lanes) -> None:
        self._tokenizer, self._lanes = tokenizer, lanes
        added = tokenizer.added_tokens_decoder
        known = {str(entry.content): token for token, entry in added.items()}
        self._known = known
        self.form = next(filter(self._is_known, FORMATS), None)

    def _is_known(self, form: InfillFormat) -> bool:
        return {form.prefix, form.suffix, form.middle or form.prefix} <= self._known.keys()

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end what fills a gap, besides the model's own."""
        ends = () if self.form is None else self.form.ends
        return frozenset(self._known[text] for text in ends if text in self._known)

    async def prompts(
        self, ahead: Sequence[str | list[int]], behind: str, *, begin: bool
    ) -> list[list[int]]:
        """Prompts for gaps that different texts precede and the same text follows.

        Args:
            ahead: what precedes each, as text or as tokens.
            behind: what follows.
            begin: whether what the tokenizer puts at the beginning of a text is added.

        Raises:
            InvalidRequest: a text spells out a control token, and this kind of tokenizer cannot
                read it as text.
            Overloaded: too much waits for the tokenizer already.
        """
        texts = [text for text in ahead if isinstance(text, str)]

        def work() -> list[list[int]]:
            after = self._encode(behind, within=True)
            return [self._around(text, after, begin) for text in ahead]

        return await self._lanes.run(sum(map(len, texts)) + len(behind), work)

    def _around(self, ahead: str | list[int], behind: list[int], begin: bool) -> list[int]:
        form, known = self.form, self._known
        assert form is not None
        before = self._encode(ahead) if isinstance(ahead, str) else ahead
        parts = [[known[form.prefix], *before], [known[form.suffix], *behind]]
        if form.suffix_first:
            parts.reverse()
        first = self._tokenizer.encode("", add_special_tokens=True) if begin else []
        return [*first, *parts[0], *parts[1], *([known[form.middle]] if form.middle else [])]

    def _encode(self, text: str, *, within: bool = False) -> list[int]:
        """Tokens of a text in which control tokens that are spelled out are text.

        Args:
            within: it follows other text: no blank is put before its first word.
        """
        if not within or not self._puts_blanks:
            return self._inert(text)
        ahead, whole = self._inert(_MARK), self._inert(_MARK + text)
        glued = whole[: len(ahead)] != ahead
        return self._inert(text) if glued else whole[len(ahead) :]

    def _inert(self, text: str) -> list[int]:
        guard = self._guard
        if not guard.concerns(text):
            return self._tokenizer.encode(text, add_special_tokens=False)
        try:
            guarded = guard.guarded(guard.disguise(text))
            return guard.encode(guarded, add_special_tokens=False)
        except InvalidRequest:
            raise InvalidRequest(
                "The prompt or the suffix spells out a control token of the model, and this "
                "model's tokenizer cannot read it as text; leave it out.",
                "suffix",
            ) from None

    @functools.cached_property
    def _guard(self) -> Guard:
        """Knows what the tokenizer calls special, and the tokens around gaps."""
        form = self.form
        assert form is not None
        return Guard(self._tokenizer, " ".join((form.prefix, form.suffix, form.middle, *form.ends)))

    @functools.cached_property
    def _puts_blanks(self) -> bool:
        """Whether the tokenizer puts a blank before the first word of a text."""
        first = self._tokenizer.encode("a", add_special_tokens=False)[:1]
        pieces = (self._tokenizer.convert_ids_to_tokens(token) for token in first)
        return any((piece or "").startswith("▁") for piece in pieces)
