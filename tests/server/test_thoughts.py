"""Thoughts in text: whatever the cuts of a stream, the same thought and answer come out."""

from __future__ import annotations

import itertools

import pytest

from server.text.choice import ChoiceText, Delta, TextRules
from server.text.codec import TextCodec
from server.text.reasoning import (
    FORMATS,
    Phase,
    ReasoningRules,
    format_of,
    phase_of,
    phase_within,
)
from tests.server.support import ids, make_tokenizer

THINK = FORMATS["think"]
#: Where the text begins, the text, and its thought and answer.
ROWS: list[tuple[Phase, str, str, str]] = [
    ("before", "just text", "", "just text"),
    ("before", " \n text", "", " \n text"),
    ("before", "<think>a thought</think>text", "a thought", "text"),
    ("before", "\n<think>\na thought\n</think>\n\n text \n", "a thought", "text \n"),
    ("before", "<think>\n\n</think>\n\ntext", "", "text"),
    ("before", "<think></think>", "", ""),
    ("before", "<thin", "", "<thin"),
    ("before", "<thinks>x</think>", "", "<thinks>x</think>"),
    ("before", "x <think>a</think>", "", "x <think>a</think>"),
    ("before", "<think>cut off", "cut off", ""),
    ("before", "<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
    ("inside", "\na\n\nb </thin </think\n</think>c", "a\n\nb </thin </think", "c"),
    ("inside", "a <</think>c </think> d", "a <", "c </think> d"),
    ("inside", "<think>a</think>c", "<think>a", "c"),
    ("inside", "cut </thi", "cut </thi", ""),
    ("inside", "cut off \n ", "cut off", ""),
    ("inside", "</think>c", "", "c"),
    ("inside", " \n ", "", ""),
    ("after", " a</think>b", "", " a</think>b"),
]


def choice_text(rules: TextRules) -> ChoiceText:
    codec = TextCodec(make_tokenizer())
    return ChoiceText(rules, codec.detokenizer(skip_special_tokens=True))


def read(rules: TextRules, tokens: list[int], cuts: tuple[int, ...] = ()) -> list[Delta]:
    """Deltas of an answer whose tokens come in parts that end at `cuts`."""
    choice, deltas = choice_text(rules), []
    for start, end in itertools.pairwise((0, *cuts, len(tokens))):
        if not choice.finished:
            delta = choice.push(tokens[start:end], None)
            deltas += [delta] if delta is not None else []
    if not choice.finished:
        deltas.append(choice.finish("stop", None))
    return deltas


def joined(deltas: list[Delta]) -> tuple[str, str]:
    return "".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)


def split(phase: Phase, parts: list[str], *, exact: bool = False) -> tuple[str, str]:
    """Thought and answer of a text that comes in parts, with no more held back than has to be."""
    reader, held = ReasoningRules(THINK, phase, exact).reader(), ""
    thought = answer = ""
    for part in parts:
        reader.feed(part)
        held += part
        until = len(held) - reader.held
        more = reader.split(held[:until])
        thought, answer, held = thought + more[0], answer + more[1], held[until:]
    last = reader.split(held, final=True)
    return thought + last[0], answer + last[1]


@pytest.mark.parametrize(("phase", "text", "thought", "answer"), ROWS)
def test_thoughts_are_found_wherever_the_stream_is_cut(
    phase: Phase, text: str, thought: str, answer: str
) -> None:
    assert split(phase, [text]) == (thought, answer)
    assert split(phase, list(text)) == (thought, answer)
    for first in range(len(text)):
        for second in range(first, len(text)):
            parts = [text[:first], text[first:second], text[second:]]
            assert split(phase, parts) == (thought, answer), parts
    rules = TextRules(reasoning=ReasoningRules(THINK, phase))
    tokens = ids(text)
    for cut in range(len(tokens)):
        assert joined(read(rules, tokens, (cut,))) == (thought, answer)


@pytest.mark.parametrize("name", FORMATS)
def test_every_family_of_tags(name: str) -> None:
    form = FORMATS[name]
    rules = TextRules(reasoning=ReasoningRules(form, "before"))
    tokens = ids(f"{form.begin}\n{form.end[:3]}日本\n{form.end}\n🦊 fox")
    every = tuple(range(len(tokens)))
    assert joined(read(rules, tokens, every)) == (f"{form.end[:3]}日本", "🦊 fox")
    assert format_of(f"{{% x %}}{form.begin} y") == name


def test_no_delta_leaks_of_a_tag_or_keeps_what_is_certain() -> None:
    text = "<think>it is < 5 </think>so yes"
    rules = TextRules(reasoning=ReasoningRules(THINK, "before"))
    choice, seen = choice_text(rules), []
    for token in ids(text):
        delta = choice.push([token], None)
        if delta is not None:
            seen += [part for part in (delta.reasoning, delta.text) if part]
    assert "".join(seen) == "it is < 5so yes"
    assert all("think" not in part for part in seen)
    assert len(seen) > 8


def test_an_exact_answer_keeps_its_blanks() -> None:
    for cut in range(9):
        text = "a</think>\n b"
        assert split("inside", [text[:cut], text[cut:]], exact=True) == ("a", "\n b")


def test_stop_strings_hold_for_the_answer_alone() -> None:
    rules = TextRules(stop=("fox", "</think>", "\n"), reasoning=ReasoningRules(THINK, "before"))
    tokens = ids("<think>a fox\n</think>the fox said")
    for cuts in ((), tuple(range(len(tokens)))):
        deltas = read(rules, tokens, cuts)
        assert joined(deltas) == ("a fox", "the ")
        assert deltas[-1].stop_reason == "fox"
        assert sum(len(d.token_ids) for d in deltas) == len(ids("<think>a fox\n</think>the fox"))
    without = read(rules, ids("a fox said"))  # no thought: from the first character
    assert (joined(without), without[-1].stop_reason) == (("", "a "), "fox")


@pytest.mark.parametrize(
    ("phase", "text", "count"),
    [
        ("inside", "abc</think>de", 3),
        ("inside", "abc", 3),
        ("inside", "ab</thi", 7),
        ("before", "<think>ab</think>", 2),
        ("before", "abc", 0),
        ("before", "<think></think>x", 0),
        ("after", "abc", 0),
    ],
)
def test_tokens_of_a_thought_are_counted_without_its_tags(
    phase: Phase, text: str, count: int
) -> None:
    rules = TextRules(reasoning=ReasoningRules(THINK, phase))
    tokens = [ids(character)[0] for character in text]
    choice = choice_text(rules)
    choice.push(tokens, None)
    if text.endswith("</thi"):
        assert choice.reasoning_tokens == 2  # the rest may become its tag
    choice.finish("stop", None)
    assert choice.reasoning_tokens == count


def test_the_phase_is_told_by_what_the_template_wrote_last() -> None:
    for prompt, phase in (
        ("<think> is a tag<|im_start|>assistant\n", "before"),
        ("<|im_start|>assistant\n<think>\n", "inside"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "after"),
    ):
        assert phase_of(prompt, THINK) == phase
    for begun, phase in (
        ("", "before"),
        ("<think>\nI was", "inside"),
        ("<think>\na</think> b", "after"),
        ("Well", "after"),
    ):
        assert phase_within(begun, THINK) == phase


@pytest.mark.parametrize(
    ("template", "name"),
    [("{{ messages }}", None), ("{% if x %}'<think>\\n'{% endif %}", "think"),
     ("content.split('</think>')", "think"), ("<seed:think>", "seed"), ("[THINK]", "mistral")],
)  # fmt: skip
def test_the_format_is_told_by_the_template(template: str, name: str | None) -> None:
    assert format_of(template) == name
