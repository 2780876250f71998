"""The attacks of `tools/attacks`: they do what they say, and this server does not mind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.end_to_end.serving import serving_tiny
from tools.attacks import attacks
from tools.attacks.__main__ import main, table
from tools.attacks.asking import late, told, words
from tools.attacks.servers import Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("attacked")
    with serving_tiny(directory, "--max-connections", "16") as made:
        yield Server(made.url, made.process.pid)


def test_texts_that_cannot_fit_are_refused_and_others_served(server: Server) -> None:
    found = asyncio.run(attacks.texts(server, prompts=2, characters=300_000))
    assert found["2 prompts of 0.3M characters"].startswith("2 × 400, the last after ")
    assert found["2 chats of 0.3M characters"].startswith("2 × 400, the last after ")
    assert found["memory that is left taken"].endswith(" MB")


def test_half_open_connections_leave_probes_alone(server: Server) -> None:
    found = asyncio.run(attacks.connections(server, count=40, seconds=0.3))
    assert found["half-open connections"] == "40, watched for 0 s"
    for path in ("/livez", "/health"):
        assert found[f"`{path}` failed"].startswith("0 of ")


def test_a_server_that_cannot_be_reached_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["texts", "--small", "--url", "http://127.0.0.1:9"]
    assert main(arguments) == 0
    assert "| what became of it | ConnectError" in capsys.readouterr().out


def test_versions_stand_side_by_side() -> None:
    shown = table("texts", {"before": {"a": "1 s", "b": "2"}, "after": {"a": "3 ms", "c": "4"}})
    assert shown.splitlines() == [
        "| texts | before | after |",
        "|---|---|---|",
        "| a | 1 s | 3 ms |",
        "| b | 2 |  |",
        "| c |  | 4 |",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["tea"], "no attack 'tea'"), (["--version", "a=/nowhere"], "is no checkout")],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_texts_are_as_long_as_they_should_be() -> None:
    assert len(words(19_000)) == 19_000
    assert words(1000) == words(1000)
    assert words(1000) != words(1000, seed=1)


def test_how_times_are_told() -> None:
    assert told(0.0123) == "12 ms"
    assert told(12.34) == "12.3 s"
    assert late([3.0, 1.0, 2.0], 100) == 3.0
    assert late(list(map(float, range(100)))) == 95.0
