"""Grammars for the engine, compiled by llguidance from JSON schemas and other descriptions.

A description is input like any other: its size, its depth and the work it may cause are bounded,
it is compiled in threads of their own and only after a probe has, and what does not compile is
refused with the reason.
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from engine.errors import InvalidRequest, Overloaded
from engine.grammar import Grammar, Matcher
from server.text.compile import compiled, failure, native_tokenizer
from server.text.description import GrammarSource, Refused, check_size
from server.text.probe import probe_for
from server.text.tokenizer import Tokenizer

T = TypeVar("T")

#: Descriptions that may wait to be compiled, compiled ones that are kept, and compiled at once: a
#: slow one holds up no others unless there are as many of its kind.
_MOST_WAITING = 32
_MOST_KEPT = 64
_AT_ONCE = 4
#: Bytes of all that are kept together; of one, what compiling it took, and what its states may come
#: to while answers run.
_MOST_BYTES = 1 << 30
_STATES_BYTES = 16 << 20

#: What a matcher may take of the engine's thread, in seconds of computing: for each thing that it
#: is asked, saved up from the beginning, and on top. The library's limits keep honest grammars
#: far below; what is not bounded by them, such as a forced text of 100,000 letters, fails here.
_SECONDS_EACH = 0.002
_SECONDS_MORE = 0.25


class GrammarCompiler:
    """Compiles grammars for one tokenizer, keeps the latest, and never holds up its caller.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], Future[CompiledGrammar]] = OrderedDict()
        self._making = threading.Lock()
        self._serialized = ""
        self._natives: dict[frozenset[int], Any] = {}  # as many as a model has sets of end tokens

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
                future = self._kept[key] = self._threads.submit(self._compile, source, end_tokens)
            self._kept.move_to_end(key)
            self._forget()
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except Refused as refused:
            where = f"{source.param}.{refused.where}" if refused.where else source.param
            raise InvalidRequest(
                f"{where} cannot be compiled: {refused}. Simplify it, or leave it out.",
                source.param,
            ) from None

    def _forget(self) -> None:
        """Forgets what no longer serves, and the oldest while they are too many or too large."""
        for key in [k for k, f in self._kept.items() if f.done() and not _serves(f)]:
            del self._kept[key]
        while len(self._kept) > _MOST_KEPT or sum(map(_size, self._kept.values())) > _MOST_BYTES:
            self._kept.popitem(last=False)

    # -- in the threads ------------------------------------------------------------------

    def _compile(self, source: GrammarSource, end_tokens: frozenset[int]) -> CompiledGrammar:
        """Raises `Refused` if it does not compile."""
        serialized = self._serialize()
        probe = probe_for(serialized, end_tokens)  # makes its tokenizer while this one is made
        with self._making:
            if end_tokens not in self._natives:
                self._natives[end_tokens] = native_tokenizer(serialized, end_tokens)
            native = self._natives[end_tokens]
        found = probe.compile(source)
        size = found.bytes + _STATES_BYTES
        return CompiledGrammar(compiled(native, found.definition), end_tokens, size)

    def _serialize(self) -> str:
        """The tokenizer as the library reads it, made once."""
        from transformers import PreTrainedTokenizerFast

        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise Refused("this model's tokenizer is of a kind that grammars are not known for")
        with self._making:
            if not self._serialized:
                backend = copy.copy(self._tokenizer.backend_tokenizer)
                backend.no_padding()
                backend.no_truncation()
                self._serialized = backend.to_str()
            return self._serialized


class CompiledGrammar:
    """See `engine.grammar.Grammar`.

    Args:
        prototype: a matcher of the library's before its first token, never advanced.
        end_tokens: tokens that end a text.
        size: bytes that it may take.

    Attributes:
        worn: whether a matcher of it ran into the library's limits, which may have filled up in
            the course of many requests; it is compiled anew for the next.
    """

    def __init__(self, prototype: Any, end_tokens: frozenset[int], size: int) -> None:
        self._prototype = prototype
        self._end_tokens = end_tokens
        self.size = size
        self.worn = False

    @property
    def end_tokens(self) -> frozenset[int]:
        """See `Grammar.end_tokens`."""
        return self._end_tokens

    def start(self) -> Matcher:
        """See `Grammar.start`."""
        return _Matcher(self, self._prototype.deep_copy())


class _Matcher:
    """See `engine.grammar.Matcher`. What it takes is measured, and too much is a failure."""

    def __init__(self, grammar: CompiledGrammar, native: Any) -> None:
        self._grammar = grammar
        self._native = native
        self._left = _SECONDS_MORE

    def advance(self, tokens: Sequence[int]) -> int:
        return int(self._timed(self._native.try_consume_tokens, list(tokens)))

    def rewind(self, count: int) -> None:
        if count:
            self._native.rollback(count)

    def allowed(self) -> bytes:
        return bytes(self._timed(self._native.compute_bitmask))

    def forced(self) -> list[int]:
        ends = self._grammar.end_tokens
        forced: list[int] = self._timed(self._native.compute_ff_tokens)
        return [token for token in forced if token not in ends]

    @property
    def may_end(self) -> bool:
        return bool(self._native.is_accepting())

    @property
    def failure(self) -> str | None:
        reason = failure(self._native)
        if reason is None and self._left < 0:
            reason = "what may come next takes too long to find out"
        if reason is None:
            return None
        self._grammar.worn = True
        return f"The grammar of this request cannot be followed any further: {reason}."

    def _timed(self, call: Callable[..., T], *arguments: Any) -> T:
        """Computing time of this thread alone: on a busy machine a grammar is not to blame."""
        began = time.thread_time()
        result = call(*arguments)
        self._left += _SECONDS_EACH - (time.thread_time() - began)
        return result


def _size(future: Future[CompiledGrammar]) -> int:
    """Bytes of a compiled grammar; nothing while it is none."""
    return future.result().size if future.done() and future.exception() is None else 0


def _serves(future: Future[CompiledGrammar]) -> bool:
    """Whether a compilation that is over is good for further requests; a refusal is."""
    error = future.exception()
    return not future.result().worn if error is None else isinstance(error, Refused)
