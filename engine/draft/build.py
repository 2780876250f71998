"""From registry entries to drafters that work: their models, their stores, one portfolio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from engine.cache.pages import PagePool
from engine.config import EngineConfig
from engine.draft import registry
from engine.draft.drafter import Drafter, DrafterTraits
from engine.draft.entry import DrafterContext, DrafterEntry, OwnModel, PagedModel
from engine.draft.portfolio import DrafterPortfolio
from engine.errors import ConfigurationError
from engine.model.loader import LoadedModel
from engine.model.passes import can_branch


def load_models(config: EngineConfig, report: Callable[[str], None]) -> dict[str, LoadedModel]:
    """The models that wanted drafters run, by drafter.

    Raises:
        ConfigurationError: a drafter or its model is not known, or it does not fit the target.
    """
    models = {}
    for entry in registry.wanted(config.speculation):
        if entry.model is not None:
            own = entry.model.config(config.speculation)
            if own is None:
                raise _lacks_model(entry.name, entry.model)
            report(f"Loading the model of drafter {entry.name}")
            entry.model.check(Path(config.model.path), Path(own.path))
            models[entry.name] = entry.model.load(own)
    return models


def make_portfolio(
    config: EngineConfig,
    entries: Seq[DrafterEntry],
    target: PagedModel,
    models: Mapping[str, PagedModel],
    pool: PagePool,
) -> DrafterPortfolio:
    """The drafters of these entries.

    Args:
        models: those that drafters run, by drafter.

    Raises:
        ConfigurationError: a drafter lacks its model, or the target cannot check trees.
    """
    nodes = config.speculation.max_nodes
    if nodes and not can_branch(target.runner):
        raise ConfigurationError(
            f"max_nodes is {nodes}, but the {target.model.runner_name} runner checks drafts that "
            "do not branch; leave it at 0, or choose another runner."
        )
    drafters: dict[str, Drafter] = {}
    traits: dict[str, DrafterTraits] = {}
    for entry in entries:
        own = models.get(entry.name)
        if entry.model is not None and own is None:
            raise _lacks_model(entry.name, entry.model)
        layers = _features(entry, own, target.model.shape.num_layers)
        traits[entry.name] = DrafterTraits(
            layers, entry.reads_predictions, entry.reads_grammars, entry.branches
        )
        drafters[entry.name] = entry.make(DrafterContext(config, target, pool, layers, own))
    return DrafterPortfolio(
        drafters, target.model.vocab_size, traits, trees=can_branch(target.runner)
    )


def _features(entry: DrafterEntry, own: PagedModel | None, num_layers: int) -> tuple[int, ...]:
    """Layers of the target that a drafter is shown; of a head, its checkpoint says which."""
    taps = None if own is None else own.model.taps
    return entry.features(num_layers) if taps is None else taps(num_layers)


def _lacks_model(name: str, model: OwnModel) -> ConfigurationError:
    return ConfigurationError(f"drafter is {name}, but no {model.setting} is set; name one.")
