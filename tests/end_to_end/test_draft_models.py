"""A server with a draft model of its own and two tenants: every drafter and every penalty in one
batch, and nobody learns from caches what others have sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.end_to_end.conftest import ALWAYS, Serve
from tests.end_to_end.serving import Server, said
from tests.tiny import Weights, write_gguf

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
OFF = {"speculation": {"enabled": False}}


@pytest.fixture(scope="module")
def server(serve_tiny: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Asked with Alice's key. The draft model has learned something else than the target."""
    draft = write_gguf(tmp_path_factory.mktemp("draft") / "draft.gguf", weights=Weights(seed=1))
    flags = (*ALWAYS, "--dtype", "float32", "--max-draft", "8", "--lookup-store-memory", "8MiB")
    drafting = ("--drafter", "model", "--draft-model", str(draft))
    keys = {"SPECSERVE_API_KEYS": f"alice:{ALICE},bob:{BOB}", "SPECSERVE_OPEN_METRICS": "true"}
    with serve_tiny(*flags, *drafting, environment=keys) as server:
        yield server.called_with(ALICE)


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": -0.7},
    {"repetition_penalty": 0.7, "frequency_penalty": 2, "logit_bias": {"68": 3}},
    {"repetition_penalty": 100, "presence_penalty": -2, "min_tokens": 9, "bad_words": ["B"]},
]


@pytest.mark.bad_input(17)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 8}])
def test_penalties_with_every_drafter_and_length_in_one_batch(
    server: Server, sampling: dict[str, Any]
) -> None:
    few = {"allowed_token_ids": [68, 69, 70, 200], "ignore_eos": True, "return_token_ids": True}
    base = {"prompt": "a b a b a b", "max_tokens": 40, **sampling, **few}
    wanted = [said(server.complete({**base, **each, **OFF})) for each in PENALTIES]
    assert len({str(answer) for answer in wanted}) > 2
    predicted = {"prediction": {"type": "content", "content": wanted[0][0][0]}}
    methods: list[dict[str, Any]] = [
        {**extra, "speculation": {"drafter": drafter, "max_draft": length}}
        for drafter, extra in (("model", {}), ("lookup", {}), ("lookup", predicted))
        for length in range(1, 9)
    ]
    asked = [
        (number, {**base, **PENALTIES[number], **method})
        for turn, method in enumerate(methods)
        for number in {turn % 4, (turn + 1 + turn // 4) % 4}
    ]
    answers = server.complete_all([body for _, body in asked])
    assert [said(answer) for answer in answers] == [wanted[number] for number, _ in asked]
    for drafter in ("model", "lookup"):
        told = [
            answer["speculation"]
            for answer, (_, body) in zip(answers, asked, strict=True)
            if body["speculation"]["drafter"] == drafter
        ]
        assert sum(one["drafted"] for one in told) > sum(one["accepted"] for one in told) > 0


@pytest.mark.bad_input(57)
def test_nobody_learns_from_the_cache_what_others_sent(server: Server) -> None:
    """Neither from `cached_tokens` nor from the work that a known prompt saves, which is what
    its time tells; while the same tenant with the same salt does hit."""
    body = {"prompt": "a secret that only Alice knows, " * 8, "max_tokens": 2, "temperature": 0}
    bob = server.called_with(BOB)

    def ask(server: Server, **extra: str) -> tuple[int, float]:
        before = server.wait_until_idle()["vllm:iteration_tokens_total_sum"]
        usage = server.complete({**body, **extra})["usage"]
        after = server.wait_until_idle()["vllm:iteration_tokens_total_sum"]
        return usage["prompt_tokens_details"]["cached_tokens"], after - before

    first = ask(server)
    assert first[0] == 0
    assert first[1] > 256, "the whole prompt was computed"
    known = ask(server)
    assert known[0] >= 240
    assert known[1] < 20
    for other, salt in ((bob, {}), (server, {"cache_salt": "s"}), (bob, {"cache_salt": "s"})):
        assert ask(other, **salt) == first
        assert ask(other, **salt) == known


@pytest.mark.bad_input(57)
def test_nobody_is_answered_sooner_for_what_others_were_told(server: Server) -> None:
    """Drafts come from the tenant's own past answers: a stranger's passes are those of the first
    time, however often Alice has been told the same."""
    body = {"prompt": "another of Alice's secrets", "max_tokens": 60, "temperature": 0.8,
            "seed": 9, "speculation": {"drafter": "lookup"}}  # fmt: skip
    first, *later = (server.complete(body) for _ in range(3))
    strangers = server.called_with(BOB).complete(body), server.complete({**body, "cache_salt": "s"})
    for stranger in strangers:
        assert said(stranger) == said(first)
        assert work(stranger) == work(first)
    assert {str(said(answer)) for answer in later} == {str(said(first))}
    assert work(later[-1])["target_passes"] < work(first)["target_passes"], "nothing to be learned"


def work(answer: dict[str, Any]) -> dict[str, int]:
    """What an answer took, but for its time."""
    return {name: answer["speculation"][name] for name in ("drafted", "accepted", "target_passes")}
