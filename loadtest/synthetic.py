"""Made-up prompts, the same for the same random seed.

Each family stands for a kind of traffic that speculation and caches treat differently: random
words (nothing to reuse), shared prefixes (system prompts, few-shot), code edits (the answer is
nearly the prompt), and repetition (the answer repeats itself).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from loadtest.plan import Prompt

_VOCABULARY = """
able acid air amber anchor apple arch arm autumn back bake bank barn basin beach bell bench bird
blue boat bone book bottle bowl branch brass bread bridge bright broad brook brown brush build
cabin candle canvas carry castle chair chalk chart cheese cherry circle city clay clear cliff
clock cloth cloud coast coffee cold copper corn cotton crane creek crisp crowd crown curve dance
dark dawn deep desk dew dinner door dream drift drum dry dust eagle early earth east edge empty
engine evening fair farm feather fence field fire fish flag flame flat flint floor flour flower
fold forest fork fox frame fresh frost fruit garden gate gentle glass gold grain grass gravel
green grey hall hammer harbour harvest hazel heavy hill hollow honey horn horse house ice inland
iron island ivory jar journey juice keen kettle kitchen knot ladder lake lamp lane large late leaf
lemon letter light lime linen lion little loam long loom low maple marble market meadow metal milk
mill mirror moon morning moss mountain narrow nest night noble north oak oat ocean old olive open
orange orchard otter oven paint paper path pearl pepper pine plain plum pond poplar pot proud
quarry quick quiet rain raven reed ridge ring river road robin roof root rope rose rough round
"""

_WORDS = _VOCABULARY.split()

_VERBS = ["load", "merge", "filter", "count", "render", "parse", "collect", "resize", "update"]
_NOUNS = ["orders", "users", "pages", "events", "images", "rows", "tickets", "routes", "labels"]


def _prose(rng: Random, words: int) -> str:
    """`words` random words in sentences of 6 to 14."""
    sentences = []
    while words > 0:
        length = min(words, rng.randint(6, 14))
        sentences.append(" ".join(rng.choices(_WORDS, k=length)).capitalize() + ".")
        words -= length
    return " ".join(sentences)


def random_text(rng: Random, words: int, number: int) -> Prompt:
    """Prose of random words, to be continued: nothing repeats, nothing is shared."""
    text = _prose(rng, words)
    return Prompt((f"Note {number}. {text}\n\nContinue this note in the same style.",), "random")


def shared_prefix(rng: Random, lengths: Sequence[int], groups: int) -> list[Prompt]:
    """Prompts of which three quarters are a prefix shared within one of `groups` groups.

    Args:
        lengths: words of each prompt; a group's prefix is as long as its longest needs.
        groups: distinct prefixes, at least 1.
    """
    prefix_words = max(1, 3 * max(lengths) // 4)
    prefixes = [
        f"You are assistant number {group}. Follow these house rules. {_prose(rng, prefix_words)}"
        for group in range(groups)
    ]
    prompts = []
    for number, length in enumerate(lengths):
        question = _prose(rng, max(4, length // 4))
        text = f"{prefixes[number % groups]}\n\nQuestion {number}: {question} What follows?"
        prompts.append(Prompt((text,), "shared-prefix"))
    return prompts


def repetitive(rng: Random, words: int, number: int) -> Prompt:
    """A table whose rows repeat one pattern, to be carried on."""
    place, colour = rng.sample(_WORDS, 2)
    rows = max(3, words // 8)
    table = "\n".join(
        f"{row}. The {place} number {row} is painted {colour}." for row in range(1, rows + 1)
    )
    text = f"List {number}:\n{table}\n\nCarry on this list with the next {rows} lines."
    return Prompt((text,), "repetitive")


def code_edit(rng: Random, words: int, number: int) -> Prompt:
    """A Python file to be returned whole with one small edit; `prediction` is the file."""
    functions = max(1, words // 20)
    names = [f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}_{i}" for i in range(functions)]
    source = f'"""Module {number}."""\n\n' + "\n\n".join(_function(rng, name) for name in names)
    name = rng.choice(names)
    edit = rng.choice(
        [
            f"rename the function `{name}` to `{name}_checked`",
            f"give the function `{name}` a docstring of one line",
            f"make the function `{name}` return `None` when `items` is empty",
        ]
    )
    text = (
        f"Here is a file:\n\n```python\n{source}```\n\n"
        f"Return the whole file again, but {edit}. Change nothing else."
    )
    return Prompt((text,), "code-edit", prediction=source)


def _function(rng: Random, name: str) -> str:
    limit, step = rng.randint(2, 99), rng.randint(1, 9)
    key, total = rng.sample(_WORDS, 2)
    return (
        f"def {name}(items, limit={limit}):\n"
        f"    {total} = []\n"
        f"    for item in items[:limit]:\n"
        f'        if item["{key}"] > {step}:\n'
        f'            {total}.append(item["{key}"] + {step})\n'
        f"    return {total}\n"
    )
