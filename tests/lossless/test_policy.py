"""Which rule judges whose drafts."""

from __future__ import annotations

import pytest

from engine.build import assemble
from engine.config import SpeculationConfig
from engine.errors import ConfigurationError
from engine.types import SamplingParams
from engine.verification import UNSEEDED, choose_rule
from server.cli.settings import Settings
from tests.fakes import load_fake, make_engine

SAMPLED = SamplingParams(temperature=0.9)


@pytest.mark.parametrize("policy", ["auto", "match", "rejection", "block"])
def test_greedy_and_seeded_requests_are_always_matched(policy: str) -> None:
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-6),
        SamplingParams(top_p=0.0),
        SamplingParams(seed=0),
        SamplingParams(seed=-7, temperature=2.0, n=3),
    ):
        assert choose_rule(policy, params) == "match"
    assert choose_rule(policy, SAMPLED) == (UNSEEDED if policy == "auto" else policy)


def test_every_sequence_of_an_engine_has_its_rule() -> None:
    settings = Settings(verification="rejection", kv_cache_memory="1MiB")
    built = assemble(settings.engine_config("x"), load_fake())
    assert built.engine.parts.judge.rule_for(SAMPLED) == "rejection"
    assert built.engine.parts.judge.rule_for(SamplingParams(seed=1)) == "match"
    assert make_engine().engine.parts.judge.rule_for(SAMPLED) == UNSEEDED


def test_another_rule_is_a_mistake() -> None:
    with pytest.raises(ConfigurationError, match="verification is 'typical'; choose one of auto"):
        SpeculationConfig(verification="typical")
