"""A new drafter is one file and one entry: settings, requests, loading and serving follow."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import prepare
from engine.build import BuiltEngine, assemble
from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.draft import registry
from engine.draft.build import load_models
from engine.draft.entry import DrafterContext, DrafterEntry, OwnModel
from engine.draft.model import ModelDrafter, make_drafter
from engine.errors import ConfigurationError, InvalidRequest
from engine.types import SpeculationParams
from server.cli.configure import load_settings
from server.cli.doctor import _drafter as drafter_findings
from server.cli.settings import Settings
from tests.drafters import ScriptedDrafter
from tests.fakes import Run, ask, load_fake, run
from tests.tiny_models import load

ROOT = Path(__file__).parents[2]


class Toy(ScriptedDrafter):
    """Says the last token again."""

    name = "toy"

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(lambda s, n: s.tokens[-1:] * n)
        self.context = context


MADE: list[DrafterContext] = []


def make_toy(context: DrafterContext) -> Toy:
    MADE.append(context)
    return Toy(context)


TOY = DrafterEntry("toy", "says the last token again", make_toy)


@pytest.fixture
def toy(request: pytest.FixtureRequest) -> Iterator[DrafterEntry]:
    """A third drafter, with the fields that a test wants, known for as long as the test runs."""
    entry = dataclasses.replace(TOY, **getattr(request, "param", {}))
    registry.register(entry)
    MADE.clear()
    yield entry
    registry.unregister(entry.name)


def serving(**settings: object) -> BuiltEngine:
    """A fake target behind these settings, always drafting."""
    chosen = load_settings(None, {}, {"speculation": "fixed", **settings})
    config = dataclasses.replace(
        chosen.engine_config("x"), cache=CacheConfig(page_size=4, num_pages=200)
    )
    return assemble(config, load_fake())


def asked(speculation: SpeculationParams | None = None):
    return [ask(f"r{i}", (7, 7, 7, i), 20, speculation, ignore_eos=True) for i in range(3)]


def texts(done: Run) -> list[object]:
    return [done.said(request_id) for request_id in done.requests]


# -- from the flag to the answer ---------------------------------------------------------------


def test_a_drafter_that_nobody_registered_is_refused() -> None:
    for setting in ("drafter", "drafters"):
        with pytest.raises(ConfigurationError, match=r"drafter is 'toy': choose from .*, none"):
            load_settings(None, {}, {setting: "toy"})
    config = EngineConfig(ModelConfig("x"), speculation=SpeculationConfig(drafter="toy"))
    with pytest.raises(ConfigurationError, match=r"drafter is 'toy'; choose one of .*, none"):
        assemble(config, load_fake())


@pytest.mark.usefixtures("toy")
def test_a_registered_drafter_serves() -> None:
    plain = run(serving(drafter="none"), asked())
    for settings in ({"drafter": "toy"}, {"drafters": "toy,lookup"}, {"drafters": "lookup,toy"}):
        built = serving(**settings)
        assert "toy" in built.info.drafters
        assert set(built.engine.speculation()["drafters"]) == {"lookup", "grammar", "toy"}
        pinned = SpeculationParams(drafter="toy")
        done = run(built, asked(pinned))
        assert texts(done) == texts(plain)
        assert sum(sum(s.drafted_by_position) for s in done.stats) > 0
    assert texts(run(serving(drafter="toy"), asked())) == texts(plain)
    assert MADE[0].own is None
    assert MADE[0].features == ()
    for settings in (Settings(drafter="toy"), Settings(drafters="toy,lookup")):  # type: ignore[arg-type]
        told = [text for _, text, _ in drafter_findings(settings, None)]
        assert told[0] == "toy: says the last token again"


@pytest.mark.usefixtures("toy")
def test_a_drafter_that_is_not_loaded_cannot_be_asked_for() -> None:
    built = serving(drafter="lookup")
    assert built.info.drafters == ("lookup", "grammar")
    with pytest.raises(InvalidRequest, match="but this server has: lookup, grammar, none"):
        built.rules.validate(asked(SpeculationParams(drafter="toy"))[0])


@pytest.mark.parametrize("toy", [{"always": True, "reads_predictions": True}], indirect=True)
@pytest.mark.usefixtures("toy")
def test_who_reads_predictions_joins_requests_that_have_one() -> None:
    built = serving(drafter="lookup")
    assert built.info.drafters == ("lookup", "grammar", "toy")
    built.engine.add(asked(SpeculationParams(prediction=(1, 2)))[0])
    built.engine.add(dataclasses.replace(asked()[0], request_id="without"))
    drafters = [s.drafters for s in built.engine.parts.scheduler.waiting]
    assert drafters == [("lookup", "toy"), ("lookup",)]


# -- models of their own -------------------------------------------------------------------------

OWN = OwnModel(
    setting="draft_model",
    config=lambda speculation: speculation.draft_model,
    check=lambda _target, _own: None,
    load=lambda _config: load("llama"),
)
WITH_MODEL = {"make": make_drafter, "model": OWN}


@pytest.mark.parametrize("toy", [WITH_MODEL], indirect=True)
@pytest.mark.usefixtures("toy")
def test_two_drafters_with_models_have_a_store_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are the target itself, so that a store that is not kept to shows in acceptance."""
    timed: list[str] = []

    def no_calibration(path, *_, **__):
        timed.append(path)

    monkeypatch.setattr(prepare, "load_calibration", no_calibration)
    target = load("llama")
    small = SpeculationConfig(drafters=("toy", "model"), draft_model=ModelConfig("small"))
    config = EngineConfig(
        ModelConfig("large"), CacheConfig(page_size=4, num_pages=200), speculation=small
    )
    assemble(config, target, {"model": target, "toy": target}, prepare=True)
    assert timed == ["small", "small", "large"]
    fixed = dataclasses.replace(config, speculation=dataclasses.replace(small, mode="fixed"))
    built = assemble(fixed, target, {"model": target, "toy": target})
    assert built.engine.parts.pool.num_stores == 3
    own = [d for d in built.engine.parts.drafters._drafters.values() if isinstance(d, ModelDrafter)]
    assert sorted(d.limits.store for d in own) == [1, 2]
    assert own[0].runner.store is not own[1].runner.store
    for name in ("toy", "model"):
        done = run(built, asked(SpeculationParams(drafter=name)), check=True)
        ends = [a.choices[0].end for a in done.answers.values()]
        assert all(end.stats.accepted_tokens == end.stats.draft_tokens > 0 for end in ends)


@pytest.mark.parametrize("toy", [WITH_MODEL], indirect=True)
@pytest.mark.usefixtures("toy")
def test_a_model_goes_to_the_drafter_that_is_named() -> None:
    def names(**speculation: object) -> list[str]:
        return [e.name for e in registry.wanted(SpeculationConfig(**speculation))]

    small = ModelConfig("small")
    assert names() == names(drafter="lookup") == ["lookup", "grammar"]
    assert names(drafter="none", draft_model=small) == []
    assert names(draft_model=small) == ["lookup", "model", "grammar"]  # whom a request may name
    assert names(drafter="toy", draft_model=small) == ["lookup", "grammar", "toy"]
    both = names(drafters=("model", "toy"), draft_model=small)
    assert both == ["lookup", "model", "grammar", "toy"]
    config = EngineConfig(
        ModelConfig("x"), speculation=SpeculationConfig(drafter="toy", draft_model=small)
    )
    assert list(load_models(config, lambda _: None)) == ["toy"]


def test_a_drafter_without_its_model_says_which_setting_is_missing() -> None:
    config = EngineConfig(ModelConfig("x"), speculation=SpeculationConfig(drafter="model"))
    for start in (
        lambda: load_models(config, lambda _: None),
        lambda: assemble(config, load_fake()),
    ):
        with pytest.raises(ConfigurationError, match="drafter is model, but no draft_model is set"):
            start()


# -- the registry itself -------------------------------------------------------------------------


@pytest.mark.usefixtures("toy")
def test_names_are_taken_once_and_are_words() -> None:
    for name, problem in (
        ("lookup", "registered already"),
        ("none", "registered already"),
        ("toy", "registered already"),
        ("", "cannot name a drafter"),
        ("a,b", "cannot name a drafter"),
    ):
        with pytest.raises(ValueError, match=problem):
            registry.register(dataclasses.replace(TOY, name=name))
    assert registry.choices() == ("lookup", "model", "eagle", "grammar", "toy", "none")


def test_no_other_file_spells_a_drafters_name() -> None:
    """ "model" is a common word, so only the other one is looked for."""
    home = {"engine/draft/registry.py", "engine/draft/lookup.py"}
    for path in sorted(p for part in ("engine", "server") for p in (ROOT / part).rglob("*.py")):
        if str(path.relative_to(ROOT)) not in home:
            for node in ast.walk(ast.parse(path.read_text())):
                is_name = isinstance(node, ast.Constant) and node.value == registry.DEFAULT
                assert not is_name, f"{path} spells {registry.DEFAULT!r}"
