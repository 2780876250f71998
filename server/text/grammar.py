"""Grammars for the engine, compiled by llguidance from JSON schemas and other descriptions.

A description is input like any other: its size, its depth and the work it may cause are bounded,
it is compiled in a thread of its own, and what does not compile is refused with the reason.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.errors import InvalidRequest, Overloaded
from engine.grammar import Grammar, Matcher
from server.text.description import (
    GrammarSource,
    Refused,
    check_size,
    children,
    definition,
    sentence,
)
from server.text.tokenizer import Tokenizer

#: Descriptions that may wait to be compiled, and compiled ones that are kept.
_MOST_WAITING = 32
_MOST_KEPT = 64

#: In the library's units: some 20 ms to compile, 4 ms and 2 ms in a step, 50 MB of states.
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 60_000,
    "step_max_items": 50_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}

#: Schemas that are compiled to find the one at fault.
_MOST_TRIED = 50


class GrammarCompiler:
    """Compiles grammars for one tokenizer, keeps the latest, and never holds up its caller.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], Future[CompiledGrammar]] = OrderedDict()

    async def compile(self, source: GrammarSource, end_tokens: frozenset[int]) -> Grammar:
        """A grammar, once it is compiled; requests with the same description share it.

        Args:
            source: its description.
            end_tokens: tokens that end a text.

        Raises:
            InvalidRequest: it is too large, or cannot be compiled; the message says where.
            Overloaded: too many wait to be compiled.
        """
        check_size(source)
        if not end_tokens:
            raise InvalidRequest(
                "This model has no end token, so no answer could end where its grammar does.",
                source.param,
            )
        key = (source.kind, source.text, end_tokens)
        with self._lock:
            future = self._kept.get(key)
            if future is None or (future.done() and not _serves(future)):
                waiting = sum(not other.done() for other in self._kept.values())
                if waiting >= _MOST_WAITING:
                    raise Overloaded(f"{waiting} grammars wait to be compiled already.")
                future = self._kept[key] = self._thread.submit(self._compile, source, end_tokens)
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except Refused as refused:
            where = f"{source.param}.{refused.where}" if refused.where else source.param
            raise InvalidRequest(
                f"{where} cannot be compiled: {refused}. Simplify it, or leave it out.",
                source.param,
            ) from None

    # -- in the thread -------------------------------------------------------------------

    def _compile(self, source: GrammarSource, end_tokens: frozenset[int]) -> CompiledGrammar:
        """Raises `Refused` if it does not compile."""
        native = self._native(end_tokens)
        try:
            return CompiledGrammar(_prototype(native, definition(source)), end_tokens)
        except Refused as refused:
            where = self._find(source, end_tokens) if source.kind == "json" else ""
            raise Refused(str(refused), where) from None

    @functools.lru_cache(maxsize=2)  # noqa: B019 (lives as long as the server)
    def _native(self, end_tokens: frozenset[int]) -> Any:
        """The library's own tokenizer; takes a second to make."""
        from llguidance.hf import from_tokenizer
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise Refused("this model's tokenizer is of a kind that grammars are not known for")
        return from_tokenizer(self._tokenizer, eos_token=sorted(end_tokens))

    def _find(self, source: GrammarSource, end_tokens: frozenset[int]) -> str:
        """Where in a schema the innermost one lies that does not compile by itself."""
        native, tried = self._native(end_tokens), 0
        root = node = json.loads(source.text)
        path: list[str] = []
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        while True:
            for name, child in children(node):
                tried += 1
                if tried > _MOST_TRIED:
                    return ".".join(path)
                text = json.dumps({**shared, **child})
                try:
                    _prototype(native, definition(GrammarSource("json", text, "")))
                except Refused:
                    path.append(name)
                    node = child
                    break
            else:
                return ".".join(path)


class CompiledGrammar:
    """See `engine.grammar.Grammar`.

    Args:
        prototype: a matcher of the library's before its first token, never advanced.
        end_tokens: tokens that end a text.

    Attributes:
        worn: whether a matcher of it ran into the library's limits, which may have filled up in
            the course of many requests; it is compiled anew for the next.
    """

    def __init__(self, prototype: Any, end_tokens: frozenset[int]) -> None:
        self._prototype = prototype
        self._end_tokens = end_tokens
        self.worn = False

    @property
    def end_tokens(self) -> frozenset[int]:
        """See `Grammar.end_tokens`."""
        return self._end_tokens

    def start(self) -> Matcher:
        """See `Grammar.start`."""
        return _Matcher(self, self._prototype.deep_copy())


class _Matcher:
    """See `engine.grammar.Matcher`."""

    def __init__(self, grammar: CompiledGrammar, native: Any) -> None:
        self._grammar = grammar
        self._native = native

    def advance(self, tokens: Sequence[int]) -> int:
        return int(self._native.try_consume_tokens(list(tokens)))

    def rewind(self, count: int) -> None:
        if count:
            self._native.rollback(count)

    def allowed(self) -> bytes:
        return bytes(self._native.compute_bitmask())

    def forced(self) -> list[int]:
        ends = self._grammar.end_tokens
        return [token for token in self._native.compute_ff_tokens() if token not in ends]

    @property
    def may_end(self) -> bool:
        return bool(self._native.is_accepting())

    @property
    def failure(self) -> str | None:
        reason = _failure(self._native)
        if reason is not None:
            self._grammar.worn = True
            return f"The grammar of this request cannot be followed any further: {reason}."
        return None


def _serves(future: Future[CompiledGrammar]) -> bool:
    """Whether a compilation that is over is good for further requests; a refusal is."""
    error = future.exception()
    return not future.result().worn if error is None else isinstance(error, Refused)


def _prototype(native: Any, text: str) -> Any:
    """A matcher before its first token, which can take one; its first mask, which is the slowest,
    has been computed."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(native, text, log_level=0, limits=LLParserLimits(**_LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
    if (reason := _failure(matcher)) is not None:
        raise Refused(reason)
    return matcher


def _failure(native: Any) -> str | None:
    if native.is_error():
        return sentence(native.get_error())
    if native.is_stopped() and not native.is_accepting():
        return "no token can follow"
    return None
