"""From a description to a matcher of llguidance's, within the library's own limits.

The library bounds the work of a mask and most of what compiling takes, but not all of it: see
`server.text.probe`, whose process imports this module and little else.
"""

from __future__ import annotations

import json
from typing import Any

from server.text.description import GrammarSource, Refused, children, definition, sentence

#: In the library's units: some 20 ms to compile, 4 ms and 2 ms in a step, 15 MB of states.
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


def native_tokenizer(serialized: str, end_tokens: frozenset[int]) -> Any:
    """The library's own tokenizer; takes a second to make for a large vocabulary.

    Args:
        serialized: a fast tokenizer in the JSON form of `tokenizers`, without padding and
            truncation.
        end_tokens: tokens that end a text.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(serialized, eos_token=sorted(end_tokens))


def compiled(native: Any, text: str) -> Any:
    """A matcher before its first token, which can take one; its first mask, which is the slowest,
    and what is forced first have been computed.

    Args:
        native: the tokenizer.
        text: of `server.text.description.definition`.

    Raises:
        Refused: it does not compile.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(native, text, log_level=0, limits=LLParserLimits(**_LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()
        matcher.compute_ff_tokens()
    if (reason := failure(matcher)) is not None:
        raise Refused(reason)
    return matcher


def tried(native: Any, source: GrammarSource) -> str:
    """The definition of what compiles.

    Raises:
        Refused: it does not; of a schema it is said where the innermost one lies that does not
            compile by itself.
    """
    try:
        text = definition(source)
        compiled(native, text)
    except Refused as refused:
        where = _find(native, source.text) if source.kind == "json" else ""
        raise Refused(str(refused), where) from None
    return text


def failure(matcher: Any) -> str | None:
    """Why a matcher knows no further; None while it does."""
    if matcher.is_error():
        return sentence(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        return "no token can follow"
    return None


def _find(native: Any, text: str) -> str:
    seen = 0
    root = node = json.loads(text)
    path: list[str] = []
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    while True:
        for name, child in children(node):
            seen += 1
            if seen > _MOST_TRIED:
                return ".".join(path)
            inner = json.dumps({**shared, **child})
            try:
                compiled(native, definition(GrammarSource("json", inner, "")))
            except Refused:
                path.append(name)
                node = child
                break
        else:
            return ".".join(path)
