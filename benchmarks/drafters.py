"""What each drafter brings, by kind of prompt and number of streams, from running servers.

    specserve serve --port 8301 --speculation off &
    specserve serve --port 8302 --drafters lookup &
    specserve serve --port 8303 --drafters model --draft-model drafts/mine &
    python -m benchmarks.drafters prompts.jsonl --target off=http://127.0.0.1:8301 \
        --target lookup=http://127.0.0.1:8302 --target model=http://127.0.0.1:8303

The first server is the baseline. Prompts are JSON lines with `turns` and `category`; each category
and number of streams is one run of `loadtest`, in which the servers take turns. Tokens per pass,
and the share of time that drafting takes, are differences of each server's own counters over that
run; the speed-up is the ratio of tokens per second over HTTP, prefill included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

#: Kinds of a conversation that are too few each to be measured alone.
_CONVERSATION = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)

_COUNTERS = {
    "passes": "specserve_spec_tokens_per_step_count",
    "tokens": "specserve_spec_tokens_per_step_sum",
    "draft": "specserve_spec_draft_seconds_sum",
    "step": "specserve_step_seconds_sum",
}


def read_prompts(path: Path) -> dict[str, list[str]]:
    """JSON lines by category."""
    groups: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text("utf-8").splitlines():
        category = json.loads(line)["category"]
        groups["conversation" if category in _CONVERSATION else category].append(line)
    return dict(sorted(groups.items()))


def scrape(url: str) -> dict[str, float]:
    """The counters of a server."""
    text = httpx.get(f"{url}/metrics", timeout=30).raise_for_status().text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return {key: found[name] for key, name in _COUNTERS.items()}


def compare(
    targets: dict[str, str], workload: Path, streams: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """One run of all servers; a row for each."""
    before = {name: scrape(url) for name, url in targets.items()}
    with tempfile.TemporaryDirectory() as output:
        command = [sys.executable, "-m", "loadtest", "run", "--workload", str(workload)]
        for name, url in targets.items():
            command += ["--target", f"{name}={url}"]
        command += ["--concurrency", str(streams), "--rounds", str(options.rounds)]
        command += ["--requests", str(max(8, 3 * streams) * options.rounds), "--warmup", "1"]
        command += ["--max-tokens", str(options.max_tokens), "--isolate-cache", "--output", output]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        results = json.loads((Path(output) / "results.json").read_text("utf-8"))
    rates = {s["lane"]: s["tokens_per_second"] for s in results["summaries"]}
    base = rates[next(iter(targets))]
    for name, url in targets.items():
        spent = {key: value - before[name][key] for key, value in scrape(url).items()}
        yield {
            "streams": streams,
            "drafter": name,
            "rate": rates[name],
            "speed_up": rates[name] / base,
            "tokens_per_pass": spent["tokens"] / spent["passes"],
            "draft_share": spent["draft"] / spent["step"],
        }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line for each category and drafter, three columns for each number of streams."""
    streams = sorted({row["streams"] for row in rows})
    head = ["category", "drafter", *(f"{n}: × off, tokens a pass, drafting" for n in streams)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    groups: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in rows:
        groups[row["category"], row["drafter"]][row["streams"]] = row
    for (category, drafter), own in groups.items():
        cells = [
            f"{r['speed_up']:.2f}, {r['tokens_per_pass']:.2f}, {r['draft_share']:.1%}"
            if (r := own.get(n))
            else ""
            for n in streams
        ]
        lines.append(f"| {' | '.join((category, drafter, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Measures and prints a Markdown table; rows go to standard error as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--target", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    targets = dict(target.split("=", 1) for target in options.target)
    rows: list[dict[str, Any]] = []
    for category, lines in read_prompts(options.prompts).items():
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            for streams in map(int, options.streams.split(",")):
                for row in compare(targets, Path(file.name), streams, options):
                    rows.append({"category": category, **row})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
