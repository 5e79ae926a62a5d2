"""The pool in vLLM's own offloading: below its tier in host memory, or in place of it.

`PoolTier` is a secondary tier: vLLM copies between the accelerator and its host memory, the tier between that and the
pool. Works on any device that vLLM can offload from.

    kv_connector="PoolOffloadingConnector", kv_connector_module_path="kvpool.bindings.vllm.tier",
    kv_connector_extra_config={"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": ...,
        "secondary_tiers": [{"type": "PoolTier", "module_path": "kvpool.bindings.vllm.tier", "uri": "shm:NAME"}]}

`PoolOffloadingSpec` has no tier in between: workers copy straight between their caches in host memory and the pool.

    kv_connector="PoolOffloadingConnector", kv_connector_module_path="kvpool.bindings.vllm.tier",
    kv_connector_extra_config={"spec_name": "PoolOffloadingSpec", "spec_module_path": "kvpool.bindings.vllm.tier",
        "uri": "shm:NAME"}
"""

from __future__ import annotations

import ctypes
import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from vllm.config import get_current_vllm_config_or_none, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvpool
from kvpool.bindings.errors import InvalidArgument
from kvpool.bindings.vllm.identity import KeyRing, total_identity
from kvpool.bindings.vllm.layout import LINE, padded
from kvpool.bindings.vllm.link import PoolLink, read_rows, write_rows
from kvpool.bindings.vllm.options import Options
from kvpool.namespace import Parts

__all__ = ["PoolOffloadingConnector", "PoolOffloadingSpec", "PoolTier"]

PAUSE_S = 0.0005
FOR_EVER = 1e6


def _options(extra: Mapping[str, Any]) -> Options:
    """Ours among the options of vLLM's offloading."""
    known = {field.name for field in dataclasses.fields(Options)}
    return Options.of({name: value for name, value in extra.items() if name in known})


class PoolOffloadingConnector(OffloadingConnector):
    """vLLM's own. While it makes its spec and tiers these can see the engine's whole configuration.

    vLLM tells them neither the configuration of the network nor the quantization, on which every block depends.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with set_current_vllm_config(vllm_config):
            super().__init__(vllm_config, role, kv_cache_config)


def _engine() -> Any:
    """The engine's configuration. Raises `InvalidArgument` under another connector."""
    found = get_current_vllm_config_or_none()
    if found is None:
        raise InvalidArgument(
            "vLLM's OffloadingConnector does not say what the engine is: use kvpool's with kv_connector="
            '"PoolOffloadingConnector", kv_connector_module_path="kvpool.bindings.vllm.tier"'
        )
    return found


def tier_identity(engine: Any, config: Any, options: Options, what: str, rank: int, ranks: int) -> kvpool.Identity:
    """The identity of what a rank offloads, from vLLM's VllmConfig and OffloadingConfig."""
    sizes = config.parallel
    told = {
        "what": what,
        "groups": repr([(group.tokens_per_block, group.layer_names) for group in config.groups]),
        "chunk": f"{config.cache.tokens_per_hash}x{config.cache.blocks_per_chunk}",
        "hash": str(engine.cache_config.prefix_caching_hash_algo),
        "bytes": str(config.worker_kv_bytes_per_block),
        "parallel": f"{sizes.world_size}/{sizes.tp_size}/{sizes.pp_size}/{sizes.pcp_size}/{sizes.dcp_size}",
        "canonical": f"{config.canonical_layout}/{config.replicated_layout}",
    }
    return total_identity(engine, options, str(config.kv_cache_layout), rank, ranks, told)


def _keys(ring: KeyRing, keys: Iterable[Any]) -> bytes:
    return b"".join(ring.key(get_offload_group_idx(key), get_offload_block_hash(key)) for key in keys)


class PoolTier(SecondaryTierManager):
    """A secondary tier of vLLM's TieringOffloadingSpec. Runs in the scheduler's process; copies on a thread of its own.

    A chunk of the primary tier is one block of the pool. What fails is reported as failed, and vLLM computes it.
    """

    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **extra: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = Options.of(extra)
        config = offloading_spec.config
        rows = np.asarray(primary_kv_view)
        size = int(rows.strides[0])
        self._rows = rows  # the parts have only its address
        self._parts = Parts([(rows.ctypes.data, size, size, 0)])
        self._bytes = size
        identity = tier_identity(_engine(), config, options, "chunks", 0, 1)
        self.link = PoolLink(options, identity, [size])
        groups = 1 + max(group.group_id for group in config.groups)
        self._ring = KeyRing(identity, options.tenant, groups)
        self._threads = ThreadPoolExecutor(options.load_threads, "kvpool-tier")
        self._jobs: list[tuple[Any, Future[JobResult]]] = []

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """HIT or MISS, at once."""
        there = self.link.group(False, 0, lambda ns: bool(ns.contains(_keys(self._ring, [key]))[0]))
        return LookupResult.HIT if there else LookupResult.MISS

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Tell the pool's policy."""
        self.link.group(0, 0, lambda ns: ns.touch(_keys(self._ring, keys)))

    def submit_store(self, job_metadata: Any) -> None:
        """From the primary tier to the pool."""
        self._jobs.append((job_metadata, self._threads.submit(self._store, job_metadata)))

    def submit_load(self, job_metadata: Any) -> None:
        """From the pool to the primary tier."""
        self._jobs.append((job_metadata, self._threads.submit(self._load, job_metadata)))

    def _store(self, job: Any) -> JobResult:
        start = time.perf_counter()
        rows = np.asarray(job.chunk_ids, np.uint64)
        stored = self.link.group(-1, 0, partial(write_rows, _keys(self._ring, job.keys), self._parts, rows))
        took = time.perf_counter() - start
        return JobResult(job.job_id, stored >= 0, transfer_time=took, transfer_bytes=max(stored, 0) * self._bytes)

    def _load(self, job: Any) -> JobResult:
        start = time.perf_counter()
        rows, keys = np.asarray(job.chunk_ids, np.uint64), list(job.keys)
        nothing = np.zeros(len(keys), np.bool_)
        got = self.link.group(nothing, 0, partial(read_rows, _keys(self._ring, keys), self._parts, rows))
        good = [key for key, is_good in zip(keys, got, strict=True) if is_good]
        return JobResult(
            job.job_id,
            len(good) == len(keys),
            successful_keys=good,
            transfer_time=time.perf_counter() - start,
            transfer_bytes=len(good) * self._bytes,
        )

    def get_finished_jobs(self) -> list[JobResult]:
        """Jobs that have ended since the last call."""
        done = [each for each in self._jobs if each[1].done()]
        self._jobs = [each for each in self._jobs if not each[1].done() or each not in done]
        results = []
        for job, future in done:
            failed = future.cancelled() or future.exception() is not None
            results.append(JobResult(job.job_id, False, successful_keys=[]) if failed else future.result())
        return results

    def has_pending_work(self) -> bool:
        """While jobs run."""
        return bool(self._jobs)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """No preference."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait for all jobs."""
        for _, future in list(self._jobs):
            while not future.done():
                time.sleep(PAUSE_S)

    def shutdown(self) -> None:
        """Jobs that run end first. Idempotent."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.link.close()


@dataclasses.dataclass
class PoolBlocks(LoadStoreSpec):
    """What a job moves: vLLM's keys in order; for loads also the pool's block numbers, one row for each rank."""

    keys: list[bytes]
    numbers: list[list[int]] = dataclasses.field(default_factory=list)


class PoolOffloadingManager(OffloadingManager):
    """The scheduler's side of `PoolOffloadingSpec`.

    vLLM asserts that loads of its offloading succeed. So a block is pinned when it is found, until its load is complete
    or its request has ended.
    """

    def __init__(self, config: Any, options: Options, link: PoolLink, rings: Sequence[KeyRing]) -> None:
        self.link = link
        self._rings = rings
        self._pins: dict[str, dict[bytes, kvpool.Hit]] = {}

    def _find(self, key: bytes) -> kvpool.Hit | None:
        """The blocks of all ranks, pinned."""

        def pinned(pool: kvpool.Pool) -> kvpool.Hit | None:
            namespace = self.link.namespace(pool, 0)
            refs = [int(namespace.lookup(_keys(ring, [key]))[0]) for ring in self._rings]
            return pool.pin(refs) if all(refs) else None

        return self.link.run(pinned, None)

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        """HIT: it is pinned for the request."""
        pins = self._pins.setdefault(req_context.req_id, {})
        if key not in pins:
            hit = self._find(key)
            if hit is None:
                return LookupResult.MISS
            pins[key] = hit
        return LookupResult.HIT

    def get_load_source(self, key: Any, req_context: Any) -> CacheHitSource:
        """Host memory."""
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[Any], req_context: Any) -> PoolBlocks:
        """Where the blocks are."""
        pins = self._pins.get(req_context.req_id, {})
        hits = [pins[key] for key in keys]
        ranks = range(len(self._rings))
        return PoolBlocks(list(keys), [[int(hit.blocks[rank]) for hit in hits] for rank in ranks])

    def complete_load(self, keys: Collection[Any], req_context: Any) -> None:
        """Every worker has them."""
        pins = self._pins.get(req_context.req_id, {})
        for key in keys:
            if key in pins:
                pins.pop(key).release()

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput:
        """What is not there yet, on some rank."""
        wanted = list(keys)
        missing = np.zeros(len(wanted), np.bool_)
        for ring in self._rings:
            there = self.link.group(np.zeros_like(missing), 0, partial(_contains, _keys(ring, wanted)))
            missing |= ~there
        chosen = [key for key, is_missing in zip(wanted, missing, strict=True) if is_missing]
        return PrepareStoreOutput(keys_to_store=chosen, store_spec=PoolBlocks(list(chosen)), evicted_keys=[])

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        """Tell the pool's policy."""
        for ring in self._rings:
            self.link.group(0, 0, partial(_touch, _keys(ring, keys)))

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """No preference."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Loads of it that are still under way were prepared; their blocks are released when they complete."""
        self._let_go(req_context.req_id)

    def _let_go(self, request: str) -> None:
        for hit in self._pins.pop(request, {}).values():
            hit.release()

    def shutdown(self) -> None:
        """Idempotent."""
        for request in list(self._pins):
            self._let_go(request)
        self.link.close()


def _contains(keys: bytes, namespace: kvpool.Namespace) -> Any:
    return namespace.contains(keys)


def _touch(keys: bytes, namespace: kvpool.Namespace) -> int:
    return namespace.touch(keys)


class PoolOffloadingWorker(OffloadingWorker):
    """A worker's side of `PoolOffloadingSpec`: copies on a thread of its own."""

    def __init__(self, caches: Any, link: PoolLink, ring: KeyRing, rank: int, block_bytes: int) -> None:
        self.link = link
        self._ring, self._rank = ring, rank
        self._parts = [_canonical_parts(caches, refs, block_bytes) for refs in caches.group_data_refs]
        self._caches = caches  # the parts have only addresses
        self._thread = ThreadPoolExecutor(1, "kvpool-offload")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the engine's cache to the pool."""
        self._jobs[job_id] = self._thread.submit(self._store, job_id, src_spec, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the pool to the engine's cache."""
        self._jobs[job_id] = self._thread.submit(self._load, job_id, dst_spec, src_spec)
        return True

    def _groups(self, blocks: Any, spec: PoolBlocks) -> Iterable[tuple[int, slice, Any]]:
        at = 0
        for group, count in enumerate(blocks.group_sizes):
            if count:
                span = slice(at, at + count)
                yield group, span, np.asarray(blocks.block_ids[span], np.uint64)
            at += count

    def _store(self, job_id: int, source: Any, spec: PoolBlocks) -> TransferResult:
        start, moved = time.perf_counter(), 0
        for group, span, rows in self._groups(source, spec):
            parts = self._parts[group]
            stored = self.link.group(0, 0, partial(write_rows, _keys(self._ring, spec.keys[span]), parts, rows))
            moved += stored * parts.row_bytes
        return TransferResult(job_id, True, moved, time.perf_counter() - start)  # what had no room is a miss later

    def _load(self, job_id: int, target: Any, spec: PoolBlocks) -> TransferResult:
        start, moved = time.perf_counter(), 0
        for group, span, rows in self._groups(target, spec):
            parts = self._parts[group]
            nothing = np.zeros(len(rows), np.bool_)
            got = self.link.group(nothing, 0, partial(read_rows, _keys(self._ring, spec.keys[span]), parts, rows))
            for i in np.flatnonzero(~got):
                # Pinned, so its bytes stand, though the pool or the name was removed. The memory is still mapped.
                self._copy(parts, int(rows[i]), spec.numbers[self._rank][span][int(i)])
            moved += len(rows) * parts.row_bytes
        return TransferResult(job_id, True, moved, time.perf_counter() - start)

    def _copy(self, parts: Parts, row: int, number: int) -> None:
        block = self.link.memory()[number].ctypes.data
        for address, stride, length, at in parts.array.tolist():
            ctypes.memmove(address + row * stride, block + at, length)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that have ended since the last call."""
        done = [job for job, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job).result() for job in done]

    def wait(self, job_ids: set[int]) -> None:
        """Until these have ended."""
        for job in job_ids:
            if job in self._jobs:
                self._jobs[job].result()

    def shutdown(self) -> None:
        """Jobs that run end first. Idempotent."""
        self._thread.shutdown(wait=True)
        self.link.close()


def _canonical_parts(caches: Any, refs: Sequence[Any], block_bytes: int) -> Parts:
    """Where a group's blocks lie in the tensors that vLLM hands to offloading."""
    parts, at = [], 0
    for ref in refs:
        tensor = caches.tensors[ref.tensor_idx].tensor
        if tensor.device.type != "cpu":
            raise InvalidArgument(f"the cache is on {tensor.device}: use TieringOffloadingSpec with a PoolTier")
        parts.append((tensor.data_ptr(), tensor.stride(0) * tensor.element_size(), ref.page_size_bytes, at))
        at += padded(ref.page_size_bytes)
    made = Parts(parts)
    if made.reach > block_bytes:
        raise InvalidArgument(f"a block has {made.reach} bytes, {block_bytes} were expected")
    return made


class PoolOffloadingSpec(OffloadingSpec):
    """vLLM's OffloadingConnector straight over the pool, for caches in host memory."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._engine = _engine()
        # A pool that has gone is not looked for again: block numbers of one must not meet the memory of another.
        self._options = dataclasses.replace(_options(config.extra_config), retry=FOR_EVER)
        if config.cache.blocks_per_chunk != 1:
            raise InvalidArgument("leave block_size of the offloading alone: the pool's blocks are the engine's")
        if config.parallel.pp_size != 1 or config.parallel.dcp_size != 1 or config.parallel.pcp_size != 1:
            raise InvalidArgument("only tensor parallelism is supported")
        self._ranks = int(config.parallel.world_size)
        # Layers start at multiples of a line: room for that.
        layers = max(len(group.layer_names) for group in config.groups)
        self._block_bytes = padded(config.worker_kv_bytes_per_block)
        if config.worker_kv_bytes_per_block % (layers * LINE):
            self._block_bytes += layers * LINE
        self._manager: PoolOffloadingManager | None = None
        self._worker: PoolOffloadingWorker | None = None

    def _identity(self, rank: int) -> kvpool.Identity:
        return tier_identity(self._engine, self.config, self._options, "blocks", rank, self._ranks)

    def _ring(self, rank: int) -> KeyRing:
        groups = 1 + max(group.group_id for group in self.config.groups)
        return KeyRing(self._identity(rank), self._options.tenant, groups)

    def get_manager(self) -> PoolOffloadingManager:
        """One for the scheduler."""
        if self._manager is None:
            link = PoolLink(self._options, self._identity(0), [self._block_bytes])
            rings = [self._ring(rank) for rank in range(self._ranks)]
            self._manager = PoolOffloadingManager(self.config, self._options, link, rings)
        return self._manager

    def get_worker(self, kv_caches: Any) -> PoolOffloadingWorker:
        """One for each worker."""
        if self._worker is None:
            rank = int(self.config.parallel.rank)
            link = PoolLink(self._options, self._identity(rank), [self._block_bytes])
            self._worker = PoolOffloadingWorker(kv_caches, link, self._ring(rank), rank, self._block_bytes)
        return self._worker
