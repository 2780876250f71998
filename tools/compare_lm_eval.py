"""Do lm-evaluation-harness's `local-completions` against a server and its `hf` on the same weights
give the same log-likelihoods?

Needs `pip install lm-eval tenacity`, a model directory and a server that serves it in the same
dtype; everything else is local::

    specserve serve --model DIRECTORY --dtype float32 --port 8000 &
    python tools/compare_lm_eval.py DIRECTORY --base-url http://127.0.0.1:8000/v1

The harness sends prompts as token ids, with `echo`, `logprobs` and `max_tokens` 0 or 1, and reads
the log probabilities of the continuation. Exits with 1 if any of them differs by more than 1e-3.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

LIMIT = 1e-3

QUESTIONS = (
    ("The capital of France is", ("Paris", "London", "Madrid", "Rome")),
    ("Two plus two equals", ("four", "five", "six", "seven")),
    ("Water freezes at a temperature of", ("0 degrees Celsius", "50 degrees", "boiling")),
    ("The opposite of hot is", ("cold", "warm", "blue", "loud")),
    ("A baby cat is called a", ("kitten", "puppy", "calf", "foal")),
    ("The sun rises in the", ("east", "west", "north", "south")),
    ("Bread is baked in an", ("oven", "fridge", "airport", "umbrella")),
    ("def add(a, b):\n    return", ("a + b", "a - b", "a * b", "None")),
    ("An octopus has eight", ("arms", "wheels", "wings", "engines")),
    ("Le chat est sur la", ("table", "mer", "lune", "voiture")),
    ("Once upon a time, in a small village by the sea, there lived", ("an old man", "a 7", "of")),
    ("日本の首都は", ("東京", "大阪", "パリ")),
)

TASK = """\
task: tiny
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{data}"}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
"""


def main() -> int:
    """Runs both and compares; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="the model")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with tempfile.TemporaryDirectory() as place:
        write_task(Path(place))
        ours = log_likelihoods(
            place,
            "local-completions",
            {
                "model": served_name(options.base_url),
                "base_url": f"{options.base_url}/completions",
                "tokenizer": str(options.directory),
                "tokenized_requests": True,
                "num_concurrent": 4,
            },
        )
        theirs = log_likelihoods(
            place,
            "hf",
            {"pretrained": str(options.directory), "dtype": options.dtype, "device": "cpu"},
        )
    return report(ours, theirs)


def write_task(place: Path) -> None:
    """The task and its data."""
    data = place / "tiny.jsonl"
    rows = [{"question": question, "choices": list(choices)} for question, choices in QUESTIONS]
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (place / "tiny.yaml").write_text(TASK.format(data=data), encoding="utf-8")


def served_name(base_url: str) -> str:
    """What the server calls its model."""
    import httpx

    name: str = httpx.get(f"{base_url}/models").raise_for_status().json()["data"][0]["id"]
    return name


def log_likelihoods(place: str, model: str, arguments: dict[str, Any]) -> list[tuple[float, bool]]:
    """(log-likelihood, whether greedy decoding would say it) of every choice."""
    import lm_eval

    result = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["tiny"],
        task_manager=lm_eval.tasks.TaskManager(include_path=place),
        batch_size=1,
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(result["samples"]["tiny"], key=lambda sample: sample["doc_id"])
    return [
        (float(likelihood), str(greedy) == "True")
        for sample in samples
        for ((likelihood, greedy),) in sample["resps"]
    ]


def report(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> int:
    """Prints the comparison; returns the exit code."""
    differences = [abs(a - b) for (a, _), (b, _) in zip(ours, theirs, strict=True)]
    greedy = sum(a == b for (_, a), (_, b) in zip(ours, theirs, strict=True))
    mean, lowest, highest = sum(differences) / len(differences), min(ours)[0], max(ours)[0]
    print(f"{len(differences)} continuations, log-likelihoods {lowest:.3f} to {highest:.3f}")
    print(f"largest difference {max(differences):.2e}, mean {mean:.2e}")
    print(f"the same verdict on greedy decoding for {greedy}")
    return int(max(differences) > LIMIT or greedy < len(differences))


if __name__ == "__main__":
    sys.exit(main())
