"""The class that vLLM loads: it hands each call to the side of its role."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvpool.bindings.vllm.inplace import InPlaceScheduler, InPlaceWorker, ground_for, ground_of
from kvpool.bindings.vllm.inplace_memory import Unfit
from kvpool.bindings.vllm.messages import Orders, Results
from kvpool.bindings.vllm.options import Options
from kvpool.bindings.vllm.scheduler import SchedulerSide
from kvpool.bindings.vllm.stats import PoolPromMetrics, PoolStats
from kvpool.bindings.vllm.worker import WorkerSide, refuse

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KVPoolConnector"]

log = logging.getLogger("vllm.kvpool")
SPREAD = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")


def _worker_side(vllm_config: Any, kv_cache_config: Any, options: Options) -> WorkerSide | InPlaceWorker:
    if options.mode == "in-place":
        try:
            return InPlaceWorker(vllm_config, options, ground_for(vllm_config, kv_cache_config, options))
        except Unfit as reason:
            log.warning("kvpool: not in place but by copying: %s", reason)
    return WorkerSide(vllm_config, kv_cache_config, options)


def _scheduler_side(vllm_config: Any, kv_cache_config: Any, options: Options) -> SchedulerSide:
    transfer = vllm_config.kv_transfer_config
    may_load, may_store = transfer.is_kv_consumer, transfer.is_kv_producer
    ground = ground_of(vllm_config)
    if ground is not None:
        return InPlaceScheduler(vllm_config, kv_cache_config, options, ground, may_load=may_load, may_store=may_store)
    return SchedulerSide(vllm_config, kv_cache_config, options, may_load=may_load, may_store=may_store)


class KVPoolConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV cache connector over a pool. See docs/engines/vllm.md.

    Raises at start, and then vLLM does not start: `InvalidArgument` for options or a layout that cannot be, and
    whatever `kvpool.open` raises, for example `VersionMismatch`. Later nothing that the pool does stops the engine.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        options = Options.of(transfer.kv_connector_extra_config)
        refuse(vllm_config, SPREAD)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | InPlaceWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            if transfer.kv_load_failure_policy != "recompute":
                log.warning(
                    'kvpool: kv_load_failure_policy is %r: requests fail when blocks vanish. Set it to "recompute"',
                    transfer.kv_load_failure_policy,
                )
            self._scheduler = _scheduler_side(vllm_config, kv_cache_config, options)
        else:
            self._worker = _worker_side(vllm_config, kv_cache_config, options)

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler's side, on that role."""
        assert self._scheduler is not None, "a call for the scheduler's role"
        return self._scheduler

    @property
    def worker(self) -> WorkerSide | InPlaceWorker:
        """The worker's side, on that role."""
        assert self._worker is not None, "a call for the worker's role"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is a miss."""
        return False

    @property
    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    # ---- worker ----

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """In place: where vLLM allocates its cache."""
        return self.worker.allocation if isinstance(self.worker, InPlaceWorker) else None

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """See `WorkerSide.register`."""
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See `WorkerSide.start_loads`."""
        self.worker.start_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads that this pass needs have been done before it."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a block is stored whole, after the pass."""

    def wait_for_save(self) -> None:
        """See `WorkerSide.stores`."""
        self.worker.stores(self._orders)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Of an older vLLM; see `get_transfer_results`."""
        return None, self.worker.arrived()[0] or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Asynchronous loads that have ended, and which of them have failed."""
        done, failed = self.worker.arrived()
        return KVConnectorTransferResults(finished_recving=done, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that vLLM must compute."""
        return self.worker.take_bad_blocks()

    def build_connector_worker_meta(self) -> Results | None:
        """What was done, for the scheduler's side."""
        return self.worker.take_results()

    # ---- scheduler ----

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """vLLM's cache manager, which knows its hit rules and its blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """A request has arrived."""
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens the pool has beyond those, and whether they are loaded between steps."""
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Order the load."""
        self.scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        """The orders of this step."""
        return self.scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """What the workers have done."""
        results = connector_output.kv_connector_worker_meta
        if isinstance(results, Results):
            self.scheduler.results(results)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Blocks may go at once: stores are done within their step."""
        self.scheduler.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`."""
        self.scheduler.finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        """KV events of the pool's tier."""
        events = self.scheduler.events
        return events.take() if events else ()

    def reset_cache(self) -> bool | None:
        """The weights have changed, say: see `SchedulerSide.reset`."""
        return self._scheduler.reset() if self._scheduler else None

    # ---- both ----

    def get_kv_connector_stats(self) -> PoolStats | None:
        """Counters since the last time."""
        return (self._scheduler or self.worker).take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PoolStats | None:
        """From what another process has sent."""
        return PoolStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PoolPromMetrics:
        """vLLM's Prometheus hook."""
        return PoolPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Leave the pool. Idempotent."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.close()
