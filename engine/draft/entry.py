"""What the registry knows of a drafter, and what a drafter is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig, ModelConfig, SpeculationConfig
from engine.draft.drafter import Drafter

if TYPE_CHECKING:
    from engine.cache.pages import PagePool
    from engine.model.loader import LoadedModel
    from engine.model.passes import Runner


@dataclass(frozen=True, slots=True)
class OwnModel:
    """A model that a drafter runs: it is timed at start, as the target is, and keeps K/V of its
    own on the shared pages, in the store whose index its factory is given.

    Attributes:
        setting: what names the model, for messages.
        config: of the model, from the settings; None = it is not set.
        check: (target's directory, its own) -> None; raises ConfigurationError if they do not
            fit together.
        load: brings it into memory.
    """

    setting: str
    config: Callable[[SpeculationConfig], ModelConfig | None]
    check: Callable[[Path, Path], None]
    load: Callable[[ModelConfig], LoadedModel]


@dataclass(frozen=True, slots=True)
class PagedModel:
    """A model in memory, what runs it, and the index of its K/V store on the shared pages."""

    model: LoadedModel
    runner: Runner
    store: int


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a factory builds from.

    Attributes:
        config: of the engine.
        target: the model that answers.
        pool: the shared pages.
        features: layers of the target whose hidden states the drafter will be shown.
        own: the model that it runs itself, if its entry has one.
    """

    config: EngineConfig
    target: PagedModel
    pool: PagePool
    features: tuple[int, ...] = ()
    own: PagedModel | None = None


def _no_features(_num_layers: int) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    """One kind of drafter.

    Attributes:
        name: for flags, requests and metrics.
        summary: what it drafts from, to be read after its name.
        make: builds it; imports what is heavy only when called.
        reads_predictions: whether it drafts from a request's `prediction`; such drafters join
            those of every request that has one.
        reads_grammars: the same of a request's grammar.
        always: whether it is there for requests that name it even if the settings do not, as
            it costs nothing until then.
        features: number of the target's layers -> layers whose hidden states it is shown after
            every pass; 0 = the embeddings, i = what the i-th decoder layer puts out.
        model: the model it runs, if it does.
        branches: whether its drafts may branch, if `max_nodes` allows it; lengths are budgets of
            nodes then.
    """

    name: str
    summary: str
    make: Callable[[DrafterContext], Drafter]
    reads_predictions: bool = False
    reads_grammars: bool = False
    always: bool = False
    features: Callable[[int], tuple[int, ...]] = _no_features
    model: OwnModel | None = None
    branches: bool = False
