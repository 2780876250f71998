from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loadtest.asking import Asking, build_body, check_overlay, format_text
from loadtest.plan import Arm, Lane, Prompt, Target, UsageError
from tests.loadtest.making import OFF, ON, TARGET

PROMPT = Prompt(("Hello?",), prediction="Hello!")
MESSAGES = [("user", "Hello?")]


def body(asking: Asking, lane: Lane = OFF, prompt: Prompt = PROMPT, index: int = 0) -> Any:
    return build_body(asking, lane, prompt, index, MESSAGES)


def test_streams_with_usage() -> None:
    made = body(Asking())
    assert made["stream"] is True
    assert made["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert made["messages"] == [{"role": "user", "content": "Hello?"}]
    assert made["model"] == "m"
    assert "prompt" not in made


def test_running_usage_is_not_asked_of_a_server_that_refuses_it() -> None:
    lane = replace(OFF, target=replace(TARGET, continuous_usage=False))
    assert body(Asking(), lane)["stream_options"] == {"include_usage": True}


def test_lanes_ask_the_same_but_for_their_arm() -> None:
    asking = Asking(max_tokens=(5, 500), temperature=0.7)
    on = replace(ON, arm=Arm("on", {"speculation": {"enabled": True}}))
    for index in range(20):
        difference = body(asking, on, index=index)
        assert difference.pop("speculation") == {"enabled": True}
        assert difference == body(asking, OFF, index=index)


def test_requests_differ_in_seed_and_drawn_length() -> None:
    made = [body(Asking(max_tokens=(5, 500)), index=index) for index in range(20)]
    assert len({request["seed"] for request in made}) == 20
    assert len({request["max_tokens"] for request in made}) > 10
    assert all(5 <= request["max_tokens"] <= 500 for request in made)


def test_a_prompts_own_limit_wins() -> None:
    assert body(Asking(), prompt=Prompt(("x",), max_tokens=3))["max_tokens"] == 3


def test_completions_are_raw_or_chatml() -> None:
    talk = [("user", "Hi"), ("assistant", "Yes?"), ("user", "Bye")]
    assert format_text(Asking(endpoint="completions"), talk) == "Hi\n\nYes?\n\nBye"
    assert format_text(Asking(endpoint="completions", template="chatml"), talk) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    made = body(Asking(endpoint="completions"))
    assert made["prompt"] == "Hello?"
    assert "messages" not in made


def test_a_prediction_goes_with_its_arm_only() -> None:
    arm = Lane("p", Target("t", "http://t"), Arm("p", prediction=True))
    assert body(Asking(), arm)["prediction"] == {"type": "content", "content": "Hello!"}
    assert "prediction" not in body(Asking(), arm, prompt=Prompt(("x",)))
    assert "prediction" not in body(Asking())


def test_the_arm_overrides_the_run() -> None:
    lane = replace(OFF, arm=Arm("a", {"top_k": 5}))
    made = body(Asking(body={"top_k": 1, "min_p": 0.1}, ignore_eos=True), lane)
    assert (made["top_k"], made["min_p"], made["ignore_eos"]) == (5, 0.1, True)


@pytest.mark.parametrize("field", ["stream", "n", "prompt", "messages", "model", "stream_options"])
def test_fields_that_would_break_the_measurement_are_refused(field: str) -> None:
    with pytest.raises(UsageError, match=f"--arm x sets '{field}'"):
        check_overlay("--arm x", {field: 1})
