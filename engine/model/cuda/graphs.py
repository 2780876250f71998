"""CUDA graphs of passes by their shape; on a CPU, direct calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

#: Rows that passes are padded to: each number up to 8, then steps of at most a quarter.
_EARLY = 8


def padded_rows(count: int, most: int) -> int:
    """The smallest size of a graph that holds `count` rows, at most `most`."""
    if count <= _EARLY:
        return max(1, count)
    step = 1 << (count - 1).bit_length() - 3
    return min(most, -(-count // step) * step)


class Graphs:
    """Runs work of fixed shape: launches are recorded once, and replayed by one call.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def ready(self, key: Hashable, work: Callable[[], None]) -> Callable[[], None]:
        """What does the work.

        Args:
            key: equal keys mean equal launches on equal addresses.
            work: nothing but launches; doing it twice is doing it once.
        """
        if self._device.type != "cuda":
            return work
        if key not in self._graphs:
            self._graphs[key] = self._record(work)
        return self._graphs[key].replay

    def _record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        work()  # compiles what is new, and has libraries take their memory
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        others = next(iter(self._graphs.values()), None)
        with torch.cuda.graph(graph, pool=others.pool() if others is not None else None):
            work()
        return graph
