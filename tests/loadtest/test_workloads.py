from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from loadtest.plan import UsageError
from loadtest.workloads import NAMES, WorkloadSize, load, parse_jsonl

SIZE = WorkloadSize(count=12, words=(40, 80), groups=3, seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_every_workload_is_made_from_its_seed(name: str) -> None:
    prompts = load(name, SIZE)
    assert prompts == load(name, SIZE)
    assert prompts != load(name, WorkloadSize(12, (40, 80), 3, seed=2))
    assert all(turn for prompt in prompts for turn in prompt.turns)
    assert len(set(prompts)) == len(prompts)


def test_the_built_in_prompts_are_many_and_varied() -> None:
    prompts = load("builtin", SIZE)
    assert len(prompts) >= 40
    assert len({prompt.category for prompt in prompts}) >= 10
    assert any(len(prompt.turns) == 2 for prompt in prompts)
    assert any(prompt.prediction for prompt in prompts)


def test_random_prompts_have_the_lengths_asked_for() -> None:
    lengths = [len(prompt.turns[0].split()) for prompt in load("random", SIZE)]
    framing = 9  # "Note 1." and "Continue this note in the same style."
    assert all(40 <= length - framing <= 80 for length in lengths)
    assert len(set(lengths)) > 3


def test_shared_prefixes_fall_into_groups_and_differ_after_them() -> None:
    prompts = [prompt.turns[0] for prompt in load("shared-prefix", SIZE)]
    prefixes = {prompt.split("\n\n")[0] for prompt in prompts}
    assert len(prefixes) == 3
    assert all(len(prefix.split()) >= 40 for prefix in prefixes)
    assert len({prompt.split("\n\n")[1] for prompt in prompts}) == len(prompts)


def test_code_edits_hold_a_file_of_valid_python_as_prediction() -> None:
    for prompt in load("code-edit", SIZE):
        assert prompt.prediction is not None
        assert prompt.prediction in prompt.turns[0]
        module = ast.parse(prompt.prediction)
        names = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        assert any(f"`{name}`" in prompt.turns[0] for name in names)


def test_repetitive_prompts_repeat_a_line() -> None:
    lines = load("repetitive", SIZE)[0].turns[0].split("\n")[1:]
    patterns = {line.partition("number")[0].partition(". ")[2] for line in lines if ". The" in line}
    assert len(patterns) == 1


def test_reads_prompt_lines_and_spec_bench_lines(tmp_path: Path) -> None:
    lines = [
        {"prompt": "one\u2028line", "max_tokens": 9},
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
    ]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps(x, ensure_ascii=False) for x in lines) + "\n\n", "utf-8")
    prompts = {prompt.turns: prompt for prompt in load(str(path), SIZE)}
    assert prompts["one\u2028line",].max_tokens == 9
    assert prompts["first", "second"].category == "writing"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: a prompt is a JSON object"),
        ('{"text": "x"}', 'needs "prompt"'),
        ('{"prompt": ""}', "none empty"),
        ('{"turns": ["a", 3]}', 'needs "prompt"'),
        ('{"prompt": "a", "max_tokens": 0}', '"max_tokens" is 0'),
        ('{"prompt": "a", "prediction": 1}', '"prediction" must be a text'),
    ],
)
def test_a_bad_line_is_named(line: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_jsonl(['{"prompt": "fine"}', line], "x.jsonl")


def test_an_empty_or_missing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="holds no prompts"):
        load(str(tmp_path / "empty.jsonl"), SIZE)
    with pytest.raises(UsageError, match=r"neither a readable JSONL file .* nor one of builtin"):
        load(str(tmp_path / "none.jsonl"), SIZE)
