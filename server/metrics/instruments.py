"""Metrics that carry the name of the served model."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_MODEL = "model_name"


class Instruments:
    """Makes metrics that carry the served model's name.

    Args:
        registry: where they are registered.
        model_name: the only value of their `model_name` label.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self.model_name = model_name

    def counter(self, name: str, text: str) -> Counter:
        """A counter; `name` without its ``_total``."""
        return Counter(name, text, [_MODEL], registry=self.registry).labels(self.model_name)

    def gauge(self, name: str, text: str) -> Gauge:
        """A gauge."""
        return Gauge(name, text, [_MODEL], registry=self.registry).labels(self.model_name)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        """A histogram with the given upper bounds."""
        return Histogram(name, text, [_MODEL], registry=self.registry, buckets=buckets).labels(
            self.model_name
        )

    def labelled_counter(self, name: str, text: str, label: str) -> Counter:
        """A counter with one more label; use `.labels(model_name, value)`."""
        return Counter(name, text, [_MODEL, label], registry=self.registry)
