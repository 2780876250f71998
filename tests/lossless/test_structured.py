"""JSON schemas and their like, as the server compiles them, on a model of random weights.

Whatever such a model wants to say, an answer that ends is of its grammar, which another library
confirms; and speculation changes no token of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.types import FinishReason, Request
from server.text.description import GrammarSource
from server.text.grammar import GrammarCompiler
from tests.drafters import ScriptedDrafter
from tests.fakes import Run, ask, make_engine, run
from tests.lossless.schemas import SCHEMAS
from tests.lossless.structured import World, world
from tests.server.support import make_tokenizer


def requests(made: World, schemas: list[Any], **sampling: Any) -> list[Request]:
    """Each schema greedily and sampled, with and without help to come to an end."""
    asked = []
    for i, schema in enumerate(schemas):
        grammar = made.grammar("json", schema)
        for j, temperature in enumerate((0.0, 1.0)):
            how = {"temperature": temperature, "seed": i, "logit_bias": made.closing, **sampling}
            prompt = made.ids("the fox said")
            asked.append(ask(f"{i}/{j}", prompt, 120, grammar=grammar, **how))
    return asked


def check(made: World, done: Run, schemas: list[Any]) -> int:
    """How many answers ended; each of them is what its schema allows."""
    ended = 0
    for request_id, answer in done.answers.items():
        schema = schemas[int(request_id.split("/")[0])]
        for choice in answer.choices.values():
            assert choice.end is not None
            if choice.end.reason is FinishReason.STOP:
                text = made.text(choice.tokens)
                jsonschema.validate(json.loads(text), schema)
                ended += 1
    return ended


@pytest.mark.parametrize("name", ["bytes", "byte fallback"])
def test_every_answer_that_ends_is_valid_and_the_same_with_speculation(name: str) -> None:
    made = world(name)
    schemas = list(SCHEMAS.values())
    asked = requests(made, schemas)
    plain = run(make_engine(made.setup), asked)
    assert check(made, plain, schemas) > len(asked) // 2
    for changes in ({"drafter": "lookup"}, {"drafter": "lookup", "mode": "auto", "num_pages": 200}):
        done = run(make_engine(made.setup, **changes), asked)
        for request in asked:
            assert done.said(request.request_id) == plain.said(request.request_id), changes
        assert done.accepted


def test_other_forms() -> None:
    made = world()
    forms = {
        "regex": ("regex", r"[0-9]{3}-(abc|x+)!", re.compile(r"[0-9]{3}-(abc|x+)!").fullmatch),
        "choice": ("choice", ["yes", "no", 'may"be', "日本 🦊"], ["yes", "no", 'may"be', "日本 🦊"]
                   .__contains__),
        "lark": ("grammar", 'start: "a" ("b" | "c")+ "."', re.compile(r"a[bc]+\.").fullmatch),
        "gbnf": ("grammar", 'root ::= "a" ("b" | "c") "."', re.compile(r"a[bc]\.").fullmatch),
    }  # fmt: skip
    sampled = {"temperature": 1.0, "seed": 3, "n": 3}
    asked = [
        ask(name, made.ids("story"), 60, grammar=made.grammar(kind, text), **sampled)
        for name, (kind, text, _) in forms.items()
    ]
    for drafter in ("none", "lookup"):
        done = run(make_engine(made.setup, drafter=drafter), asked)
        for name, (_, _, matches) in forms.items():
            for choice in done.answers[name].choices.values():
                if choice.end is not None and choice.end.reason is FinishReason.STOP:
                    assert matches(made.text(choice.tokens)), made.text(choice.tokens)
        assert all(c.end.stop_token_id is not None for c in done.answers["choice"].choices.values())


def test_forced_text_takes_few_passes() -> None:
    made = world()
    schema = {
        "type": "object",
        "properties": {"temperature_in_degrees": {"enum": [1, 2]}, "the_place": {"const": "home"}},
        "required": ["temperature_in_degrees", "the_place"],
        "additionalProperties": False,
    }
    asked = requests(made, [schema])
    plain = run(make_engine(made.setup), asked)
    fast = run(make_engine(made.setup, drafter="lookup", max_draft=16), asked)
    for request in asked:
        assert fast.said(request.request_id) == plain.said(request.request_id)
    spent = [run_.answers["0/0"].choices[0].end.stats.target_passes for run_ in (plain, fast)]
    assert spent[1] < spent[0]


def test_a_mask_does_not_depend_on_the_way_to_it() -> None:
    """Masks after wandering about equal those of a fresh matcher, token for token."""
    made = world()
    grammar = made.grammar("json", SCHEMAS["nested"])
    text = '{"name": "a", "address": {"street": "b", "zip": "12345"}, "tags": ["x", "y"]}'
    path = made.ids(text)
    wandering = grammar.start()
    assert wandering.advance(path) == len(path)
    assert wandering.may_end
    here = len(path)
    for i in range(80):
        there = i * 31 % len(path)
        if there < here:
            wandering.rewind(here - there)
        else:
            assert wandering.advance(path[here:there]) == there - here
        here = there
        wandering.advance([made.ids("%")[0]] * 2)  # not allowed outside of strings
        fresh = grammar.start()
        taken = fresh.advance([*path[:there], *[made.ids("%")[0]] * 2]) - there
        assert wandering.allowed() == fresh.allowed()
        assert wandering.forced() == fresh.forced()
        wandering.rewind(taken)
        assert wandering.failure is None


def test_the_end_is_offered_only_where_the_text_may_end() -> None:
    made = world()
    matcher = made.grammar("regex", "[0-9]{2,3}").start()
    [end] = made.end

    def offered() -> bool:
        bits = np.unpackbits(np.frombuffer(matcher.allowed(), np.uint8), bitorder="little")
        return bool(bits[end])

    seen = []
    for digit in "123":
        seen.append((offered(), matcher.may_end))
        assert matcher.advance(made.ids(digit)) == 1
    assert [*seen, (offered(), matcher.may_end)] == [
        (False, False), (False, False), (True, True), (True, True),
    ]  # fmt: skip


def test_special_tokens_are_no_text() -> None:
    """A string in JSON may spell a control token, but never hold one."""
    made = world()
    control = made.tokenizer.convert_tokens_to_ids("<|im_end|>")
    asked = ask("r", made.ids("fox"), 30, grammar=made.grammar("json", {"type": "string"}),
                logit_bias={control: 100.0}, seed=1, temperature=1.0)  # fmt: skip
    done = run(make_engine(made.setup), [asked])
    assert control not in done.answers["r"].tokens


def test_a_compiler_that_allows_too_much_would_be_noticed() -> None:
    """The judge of these tests has teeth: without the mask, the same answers do not validate."""
    made = world()
    schemas = [SCHEMAS["flat"]]
    asked = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, grammar=None))
        for r in requests(made, schemas)
    ]
    done = run(make_engine(made.setup, drafter=ScriptedDrafter(lambda _s, _n: [])), asked)
    with pytest.raises((jsonschema.ValidationError, json.JSONDecodeError)):
        check(made, done, schemas)


def test_one_description_is_compiled_once() -> None:
    compiler = GrammarCompiler(make_tokenizer())
    source = GrammarSource("json", json.dumps(SCHEMAS["large"]), "guided_json")
    end = frozenset({make_tokenizer().eos_token_id})

    async def twice() -> list[Any]:
        return await asyncio.gather(*(compiler.compile(source, end) for _ in range(8)))

    assert len(set(map(id, asyncio.run(twice())))) == 1
