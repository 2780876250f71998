"""Every drafter there is: the only place that knows their names.

To add one, write its file and `register` an entry, here or from outside: settings, requests,
loading, stores, calibration, portfolio and `specserve doctor` go by the entries. Importing this
needs no torch: factories import what they build when they are called.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import NO_DRAFTER, ModelConfig, SpeculationConfig
from engine.draft.drafter import Drafter
from engine.draft.entry import DrafterContext, DrafterEntry, OwnModel
from engine.errors import ConfigurationError

if TYPE_CHECKING:
    from engine.model.loader import LoadedModel


def _make_lookup(context: DrafterContext) -> Drafter:
    from engine.draft.lookup import make_drafter

    return make_drafter(context)


def _make_model(context: DrafterContext) -> Drafter:
    from engine.draft import model, tree_model
    from engine.model.passes import can_branch

    assert context.own is not None
    if context.config.speculation.max_nodes and can_branch(context.own.runner):
        return tree_model.make_drafter(context)
    return model.make_drafter(context)


def _make_grammar(context: DrafterContext) -> Drafter:
    from engine.draft.grammar import make_drafter

    return make_drafter(context)


def _check_pair(target: Path, draft: Path) -> None:
    from engine.model.pairing import check_pair

    check_pair(target, draft)


def _load_model(config: ModelConfig) -> LoadedModel:
    from engine.model.checked import load_checked

    return load_checked(Path(config.path), config)


def _make_eagle(context: DrafterContext) -> Drafter:
    from engine.draft.heads.eagle import make_drafter

    return make_drafter(context)


def _check_head(target: Path, head: Path) -> None:
    from engine.draft.heads.config import check_head

    check_head(target, head)


def _load_head(config: ModelConfig) -> LoadedModel:
    from engine.draft.heads.runner import load_head

    return load_head(config)


_LOOKUP = DrafterEntry(
    name="lookup",
    summary="drafts from the text itself and so fits every model",
    make=_make_lookup,
    reads_predictions=True,
    always=True,
    branches=True,
)
_MODEL = DrafterEntry(
    name="model",
    summary="drafts with a smaller model that has the same tokenizer",
    make=_make_model,
    model=OwnModel(
        setting="draft_model",
        config=lambda speculation: speculation.draft_model,
        check=_check_pair,
        load=_load_model,
    ),
    branches=True,
)
_GRAMMAR = DrafterEntry(
    name="grammar",
    summary="drafts what a request's grammar forces, for requests that have one",
    make=_make_grammar,
    reads_grammars=True,
    always=True,
)
_EAGLE = DrafterEntry(
    name="eagle",
    summary="drafts with a head on the target's own hidden states",
    make=_make_eagle,
    model=OwnModel(
        setting="draft_head",
        config=lambda speculation: speculation.draft_head,
        check=_check_head,
        load=_load_head,
    ),
)

#: Drafter of a server that is told nothing.
DEFAULT = _LOOKUP.name

_entries = {entry.name: entry for entry in (_LOOKUP, _MODEL, _EAGLE, _GRAMMAR)}


def register(entry: DrafterEntry) -> None:
    """Makes a drafter known to settings and engines that are made from now on.

    Raises:
        ValueError: the name is taken, or no word of letters, digits, "-" and "_".
    """
    name = entry.name
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"{name!r} cannot name a drafter; use letters, digits, - and _")
    if name in choices():
        raise ValueError(f"a drafter called {name} is registered already; take another name")
    _entries[name] = entry


def unregister(name: str) -> None:
    """Takes back `register`; an unknown name is a KeyError."""
    del _entries[name]


def choices() -> tuple[str, ...]:
    """What may be set as a drafter: all names, and the word for nobody."""
    return (*_entries, NO_DRAFTER)


def get(name: str) -> DrafterEntry:
    """The entry of a drafter.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if name not in _entries:
        raise ConfigurationError(f"drafter is {name!r}; choose one of {', '.join(choices())}.")
    return _entries[name]


def default_drafters(speculation: SpeculationConfig) -> tuple[str, ...]:
    """Drafters of requests that do not name one, at least one name; the word for nobody stands
    alone.

    Raises:
        ConfigurationError: a drafter is unknown.
    """
    names = speculation.drafters or (speculation.drafter or DEFAULT,)
    for name in names:
        if name != NO_DRAFTER:
            get(name)
    return names


def wanted(
    speculation: SpeculationConfig, loaded: Collection[str] = ()
) -> tuple[DrafterEntry, ...]:
    """What an engine with these settings has: the drafters they name, those that cost nothing,
    and of those that run a model the ones whose model is set. A setting that several could take
    their model from goes to those that are named, else to the one that was registered first.

    Args:
        loaded: drafters whose models are in memory already, whatever the settings say.

    Raises:
        ConfigurationError: a drafter is unknown.
    """
    names = default_drafters(speculation)
    if names == (NO_DRAFTER,):
        return ()
    taken = {own.setting for name in names if (own := get(name).model)}
    chosen = []
    for entry in _entries.values():
        own = entry.model
        named = entry.name in names or entry.name in loaded or entry.always
        if own is not None and own.setting not in taken:
            named |= own.config(speculation) is not None
            taken.add(own.setting)
        if named:
            chosen.append(entry)
    return tuple(chosen)
