"""Counters of the connector, in vLLM's log and in its Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = ["COUNTERS", "PoolPromMetrics", "PoolStats"]

COUNTERS = {
    "lookup_keys": "Blocks that the scheduler looked for in the pool",
    "lookup_hits": "Blocks that it found",
    "loaded_blocks": "Blocks copied out of the pool, per rank",
    "loaded_bytes": "Bytes copied out of the pool",
    "load_seconds": "Seconds spent in that",
    "load_failures": "Blocks that were found and could not be loaded: recomputed",
    "stored_blocks": "Blocks published in the pool, per rank",
    "stored_bytes": "Bytes copied into the pool",
    "store_seconds": "Seconds spent in that",
    "store_refused": "Blocks that the pool had no room for, or that were there already",
    "adopted_blocks": "Blocks of other processes that were used in place",
    "pool_failures": "Calls that found no pool",
}


@dataclass
class PoolStats(KVConnectorStats):
    """Sums since the last step; `data` is plain numbers by the names in COUNTERS."""

    def reset(self) -> None:
        """Forget."""
        self.data: dict[str, Any] = {}

    def add(self, name: str, value: float) -> None:
        """Count."""
        if value:
            self.data[name] = self.data.get(name, 0) + value

    def is_empty(self) -> bool:
        """Is there nothing to report?"""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> PoolStats:
        """With another role's, rank's or step's."""
        for name, value in other.data.items():
            self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM prints."""
        out: dict[str, int | float] = {name: round(self.data[name], 6) for name in COUNTERS if name in self.data}
        for verb in ("load", "store"):
            seconds, moved = self.data.get(f"{verb}_seconds", 0), self.data.get(f"{verb.rstrip('e')}ed_bytes", 0)
            if seconds and moved:
                out[f"{verb}_GB_per_s"] = round(moved / seconds / 1e9, 3)
        return out

    def take(self) -> PoolStats | None:
        """What was counted since the last time, or None."""
        if self.is_empty():
            return None
        taken = PoolStats(data=self.data)
        self.data = {}
        return taken


class PoolPromMetrics(KVConnectorPromMetrics):
    """`vllm:kvpool_*_total`, one counter for each name in COUNTERS, by engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvpool_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what a step reports."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters and value > 0:
                self._counters[name].labels(*labels).inc(value)
