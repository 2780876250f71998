"""What structured answers cost and win: masks as a share of a step, and tokens a second over HTTP.

    python -m benchmarks.structured [--streams 1,4,16] [--rounds 2] [--only rows,steps,http]

First masks in this process: for each row, what it takes to compute the grammar's mask, to move on,
to look for forced text and to put the mask on the logits, with the model's own tokenizer and with
one made from it that has 150,000 tokens. Then what that is of an engine's steps, by counting it
where it happens. Last a server of its own, asked in turns for JSON and for plain text with
speculation on and off (`A B C D, D C B A`); forced tokens come from its `/metrics`. Everything is
printed as tables, and written as JSON where `--output` says so.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from engine.build import build_engine
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.grammar import Grammar, GrammarCursor
from engine.model.sources import DEFAULT_SOURCE, resolve
from engine.sampling import SamplingRow, penalties
from engine.types import Request, SamplingParams, SpeculationParams
from server.text.description import GrammarSource
from server.text.grammar import GrammarCompiler
from server.text.tokenizer import load_tokenizer
from tools.soak import serving

#: Tokens of the made vocabulary: as many as Qwen's has.
LARGE = 151_669

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "language": {"enum": ["English", "French", "German", "Spanish"]},
        "characters": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "full_name": {"type": "string", "maxLength": 30},
                    "age_in_years": {"type": "integer", "minimum": 0, "maximum": 120},
                    "is_main_character": {"type": "boolean"},
                    "occupation": {"type": "string", "maxLength": 30},
                },
                "required": ["full_name", "age_in_years", "is_main_character", "occupation"],
                "additionalProperties": False,
            },
            "minItems": 3,
            "maxItems": 3,
        },
        "number_of_pages": {"type": "integer", "minimum": 1, "maximum": 2000},
    },
    "required": ["title", "language", "characters", "number_of_pages"],
    "additionalProperties": False,
}
#: An answer of that schema; each has its parts in the order of the schema.
EXAMPLE = {
    "title": "The Lighthouse at the End of the Bay",
    "language": "English",
    "characters": [
        {"full_name": name, "age_in_years": age, "is_main_character": age < 40, "occupation": what}
        for name, age, what in (
            ("Ada Brook", 34, "keeper of the light"),
            ("Tom Reed", 61, "fisherman"),
            ("Ines Moreau", 12, "pupil at the village school"),
        )
    ],
    "number_of_pages": 312,
}
PROMPT = "Write about a {} novel, its characters and its length. Answer in English.\n"
KINDS = (
    "art crime love travel family school island winter city farm ghost sea space desert road war"
)


# -- masks by themselves -----------------------------------------------------------------------


def enlarged(tokenizer: Any, size: int) -> Any:
    """A tokenizer with more tokens: pairs of what it has, drawn by chance, the same each time."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    told = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, merges = told["model"]["vocab"], told["model"]["merges"]
    special = {entry["content"] for entry in told["added_tokens"]}
    short = [word for word in vocabulary if len(word) < 8 and word not in special]
    dice, free = random.Random(1), itertools.count(len(tokenizer))
    while len(vocabulary) < size:
        first, second = dice.choice(short), dice.choice(short)
        if first + second not in vocabulary:
            vocabulary[first + second] = next(free)
            merges.append([first, second] if isinstance(merges[0], list) else f"{first} {second}")
    made = Tokenizer.from_str(json.dumps(told))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=tokenizer.eos_token)


def compiled(tokenizer: Any) -> Grammar:
    """The grammar of `SCHEMA`."""
    source = GrammarSource("json", json.dumps(SCHEMA), "benchmark")
    end = frozenset({tokenizer.eos_token_id})
    return asyncio.run(GrammarCompiler(tokenizer).compile(source, end))


def per_row(tokenizer: Any, rounds: int = 5) -> dict[str, float]:
    """Microseconds of computing for a row of `EXAMPLE`: means, and the worst of the masks."""
    grammar = compiled(tokenizer)
    path = tokenizer.encode(json.dumps(EXAMPLE), add_special_tokens=False)
    logits = torch.randn(len(tokenizer))
    params = SamplingParams(grammar=grammar)
    spent: dict[str, list[float]] = {"mask": [], "move": [], "forced": [], "apply": []}
    for _ in range(rounds):
        matcher = grammar.start()
        for token in path:
            copy = logits.clone()
            for name in ("mask", "apply", "forced", "move"):
                began = time.thread_time()  # whatever else the machine does
                if name == "mask":
                    mask = matcher.allowed()
                elif name == "apply":
                    row = SamplingRow(params, (), [], 0, 0, 0, frozenset(), 0, mask)
                    penalties.adjust(copy, row, penalties.Prompts())
                elif name == "forced":
                    matcher.forced()
                elif not matcher.advance([token]):
                    raise SystemExit("the example is not of its schema")
                spent[name].append(time.thread_time() - began)
    found = {name: 1e6 * statistics.mean(values) for name, values in spent.items()}
    return {**found, "all": sum(found.values()), "worst mask": 1e6 * max(spent["mask"])}


# -- as a share of a step ----------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[list[float]]:
    """Seconds that go into grammars, summed up as they are spent."""
    spent, depth = [0.0], [0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            depth[0] += 1
            try:
                return function(*arguments)
            finally:
                depth[0] -= 1
                spent[0] += 0.0 if depth[0] else time.perf_counter() - began

        return call

    places: list[tuple[Any, str]] = [
        *((GrammarCursor, name) for name in ("allowed", "forced", "fitting")),
        (penalties, "_limits"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name in places]
    try:
        for owner, name, function in before:
            setattr(owner, name, timed(function))
        yield spent
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def shares(built: Any, tokenizer: Any, streams: int, tokens: int) -> dict[str, float]:
    """One run of so many streams: milliseconds a step, and what of it goes into grammars."""
    grammar, engine = compiled(tokenizer), built.engine
    found: dict[str, float] = {}
    for speculate in (False, True):
        for i, kind in zip(range(streams), KINDS.split(), strict=False):
            prompt = tokenizer.encode(PROMPT.format(kind), add_special_tokens=False)
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, grammar=grammar)
            ask = SpeculationParams(enabled=speculate)
            engine.add(Request(f"{streams}-{speculate}-{i}", tuple(prompt), sampling, ask))
        seconds = inside = rows = steps = 0.0
        with counted() as spent:
            while engine.has_work:
                spent[0], began = 0.0, time.perf_counter()
                stats = engine.step().stats
                if stats is None or stats.prefill_tokens or stats.decode_sequences < streams:
                    continue
                seconds, inside = seconds + time.perf_counter() - began, inside + spent[0]
                steps, rows = steps + 1, rows + stats.emitted_tokens
        mode = "on" if speculate else "off"
        found[f"ms a step, {mode}"] = 1e3 * seconds / max(1, steps)
        found[f"rows a step, {mode}"] = rows / max(1, steps)
        found[f"share, {mode}"] = inside / max(1e-9, seconds)
    return found


def in_process(
    directory: Path, tokenizer: Any, levels: list[int], tokens: int
) -> dict[str, dict[str, float]]:
    """`shares` of each number of streams, after an unmeasured run."""
    config = EngineConfig(
        ModelConfig(str(directory)),
        CacheConfig(memory_bytes=2**30),
        SchedulerConfig(max_batch_tokens=512, max_sequences=16),
    )
    built = build_engine(config)
    shares(built, tokenizer, 1, 8)
    return {f"{n} streams": shares(built, tokenizer, n, tokens) for n in levels}


# -- over HTTP ---------------------------------------------------------------------------------

FORMAT = {"type": "json_schema", "json_schema": {"name": "novel", "schema": SCHEMA}}
ARMS: dict[str, dict[str, Any]] = {
    f"{kind}, {mode}": {
        **({"response_format": FORMAT} if kind == "JSON" else {"ignore_eos": True}),
        "speculation": {"enabled": mode == "on"},
    }
    for kind in ("JSON", "text")
    for mode in ("off", "on")
}


async def ask(client: httpx.AsyncClient, streams: int, tokens: int, arm: str) -> tuple[int, float]:
    """Tokens of one round with so many streams, and its seconds."""

    async def one(kind: str) -> int:
        body = {
            "messages": [{"role": "user", "content": PROMPT.format(kind)}],
            "temperature": 0,
            "max_tokens": tokens,
            **ARMS[arm],
        }
        answer = await client.post("/v1/chat/completions", json=body)
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    began = time.perf_counter()
    counts = await asyncio.gather(*(one(kind) for kind in KINDS.split()[:streams]))
    return sum(counts), time.perf_counter() - began


async def grammar_tokens(client: httpx.AsyncClient) -> dict[str, float]:
    """Forced tokens so far: drafted and accepted."""
    text = (await client.get("/metrics")).text
    form = r'^specserve_spec_drafter_(\w+)_tokens_total\{[^}]*method="grammar"[^}]*\} (\S+)$'
    return {name: float(value) for name, value in re.findall(form, text, re.MULTILINE)}


async def over_http(url: str, levels: list[int], rounds: int, tokens: int) -> dict[str, Any]:
    """For each number of streams and each arm tokens a second, and forced tokens."""
    found: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
        for arm in ARMS:
            await ask(client, 1, 8, arm)
        for streams in levels:
            sums = {arm: [0.0, 0.0] for arm in ARMS}
            before = await grammar_tokens(client)
            for number in range(rounds):
                for arm in list(ARMS)[:: -1 if number % 2 else 1]:
                    count, seconds = await ask(client, streams, tokens, arm)
                    sums[arm][0] += count
                    sums[arm][1] += seconds
            after = await grammar_tokens(client)
            rates = {arm: count / seconds for arm, (count, seconds) in sums.items()}
            forced = {f"forced, {name}": after[name] - before.get(name, 0.0) for name in after}
            share = forced.get("forced, accepted", 0.0) / max(1.0, sums["JSON, on"][0])
            found[str(streams)] = {**rates, **forced, "forced share": share}
    return found


# -- all of it ---------------------------------------------------------------------------------


def table(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Prints rows of numbers by name."""
    columns = list(next(iter(rows.values())))
    print(f"\n{title}\n\n| | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|")
    for name, values in rows.items():
        cells = [f"{v:.1%}" if "share" in c else f"{v:.1f}" for c, v in values.items()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_SOURCE)
    parser.add_argument("--streams", default="1,4,16", help="at most 16 at once")
    parser.add_argument("--rounds", type=int, default=2, help="of each arm over HTTP")
    parser.add_argument("--tokens", type=int, default=96, help="at most, of an answer")
    parser.add_argument("--only", default="rows,steps,http", help="parts to run")
    parser.add_argument("--output", type=Path, help="JSON of all figures")
    given = parser.parse_args()
    levels = [min(16, int(n)) for n in given.streams.split(",")]
    directory = resolve(given.model)
    tokenizer: Any = load_tokenizer(str(directory))
    found: dict[str, Any] = {}
    if "rows" in given.only:
        large = enlarged(tokenizer, LARGE)
        found["rows"] = {f"{len(t):,} tokens": per_row(t) for t in (tokenizer, large)}
        table("Microseconds for a row", found["rows"])
    if "steps" in given.only:
        found["steps"] = in_process(directory, tokenizer, levels, given.tokens)
        if "rows" in found:
            worse = found["rows"][f"{LARGE:,} tokens"]["all"] / 1e3
            for step in found["steps"].values():  # those rows in this model's steps
                step["share with 150k, off"] = (
                    step["rows a step, off"] * worse / step["ms a step, off"]
                )
        table("Grammars in steps of this process", found["steps"])
    if "http" in given.only:
        with serving(["--model", given.model]) as server:
            found["http"] = asyncio.run(over_http(server.url, levels, given.rounds, given.tokens))
        table("Tokens a second over HTTP, by streams", found["http"])
    if given.output:
        given.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
