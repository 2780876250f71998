"""The ledger of bad inputs: what has brought other servers down, numbered.

For each there is a test of the stated answer, after which a normal request is answered as before.
A test says which entries it is about with ``@pytest.mark.bad_input(number, ...)``; tables carry
the number in each row. `tests.test_ledger` fails if a number has no test.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

BAD_INPUTS = {
    1: "an empty prompt",
    2: "no prompt: missing, null, or empty lists",
    3: "negative token ids",
    4: "token ids beyond the vocabulary",
    5: "prompts of the wrong type, or of two",
    6: "very many prompts",
    7: "a prompt longer than the context, streamed or not",
    8: "prompt and max_tokens together longer than the context",
    9: "impossible max_tokens",
    10: "impossible n, refused before anything is allocated",
    11: "impossible best_of",
    12: "too many choices over all prompts",
    13: "NaN and infinity as numbers and as text, not echoed either",
    14: "temperatures out of range, and one that is nearly 0",
    15: "top_p, min_p, top_k out of range",
    16: "penalties out of range",
    17: "penalties with every drafter and draft length, in one batch",
    18: "bad keys and values of logit_bias",
    19: "masks that leave no token",
    20: "bad token ids to stop at while min_tokens hides them; neighbours stay",
    21: "min_tokens that is negative, or above max_tokens",
    22: "bad, many or long stop strings",
    23: "a stop string within an accepted draft",
    24: "impossible logprobs",
    25: "impossible prompt_logprobs, a long prompt, or a stream",
    26: "echo with logprobs of a prompt as long as the context",
    27: "stream_options without a stream",
    28: "seeds that are no 64-bit integers",
    29: "impossible truncation",
    30: "an empty, long or wrong cache_salt",
    31: "odd Unicode: surrogates, NUL, marks, emoji in pieces, text of special tokens",
    32: "bodies that are no JSON object, or hold a key twice",
    33: "JSON nested very deep",
    34: "a body over the limit, with and without its length",
    35: "a compressed body",
    36: "the wrong media type",
    37: "headers that are long, many, or slow",
    38: "missing and wrong keys",
    39: "ways around the gate",
    40: "model names that are unknown, long, or paths",
    41: "a chat template in a request",
    42: "a hostile chat template in a model",
    43: "models with code, pickles, or a broken header",
    44: "messages that are empty, odd, or have images to be fetched",
    45: "tools, schemas, regular expressions, grammars",
    46: "bad, long or much-shared predictions",
    47: "impossible control of speculation",
    48: "fields of other servers that would be deserialised",
    49: "drafts that are wrong, too long, empty, or end the text",
    50: "clients that leave in every phase, and two hundred impatient ones",
    51: "a client that never reads its stream",
    52: "ten times more requests than there is room for",
    53: "a cache too small for the batch",
    54: "weights that are no numbers",
    55: "an engine that raises, and one that hangs",
    56: "signals with streams open, twice, and under load",
    57: "another tenant's cached prompt, also in the draft model's cache",
    58: "routes that are switched off",
    59: "request ids that are hostile, long, or used twice at once",
    60: "a taken port, an unreadable model, an unknown setting at start",
}


def marked(rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a table whose rows begin with a number of the ledger."""
    return [pytest.param(*row, marks=pytest.mark.bad_input(number)) for number, *row in rows]
