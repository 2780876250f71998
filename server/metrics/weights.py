"""What the model's weights and its K/V are kept in."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge

from engine.types import EngineInfo


class WeightsMetrics:
    """Set once, when the engine has started.

    Args:
        registry: of the metrics.
        model_name: their label.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._name = model_name

        def gauge(name: str, what: str, *labels: str) -> Gauge:
            return Gauge(f"specserve_{name}", what, ["model_name", *labels], registry=registry)

        self._kinds = gauge(
            "weights_info", "What weights and K/V are kept in.", "weights", "kv_dtype"
        )
        self._bytes = gauge("weights_bytes", "Bytes of all weights.")
        # In bytes, since Prometheus knows no other unit of memory.
        self._per_weight = gauge("bytes_per_weight", "Bytes of a weight, on average.")
        self._kv = gauge("kv_bytes_per_token", "Bytes of keys and values of one token.")

    def describe(self, info: EngineInfo) -> None:
        """Publishes what the started engine runs with."""
        weights = info.weights
        self._kinds.labels(self._name, weights.kinds, info.kv_dtype).set(1)
        self._bytes.labels(self._name).set(weights.num_bytes)
        self._per_weight.labels(self._name).set(weights.bits / 8)
        self._kv.labels(self._name).set(info.kv_bytes_per_token)
