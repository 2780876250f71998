from __future__ import annotations

import pytest

from loadtest.options import parse
from loadtest.plan import Level, Target, UsageError


def test_works_without_any_option() -> None:
    options = parse(["run"])
    assert options.targets == (Target("server", "http://127.0.0.1:8000"),)
    assert options.levels == (Level("concurrency", 1),)
    assert (options.rounds, options.requests_at(Level("concurrency", 1))) == (1, 8)
    assert options.requests_at(Level("concurrency", 16)) == 64


def test_targets_have_names_and_lose_a_trailing_v1() -> None:
    options = parse(["run", "--target", "a=http://h:1/v1/", "--target", "b=https://h/x"])
    assert options.targets == (Target("a", "http://h:1"), Target("b", "https://h/x"))
    assert parse(["run", "--target", "http://h:1/?a=b"]).targets[0].name == "server"


def test_ab_puts_speculation_off_first_and_takes_six_rounds() -> None:
    options = parse(["run", "--ab", "speculation", "--concurrency", "1,4,16"])
    assert [dict(arm.body) for arm in options.arms] == [
        {"speculation": {"enabled": False}},
        {"speculation": {"enabled": True}},
    ]
    assert options.rounds == 6
    assert [level.value for level in options.levels] == [1, 4, 16]


def test_arms_are_json() -> None:
    options = parse(["run", "--arm", "a={}", "--arm", 'b={"top_k": 5}', "--rate", "0.5,2"])
    assert [(arm.name, dict(arm.body)) for arm in options.arms] == [("a", {}), ("b", {"top_k": 5})]
    assert [str(level) for level in options.levels] == ["rate 0.5/s", "rate 2/s"]


def test_time_alone_may_bound_a_run() -> None:
    assert parse(["run", "--duration", "5"]).requests_at(Level("concurrency", 1)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ab", "speculation", "--arm", "a={}"], "use one of them"),
        (["--arm", "a={}", "--arm", "a={}"], "the name 'a' twice"),
        (["--target", "http://a", "--target", "http://b"], "the name 'server' twice"),
        (["--check-equal"], "needs two targets or arms"),
        (["--template", "chatml"], "Add --endpoint completions"),
        (["--arm", 'a={"stream": false}'], "--arm a sets 'stream'"),
        (["--body", '{"n": 2}'], "--body sets 'n'"),
    ],
)
def test_contradictions_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse(["run", *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--target", "a=localhost:80"],
        ["--target", "http://user:secret@host"],
        ["--concurrency", "0"],
        ["--concurrency", "1,x"],
        ["--concurrency", "1", "--rate", "1"],
        ["--rate", "nan"],
        ["--rate", "-1"],
        ["--duration", "inf"],
        ["--max-tokens", "9:3"],
        ["--arm", "a"],
        ["--arm", "a=[1]"],
        ["--arm", "a={"],
        ["--warmup", "-1"],
        ["--max-error-rate", "-0.1"],
    ],
)
def test_bad_values_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["run", *arguments])
    assert caught.value.code == 2
    assert arguments[-2] in capsys.readouterr().err or "--rate" in arguments
