"""What a pass is: the interface of everything that runs a model over packed batches.

Whoever wants to know what a pass took asks the pass. Only its runner can tell: a CPU is done
when `forward` returns, while a device has merely been told what to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol, TypeGuard

import torch

from engine.batch import Batch
from engine.cache.store import KVStore


@dataclass(frozen=True, slots=True)
class Pass:
    """What a pass over T query tokens computed. All tensors are valid until the runner's next
    pass, which may write over them.

    Attributes:
        logits: [num_logits, V], floating, in the runner's own type.
        seconds: what the pass took on its device; waits for it where it is still under way, so
            ask once the step has read its results anyway.
        features: by layer, for those that were asked for, the hidden states [T, hidden] of all
            query tokens in the batch's order, without padding rows; float32.
    """

    logits: torch.Tensor
    seconds: Callable[[], float]
    features: Mapping[int, torch.Tensor] = field(default_factory=dict)


class Runner(Protocol):
    """Runs a model over packed batches: `NativeRunner`, `CudaRunner` or `ModelRunner`."""

    store: KVStore
    #: Where the tensors of its batches have to be; the model itself may be elsewhere.
    device: torch.device
    #: Rows a pass needs at least, so that every row is computed alike.
    min_rows: int

    def forward(self, batch: Batch, features: tuple[int, ...] = ()) -> Pass:
        """One packed pass: writes the batch's K/V and computes the logits it asks for.

        Args:
            batch: the query tokens.
            features: layers whose hidden states are wanted: 0 is what enters the first decoder
                layer (the embeddings), i what leaves the i-th, up to the number of layers. The
                final norm is never applied. Nothing is kept or copied for layers not named.

        Raises:
            ValueError: `features` names a layer that the model does not have.
        """
        ...


class TreeRunner(Runner, Protocol):
    """One that also takes batches with drafts that branch."""

    #: Whether it does; a runner that does not say so is given chains only.
    branches: bool

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Moves the keys and values of all layers within the store, as if tokens had been fed to
        other slots in the first place.

        Args:
            sources: [N] int64 slots. They are read in order: none may be an earlier target.
            targets: [N] int64 slots.
        """
        ...


def can_branch(runner: Runner) -> TypeGuard[TreeRunner]:
    """Whether a runner takes batches with drafts that branch."""
    return bool(getattr(runner, "branches", False))


def check_layers(features: Seq[int], num_layers: int) -> None:
    """Refuses layers that a model of `num_layers` decoder layers does not have.

    Raises:
        ValueError: see there.
    """
    for layer in features:
        if not 0 <= layer <= num_layers:
            raise ValueError(
                f"features names layer {layer}, but this model has 0 (the embeddings) to "
                f"{num_layers} (the last layer, before the final norm); name one of those."
            )


def start_timer(device: torch.device) -> Callable[[], Callable[[], float]]:
    """Starts to time a pass.

    Returns:
        What ends it. That in turn returns what tells the seconds: on a CPU those between the
        two calls, on a device those between two events in its queue, which may lie ahead.
    """
    return _start_clock() if device.type == "cpu" else _start_events(device)


def _start_clock() -> Callable[[], Callable[[], float]]:
    began = time.perf_counter()

    def end() -> Callable[[], float]:
        seconds = time.perf_counter() - began
        return lambda: seconds

    return end


def _start_events(device: torch.device) -> Callable[[], Callable[[], float]]:
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    first.record()

    def end() -> Callable[[], float]:
        last.record()

        def seconds() -> float:
            last.synchronize()
            return 1e-3 * float(first.elapsed_time(last))

        return seconds

    return end
