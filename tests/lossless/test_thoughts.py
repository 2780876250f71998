"""Thoughts, budgets for them and grammars behind them, on a model of random weights: speculation
changes no token, and each answer is what it has to be."""

from __future__ import annotations

import copy
import json
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.grammar import Grammar
from engine.types import FinishReason, Request
from server.text.codec import TextCodec
from server.text.reasoning import FORMATS, Phase, ReasoningRules
from server.text.thought import TagTokens, ThoughtGrammar
from tests.drafters import ScriptedDrafter
from tests.fakes import Run, ask, make_engine, run
from tests.lossless.structured import World, world

THINK = FORMATS["think"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["abc", "abd"]}, "n": {"type": "boolean"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
LIMITS = (0, 1, 7, None)


def grammar(made: World, phase: Phase, most: int | None, answer: Grammar | None) -> Grammar:
    tags = TagTokens(made.codec, THINK)
    return ThoughtGrammar(tags, phase, answer, most, len(made.tokenizer) + 6)


def requests(made: World, *, bound: bool) -> list[Request]:
    """With every limit, from before a thought and from within, greedily and sampled. Biases make
    the tags likely enough to come by themselves now and then."""
    answer = made.grammar("json", SCHEMA) if bound else None
    tags = dict.fromkeys((*made.codec.spell(b"<think>"), *made.codec.spell(b"</think>")), 2.5)
    # Some decoders would take a tag that follows half a character for the rest of it.
    texts = {token: made.codec.token_bytes(token) for token in range(len(made.tokenizer))}
    whole = frozenset(token for token, text in texts.items() if text.isascii())
    asked = []
    for phase in ("before", "inside"):
        for most in LIMITS if bound else LIMITS[:-1]:
            for seed, temperature in enumerate((0.0, 1.0)):
                own = grammar(made, phase, most, answer)  # type: ignore[arg-type]
                how: dict[str, Any] = {"temperature": temperature, "seed": seed}
                how |= {"grammar": own, "ignore_eos": not bound}
                how |= {} if bound else {"allowed_token_ids": whole}
                how |= {"logit_bias": made.closing | tags if bound else tags}
                name = f"{phase}/{most}/{seed}"
                asked.append(ask(name, made.ids("the fox said"), 50, **how))
    return asked


def parts(made: World, request_id: str, tokens: list[int]) -> tuple[str, str, int]:
    """Thought, answer, and the thought's tokens, as the server tells them apart."""
    phase = request_id.split("/")[0]
    rules = ReasoningRules(THINK, phase, exact=True)  # type: ignore[arg-type]
    reader, text = rules.reader(), ""
    decode = made.codec.detokenizer(made.ids("the fox said"), skip_special_tokens=False)
    for token in tokens:
        text += (piece := "" if token in made.end else decode.push(token))
        reader.feed(piece)
    thought, answer = reader.split(text, final=True)
    return thought, answer, reader.tokens


def check(made: World, done: Run, *, bound: bool) -> int:
    """How many thoughts there were; no answer before its end, none too long, all as they must."""
    thoughts = 0
    for request_id, answer in done.answers.items():
        assert answer.failed is None
        [choice] = answer.choices.values()
        assert choice.end is not None
        _, text, count = parts(made, request_id, choice.tokens)
        most = request_id.split("/")[1]
        assert most == "None" or count <= int(most)
        thoughts += count > 0
        if bound and choice.end.reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text), SCHEMA)
        if not bound:
            assert choice.end.reason is FinishReason.LENGTH
    return thoughts


@pytest.mark.parametrize("name", ["bytes", "byte fallback"])
@pytest.mark.parametrize("bound", [True, False])
def test_thoughts_are_the_same_with_speculation(name: str, bound: bool) -> None:
    made = world(name)
    asked = requests(made, bound=bound)
    plain = run(make_engine(made.setup), asked)
    assert check(made, plain, bound=bound) >= 4
    said = {r.request_id: plain.answers[r.request_id].choices[0].tokens for r in asked}
    if bound:
        ended = sum(c.choices[0].end.reason is FinishReason.STOP for c in plain.answers.values())
        assert ended >= len(asked) // 2
    right = ScriptedDrafter(lambda s, n: said[s.request.request_id][len(s.output) :][:n])
    for changes in (
        {"drafter": "lookup"},
        {"drafter": right, "max_draft": 16},
        {"drafter": "lookup", "mode": "auto", "num_pages": 120},
        {"drafters": ("lookup",), "max_nodes": 8, "max_draft": 4},
    ):
        done = run(make_engine(made.setup, **changes), asked)
        for request in asked:
            assert done.said(request.request_id) == plain.said(request.request_id), changes
        assert done.accepted


def test_a_mask_does_not_depend_on_the_way_to_it() -> None:
    """After wandering to and fro over all that a text goes through, masks equal those of a fresh
    matcher."""
    made = world()
    answer = made.grammar("json", SCHEMA)
    text = '<think>a thought </thi</think>{"name": "abd", "n": true}'
    for phase, path in (("before", made.ids(text)), ("inside", made.ids(text[7:]))):
        for most in (None, 5, 9):
            own = grammar(made, phase, most, answer)  # type: ignore[arg-type]
            wandering, here = own.start(), 0
            way = list(path)
            if most is not None:  # to where it is closed, and on from there
                free = own.start()
                count = free.advance(path)
                forced = free.forced()
                assert count < len(path)
                assert b"".join(map(made.codec.token_bytes, forced)) == b"</think>"
                way = [*path[:count], *forced, *made.ids('{"name": "abd", "n": true}')]
            fresh = own.start()
            assert fresh.advance(way) == len(way)
            assert fresh.may_end
            for i in range(60):
                there = i * 17 % len(way)
                if there < here:
                    wandering.rewind(here - there)
                else:
                    assert wandering.advance(way[here:there]) == there - here
                here = there
                fresh = own.start()
                assert fresh.advance(way[:there]) == there
                assert wandering.allowed() == fresh.allowed()
                assert wandering.forced() == fresh.forced()
                assert wandering.may_end == fresh.may_end
                assert allows(wandering.allowed(), way[there])


def allows(mask: bytes | None, token: int) -> bool:
    if mask is None:
        return True
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return token < len(bits) and bool(bits[token])


def test_within_a_thought_all_is_allowed_but_its_end() -> None:
    made = world("byte fallback")
    [end] = made.end
    size = len(made.tokenizer) + 6
    bound = grammar(made, "inside", None, made.grammar("json", SCHEMA)).start()
    for token in range(size):
        assert allows(bound.allowed(), token) == (token != end)
    assert bound.advance(made.ids("thought </think")) > 3
    texts = {token: made.codec.token_bytes(token) for token in range(size)}
    running_on = [token for token, text in texts.items() if text[:1] == b">" != text]
    for token in range(size):
        assert allows(bound.allowed(), token) == (token != end and token not in running_on)
    assert bound.advance(made.ids(">")) == 1
    assert bound.forced()[:1] == made.ids("{")[:1]
    free = grammar(made, "inside", 2, None).start()
    assert free.allowed() is None
    assert free.may_end
    assert free.advance(made.ids("a")) == 1
    assert free.advance(made.ids("b")) == 1
    assert not free.may_end
    closing = free.forced()
    assert made.text(closing) == "</think>"
    assert sum(allows(free.allowed(), token) for token in range(size - 6)) == 1
    assert free.advance([*closing, *made.ids("anything")]) > len(closing)
    assert free.allowed() is None


def test_no_token_closes_a_thought_and_begins_the_answer() -> None:
    """What it begins the answer with would be of no grammar; without one it is free to."""
    made = world()
    tokenizer = copy.deepcopy(made.tokenizer)
    tokenizer.add_tokens([">{", ">\n", "k>x", "a</think>b", "=>{"])
    size = len(tokenizer)
    tags = TagTokens(TextCodec(tokenizer), THINK)
    answer = made.grammar("json", SCHEMA)
    bound = ThoughtGrammar(tags, "inside", answer, None, size).start()
    free = ThoughtGrammar(tags, "inside", None, 100, size).start()
    ids = tokenizer.convert_tokens_to_ids
    said = [*made.ids("</thin"), ids("k")]
    assert bound.advance(said) == free.advance(said) == len(said)
    for text, fits in ((">{", False), (">\n", False), ("k>x", True), ("=>{", True), (">", True)):
        assert allows(bound.allowed(), ids(text)) == bool(bound.advance([ids(text)])) == fits, text
        bound.rewind(fits)
        assert free.advance([ids(text)]) == 1
        free.rewind(1)
    bound.rewind(1)
    assert not allows(bound.allowed(), ids("k>x"))
    assert not allows(bound.allowed(), ids("a</think>b"))


def test_the_model_opens_a_thought_or_answers() -> None:
    made = world()
    for text, fits in (
        ('{"name": "abc", "n": true}', True),
        ('<think>x</think>{"name": "abc", "n": true}', True),
        ('<think></think>{"name": "abc", "n": true}', True),
        ("<think>x</think>x", False),
        ("x", False),
        ("<x", False),
        ('</think>{"name": "abc", "n": true}', False),
    ):
        matcher = grammar(made, "before", None, made.grammar("json", SCHEMA)).start()
        tokens = made.ids(text)
        assert (matcher.advance(tokens) == len(tokens)) == fits, text
        assert not fits or matcher.may_end
