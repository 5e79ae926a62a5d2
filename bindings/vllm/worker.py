"""A worker's side of the connector: copies pages between its tensors and the pool."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from kvpool.bindings.errors import InvalidArgument
from kvpool.bindings.vllm.identity import KeyRing, engine_identity
from kvpool.bindings.vllm.layout import group_layouts, parts_of
from kvpool.bindings.vllm.link import PoolLink, read_rows, write_rows
from kvpool.bindings.vllm.messages import Load, Orders, Results, Store
from kvpool.bindings.vllm.options import Options
from kvpool.bindings.vllm.scheduler import key_ranks
from kvpool.bindings.vllm.stats import PoolStats
from kvpool.namespace import Parts

__all__ = ["WorkerSide"]

log = logging.getLogger("vllm.kvpool")


class WorkerSide:
    """Made in each worker's process. Called by one thread; asynchronous loads run on threads of their own."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self._options = options
        self._blocks: int = kv_cache_config.num_blocks
        self.layouts = group_layouts(kv_cache_config)
        ranks, same = key_ranks(vllm_config, kv_cache_config)
        rank = vllm_config.parallel_config.rank % (ranks * same) // same
        self.identity = engine_identity(vllm_config, kv_cache_config, options, rank, ranks, self.layouts)
        self.link = PoolLink(
            options, self.identity, [None if each is None else each.block_bytes for each in self.layouts]
        )
        self._parts: dict[int, Parts] = {}
        self._epoch = b""
        self._ring = self._new_ring()
        self.stats = PoolStats()
        self._threads: ThreadPoolExecutor | None = None
        self._running: list[tuple[Load, Future[set[int]]]] = []
        self._results = Results()
        self._bad_blocks: set[int] = set()
        self._is_step_bad = False

    def _new_ring(self) -> KeyRing:
        return KeyRing(self.identity, self._options.tenant, len(self.layouts), self._epoch)

    def register(self, tensors: Mapping[str, Any]) -> None:
        """The engine's caches, by layer. Raises `InvalidArgument` for a layout that this cannot copy."""
        self._parts = {
            layout.group: parts_of(layout, tensors, self._blocks) for layout in self.layouts if layout is not None
        }
        log.info(
            "kvpool: %s, blocks of %s bytes in %s parts",
            self._options.uri,
            [each.block_bytes for each in self.layouts if each is not None],
            [len(each) for each in self._parts.values()],
        )

    def _follow(self, epoch: bytes) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._ring = self._new_ring()

    # ---- loads ----

    def _load(self, load: Load, ring: KeyRing) -> set[int]:
        """Copy the blocks of one order; returns the numbers of those that could not be."""
        bad: set[int] = set()
        for group, (numbers, hashes) in load.groups.items():
            parts, keys, rows = self._parts[group], ring.keys(group, hashes), np.array(numbers, np.uint64)
            nothing = np.zeros(len(numbers), np.bool_)
            start = time.perf_counter()
            got = self.link.group(nothing, group, partial(read_rows, keys, parts, rows))
            self.stats.add("load_seconds", time.perf_counter() - start)
            self.stats.add("loaded_blocks", int(got.sum()))
            self.stats.add("loaded_bytes", int(got.sum()) * self._bytes(group))
            bad.update(number for number, good in zip(numbers, got, strict=True) if not good)
        self.stats.add("load_failures", len(bad))
        return bad

    def _bytes(self, group: int) -> int:
        return self._parts[group].row_bytes

    def start_loads(self, orders: Orders) -> None:
        """Synchronous loads are done when this returns; the others go on while the model computes."""
        self._follow(orders.epoch)
        for load in orders.loads:
            if load.is_async:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(self._options.load_threads, "kvpool-load")
                self._running.append((load, self._threads.submit(self._load, load, self._ring)))
                continue
            bad = self._load(load, self._ring)
            self._note(load, bad)
            self._is_step_bad |= bool(bad)

    def _note(self, load: Load, bad: set[int]) -> None:
        self._results.loaded[load.number] = 1
        if bad:
            log.warning("kvpool: %d blocks of request %s are computed: their load failed", len(bad), load.request)
            self._results.failed.add(load.request)
            if len(self.layouts) == 1:
                self._bad_blocks |= bad

    def arrived(self) -> tuple[set[str], set[str]]:
        """Requests whose asynchronous load has ended, and those among them that vLLM must compute anew."""
        done: set[str] = set()
        failed: set[str] = set()
        for load, future in [each for each in self._running if each[1].done()]:
            self._running.remove((load, future))
            error = future.exception()
            if error is not None:
                log.error("kvpool: loading for request %s: %s", load.request, error)
            bad = future.result() if error is None else {number for ids, _ in load.groups.values() for number in ids}
            self._note(load, bad)
            done.add(load.request)
            if bad and len(self.layouts) > 1:
                failed.add(load.request)
        return done, failed

    def take_bad_blocks(self) -> set[int]:
        """Blocks that do not hold what they should."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    # ---- stores ----

    def stores(self, orders: Orders) -> None:
        """After the forward pass: what is full now goes to the pool, if it is not there.

        If a load before the pass has failed, the pass has computed with wrong bytes: nothing of it is stored.
        """
        self._follow(orders.epoch)
        for store in orders.stores:
            self._results.stored[store.number] = 1
            if self._is_step_bad:
                self._results.skipped.add(store.number)
                continue
            self._store(store)
        self._is_step_bad = False

    def _store(self, store: Store) -> None:
        for group, (numbers, hashes) in store.groups.items():
            parts, keys, rows = self._parts[group], self._ring.keys(group, hashes), np.array(numbers, np.uint64)
            start = time.perf_counter()
            stored = self.link.group(-1, group, partial(write_rows, keys, parts, rows))
            self.stats.add("store_seconds", time.perf_counter() - start)
            self.stats.add("stored_blocks", max(stored, 0))
            self.stats.add("stored_bytes", max(stored, 0) * self._bytes(group))
            self.stats.add("store_refused", len(numbers) - max(stored, 0))
            if stored < 0:
                self._results.skipped.add(store.number)

    # ---- results ----

    def take_results(self) -> Results | None:
        """Since the last time."""
        results, self._results = self._results, Results()
        return results if results else None

    def take_stats(self) -> PoolStats | None:
        """Since the last time."""
        self.stats.add("pool_failures", self.link.take_failures())
        return self.stats.take()

    def close(self) -> None:
        """Loads under way end first: they write to the engine's memory. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        self.link.close()


def refuse(vllm_config: Any, sizes: Sequence[str]) -> None:
    """Raise `InvalidArgument` for a way to spread a model that the pool's keys do not know."""
    for name in sizes:
        if getattr(vllm_config.parallel_config, name, 1) > 1:
            raise InvalidArgument(f"{name} > 1 is not supported by kvpool: only tensor parallelism is")
