"""In-place mode: the engine's KV cache is the pool, blocks of other engines enter its block tables, no byte is copied.

Worker and scheduler are in one process (see `why_not`), so they share one `Ground`: the pool, its memory, what is held.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import kvpool
from kvpool.bindings.errors import InvalidArgument
from kvpool.bindings.vllm.identity import KeyRing, engine_identity
from kvpool.bindings.vllm.inplace_blocks import SharedBlocks
from kvpool.bindings.vllm.inplace_memory import PoolAllocation, Region, Unfit, block_major
from kvpool.bindings.vllm.inplace_names import needs_layers, why_not
from kvpool.bindings.vllm.layout import GroupLayout
from kvpool.bindings.vllm.link import open_pool
from kvpool.bindings.vllm.messages import Orders, Results, Store
from kvpool.bindings.vllm.options import Options
from kvpool.bindings.vllm.scheduler import SchedulerSide
from kvpool.bindings.vllm.stats import PoolStats

__all__ = ["Ground", "InPlaceScheduler", "InPlaceWorker"]

log = logging.getLogger("vllm.kvpool")
TRIES = 20


@dataclass
class Ground:
    """What both roles of one engine stand on."""

    pool: kvpool.Pool
    stock: kvpool.Stock
    region: Region
    layouts: list[GroupLayout | None]
    identity: kvpool.Identity
    shared: SharedBlocks | None = None
    has_gone: bool = False
    """The pool was removed: the memory is about to become private, or is."""

    def go(self, error: kvpool.Error) -> None:
        """The pool says that it has gone."""
        if not self.has_gone:
            self.has_gone = True
            log.error("kvpool: %s has gone, this engine goes on in private memory: %s", self.pool.uri, error)


_grounds: dict[str, Ground] = {}
"""By engine id, from the worker's start to its end."""


def _demand_shape(pool: kvpool.Pool, options: Options, blocks: int, stride: int) -> None:
    info = pool.info
    wanted = [{"block_bytes": stride, "blocks": blocks}]
    have = [{"block_bytes": each["block_bytes"], "blocks": each["blocks"]} for each in info["classes"]]
    if info["mode"] != "coherent":
        raise InvalidArgument(f"{options.uri} is of mode {info['mode']}: in place needs one machine's memory")
    if have != wanted:
        raise InvalidArgument(
            f"{options.uri} has {have}, in place needs exactly {wanted}: start vLLM with --num-gpu-blocks-override "
            f"{have[0]['blocks'] + 1} if the size of a block is right, or make the pool with --block {stride}"
        )


def _open(options: Options, blocks: int, stride: int) -> kvpool.Pool:
    """The pool, made if the option `size` says that it may be: with exactly the engine's blocks."""
    if options.size is not None:
        try:
            return kvpool.create(options.uri, block=stride, blocks=blocks, policy=options.policy)
        except kvpool.Exists:
            pass
    return open_pool(options, [stride])


def ground_for(vllm_config: Any, kv_cache_config: Any, options: Options) -> Ground:
    """Called by the worker's role, before vLLM allocates. Raises `Unfit` with the reason why it must copy,
    `InvalidArgument` for a pool or a quota that cannot be.
    """
    reason = why_not(vllm_config, kv_cache_config)
    if reason:
        raise Unfit(reason)
    layout = block_major(kv_cache_config, is_layered=needs_layers(vllm_config))
    stride, layouts = layout.stride, layout.groups
    blocks = kv_cache_config.num_blocks - 1
    limit = int(blocks * options.quota)
    tokens = vllm_config.model_config.max_model_len
    need = sum(-(-tokens // each.block_tokens) for each in layouts if each is not None)
    if need > limit:
        raise InvalidArgument(
            f"a request of {tokens} tokens needs {need} blocks and this engine may hold {limit} (quota {options.quota} "
            f"of {blocks}): it would wait for ever. Lower max_model_len, or raise the quota or the size of the pool"
        )
    identity = engine_identity(vllm_config, kv_cache_config, options, 0, 1, layouts)
    pool = _open(options, blocks, stride)
    try:
        _demand_shape(pool, options, blocks, stride)
        ground = Ground(pool, pool.stock(), Region(pool, blocks, stride, layout.layers), layouts, identity)
    except BaseException:
        pool.close()
        raise
    kv_cache_config.kv_cache_tensors[:] = layout.tensors  # vLLM makes its views from these
    _grounds[vllm_config.kv_transfer_config.engine_id] = ground
    return ground


def ground_of(vllm_config: Any) -> Ground | None:
    """What the worker's role has found, for the scheduler's; None: it copies."""
    return _grounds.get(vllm_config.kv_transfer_config.engine_id)


class InPlaceWorker:
    """The worker's side: publishes what is full."""

    def __init__(self, vllm_config: Any, options: Options, ground: Ground) -> None:
        self._engine_id = vllm_config.kv_transfer_config.engine_id
        self._options, self.ground = options, ground
        self.allocation = PoolAllocation(ground.region)
        self.stats = PoolStats()
        self._epoch = b""
        self._ring = KeyRing(ground.identity, options.tenant, len(ground.layouts))
        self._results = Results()

    def register(self, tensors: Any) -> None:
        """vLLM has made its tensors. Raises `InvalidArgument` unless they lie in the pool."""
        region = self.ground.region
        low, high = region.address, region.address + (region.blocks + 1) * region.stride
        outside = [name for name, tensor in tensors.items() if not low <= tensor.data_ptr() < high]
        if outside or self.allocation.answered != 1:
            told = ", ".join(outside) or "another allocation"
            raise InvalidArgument(f"vLLM has not made its cache in the pool: {told}")
        log.info(
            "kvpool: in place in %s, %d blocks of %d bytes, others' blocks %s",
            self._options.uri,
            region.blocks,
            region.stride,
            "are read-only" if region.is_protected else "can be written",
        )

    def start_loads(self, orders: Orders) -> None:
        """Nothing to load. No pass is running: if the pool has gone this is the moment to leave its memory."""
        ground = self.ground
        if ground.has_gone and ground.shared is not None and ground.region.is_shared:
            ground.region.detach(ground.shared.held())

    def stores(self, orders: Orders) -> None:
        """After the pass: publish."""
        if orders.epoch != self._epoch:
            self._epoch = orders.epoch
            self._ring = KeyRing(self.ground.identity, self._options.tenant, len(self.ground.layouts), self._epoch)
        for store in orders.stores:
            self._results.stored[store.number] = 1
            for group, (numbers, hashes) in store.groups.items():
                self._publish(store, [number - 1 for number in numbers], self._ring.keys(group, hashes))

    def _publish(self, store: Store, numbers: list[int], keys: bytes) -> None:
        try:
            ours = self.ground.stock.publish(numbers, keys)
        except kvpool.NoPins as error:
            log.debug("kvpool: %s", error)
            ours = [False] * len(numbers)
        except (kvpool.NotOwned, kvpool.InvalidArgument):
            raise  # a mistake of ours
        except kvpool.Error as error:
            self.ground.go(error)
            ours = [False] * len(numbers)
        published = [number for number, is_ours in zip(numbers, ours, strict=True) if is_ours]
        self.ground.region.allow(published, write=False)
        self._results.published += [number + 1 for number in published]
        self.stats.add("stored_blocks", len(published))
        self.stats.add("store_refused", len(numbers) - len(published))

    def arrived(self) -> tuple[set[str], set[str]]:
        """Nothing is asynchronous."""
        return set(), set()

    def take_bad_blocks(self) -> set[int]:
        """None: nothing is loaded."""
        return set()

    def take_results(self) -> Results | None:
        """Since the last time."""
        results, self._results = self._results, Results()
        return results if results else None

    def take_stats(self) -> PoolStats | None:
        """Since the last time."""
        return self.stats.take()

    def close(self) -> None:
        """Give everything back. The memory stays mapped while vLLM has tensors there. Idempotent."""
        _grounds.pop(self._engine_id, None)
        self.ground.stock.close()
        self.ground.pool.close()


class InPlaceScheduler(SchedulerSide):
    """The scheduler's side: the pool's blocks are vLLM's own hits.

    Where vLLM keeps no prefix cache of its own (MLA on a CPU), hits are reported as external ones, and the blocks that
    vLLM has allocated for them are exchanged for the pool's.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: Options,
        ground: Ground,
        *,
        may_load: bool,
        may_store: bool,
    ) -> None:
        super().__init__(
            vllm_config, kv_cache_config, options, may_load=may_load, may_store=may_store, layouts=ground.layouts
        )
        self._ground = ground
        self._limit = int((kv_cache_config.num_blocks - 1) * options.quota)
        self._manager: Any = None
        self._orders: dict[int, list[int]] = {}
        self._found: dict[str, tuple[int, list[Any]]] = {}

    @property
    def shared(self) -> SharedBlocks:
        """There once vLLM's manager is."""
        assert self._ground.shared is not None
        return self._ground.shared

    def bind(self, manager: Any) -> None:
        """Take vLLM's block pool over."""
        super().bind(manager)
        self._manager = manager
        self._ground.shared = SharedBlocks(
            manager, self._ground.stock, self._ground.region, self._rings()[0], self._limit, self._ground.go
        )
        self.shared.may_adopt = self._may_load

    def matched(self, request: Any, local: int) -> tuple[int, bool]:
        """Hits are local ones; see the class for when they are not."""
        if self._manager.enable_caching or not self._may_load or self._finder is None:
            return 0, False
        tracked = self._requests[request.request_id]
        layout = self.layouts[0]
        tracked.tries += 1
        # vLLM allocates a block for each before it is exchanged. Where the pool has no room for that, computing has.
        if layout is None or request.skip_reading_prefix_cache or tracked.tries > TRIES:
            return 0, False
        hit = self._finder.hit_tokens(tracked.found, request, local)
        first, blocks = local // layout.block_tokens, []
        for each in self._finder.hashes(request, 0, hit)[first:]:
            block = self.shared.lease(self.shared.ring.key(0, each))
            if block is None:
                break
            blocks.append(block)
        self._found[request.request_id] = first, blocks
        return len(blocks) * layout.block_tokens, False

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """Exchange what vLLM has allocated for external blocks for the pool's."""
        first, blocks = self._found.pop(request.request_id, (0, []))
        self._requests[request.request_id].tries = 0
        if not external:
            return
        table = self._manager.coordinator.single_type_managers[0].req_to_blocks[request.request_id]
        spare = table[first : first + len(blocks)]
        for block in blocks:
            block.ref_cnt += 1
        table[first : first + len(blocks)] = blocks
        self.shared.pool.free_blocks(spare)

    def orders(self, output: Any) -> Orders:
        """Blocks that are full after this step are to be published; those that nobody took are let go."""
        if not self._ground.region.is_shared:
            self.shared.go_private()
        orders = super().orders(output)
        kept = []
        for store in orders.stores:
            groups = {}
            for group, (numbers, hashes) in store.groups.items():
                chosen = set(self.shared.offer(numbers))
                pairs = [(n, h) for n, h in zip(numbers, hashes, strict=True) if n in chosen]
                if pairs:
                    groups[group] = [n for n, _ in pairs], [h for _, h in pairs]
            store.groups = groups
            if groups:
                kept.append(store)
                self._orders[store.number] = [n for numbers, _ in groups.values() for n in numbers]
            else:
                self._awaited.pop(store.number, None)
                self._announcements.pop(store.number, None)
        orders.stores = kept
        self.shared.sweep()
        return orders

    def results(self, results: Results) -> None:
        """What is published is shared from now on."""
        super().results(results)
        published = set(results.published)
        for number in results.stored:
            for block in self._orders.pop(number, ()):
                self.shared.settle(block, is_published=block in published)

    def reset(self) -> bool:
        """See `SchedulerSide.reset`."""
        done = super().reset()
        self.shared.ring = self._rings()[0]
        return done

    def take_stats(self) -> PoolStats | None:
        """Since the last time."""
        self.stats.aggregate(self.shared.stats)
        self.shared.stats.reset()
        return super().take_stats()
