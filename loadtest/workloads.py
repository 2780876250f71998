"""Where prompts come from: JSONL files, the built-in set, and synthetic families."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from random import Random

from loadtest import synthetic
from loadtest.plan import Prompt, UsageError


@dataclass(frozen=True, slots=True)
class WorkloadSize:
    """How large synthetic prompts are.

    Args:
        count: distinct prompts to make.
        words: fewest and most words of a prompt (the client has no tokenizer).
        groups: distinct prefixes of the shared-prefix family.
        seed: same seed, same prompts.
    """

    count: int = 64
    words: tuple[int, int] = (32, 256)
    groups: int = 4
    seed: int = 0


#: Synthetic families: a generator of random numbers, how many words, a running number -> a prompt.
FAMILIES: Mapping[str, Callable[[Random, int, int], Prompt]] = {
    "random": synthetic.random_text,
    "code-edit": synthetic.code_edit,
    "repetitive": synthetic.repetitive,
}

#: Every name `load` knows beside a path.
NAMES = ("builtin", *FAMILIES, "shared-prefix")


def load(workload: str, size: WorkloadSize) -> list[Prompt]:
    """The prompts of a workload, shuffled by `size.seed`.

    Args:
        workload: one of `NAMES`, or the path of a JSONL file, or of a .txt file whose lines are
            prompts.
        size: for synthetic families; a file is taken whole.

    Raises:
        UsageError: no such name or file, or a line is not a prompt.
    """
    rng = Random(f"{workload}:{size.seed}")
    if workload == "builtin":
        text = (files("loadtest") / "data" / "prompts.jsonl").read_text("utf-8")
        prompts = parse_jsonl(text.split("\n"), "the built-in prompts")
    elif workload == "shared-prefix":
        lengths = [rng.randint(*size.words) for _ in range(size.count)]
        prompts = synthetic.shared_prefix(rng, lengths, size.groups)
    elif make := FAMILIES.get(workload):
        prompts = [make(rng, rng.randint(*size.words), i) for i in range(size.count)]
    elif workload.endswith(".txt"):
        lines = [line.strip() for line in _lines(workload)]
        prompts = [Prompt((line,)) for line in lines if line]
        if not prompts:
            raise UsageError(f"{workload} holds no prompts; write one a line.")
    else:
        prompts = parse_jsonl(_lines(workload), workload)
    rng.shuffle(prompts)
    return prompts


def _lines(path: str) -> list[str]:
    try:
        # Not splitlines: a JSON string may hold U+2028 and the like unescaped.
        return Path(path).read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--workload {path} is neither a readable JSONL file ({error}) nor one of "
            f"{', '.join(NAMES)}."
        ) from error


def parse_jsonl(lines: Sequence[str], source: str) -> list[Prompt]:
    """Prompts of JSON lines: `{"prompt": ...}` or `{"turns": [...]}`, each with optional
    `"category"`, `"max_tokens"` and `"prediction"`. Blank lines are skipped.

    Raises:
        UsageError: a line is not such an object (named by `source` and number), or none is left.
    """
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(_parse(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise UsageError(f"{source}, line {number}: {error}.") from error
    if not prompts:
        raise UsageError(f"{source} holds no prompts; write one JSON object a line.")
    return prompts


def _parse(entry: object) -> Prompt:
    if not isinstance(entry, dict):
        raise TypeError('a prompt is a JSON object such as {"prompt": "..."}')
    turns = entry.get("turns", [entry["prompt"]] if "prompt" in entry else None)
    if not (isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns)):
        raise ValueError('it needs "prompt" (text) or "turns" (a list of texts), none empty')
    max_tokens = entry.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ValueError(f'"max_tokens" is {max_tokens!r}, but it must be a whole number above 0')
    prediction = entry.get("prediction")
    if not isinstance(prediction, str | None):
        raise TypeError('"prediction" must be a text')
    return Prompt(tuple(turns), str(entry.get("category", "")), max_tokens, prediction)
