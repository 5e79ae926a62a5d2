"""vLLM's block pool over a pool's blocks: which blocks are ours to write, which are shared, and who gives them back.

A block is, for this engine, one of three:

  own      reserved in the pool: in vLLM's free queue, or written by requests. `block.pool` is vLLM's block pool.
  shared   published, by us or by others, and pinned while some request here reads it. `block.pool` is the
           `SharedBlocks`, to which vLLM's pool hands what belongs to another pool: so it never enters the free queue.
  absent   everything else. As shared, but not pinned, and in no table of vLLM.

A shared block has one reference more than it has users: the lease. An own block that is being published has one as
well, so that it stays what it is until the pool has it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, make_block_hash_with_group_id

import kvpool
from kvpool.bindings.vllm.identity import KeyRing
from kvpool.bindings.vllm.inplace_memory import Region
from kvpool.bindings.vllm.stats import PoolStats

__all__ = ["SharedBlocks"]


class Queue(FreeKVCacheBlockQueue):
    """vLLM's queue of free blocks. What comes back goes on to the pool: an engine that is idle holds nothing."""

    def __init__(self, shared: SharedBlocks) -> None:
        super().__init__([])
        self._shared = shared

    def append(self, block: Any) -> None:
        """As vLLM's."""
        super().append(block)
        self._shared.trim()

    def append_n(self, blocks: list[Any]) -> None:
        """As vLLM's."""
        super().append_n(blocks)
        self._shared.trim()

    def prepend_n(self, blocks: list[Any]) -> None:
        """As vLLM's."""
        super().prepend_n(blocks)
        self._shared.trim()


class SharedBlocks:
    """One engine's view of the pool, in vLLM's terms. Used by the scheduler's thread."""

    def __init__(
        self,
        manager: Any,
        stock: kvpool.Stock,
        region: Region,
        ring: KeyRing,
        limit: int,
        on_gone: Callable[[kvpool.Error], None],
    ) -> None:
        self.pool = manager.block_pool
        self.ring = ring
        self.stats = PoolStats()
        self._stock, self._region, self._limit, self._on_gone = stock, region, limit, on_gone
        self._own: set[int] = set()
        self._offered: set[int] = set()
        self._leases: dict[int, Any] = {}
        self._fresh: list[Any] = []
        self._is_private = False
        self.may_adopt = True
        """Whether hits of others are taken."""
        self._patch(manager)

    # ---- vLLM's objects ----

    def _patch(self, manager: Any) -> None:
        pool = self.pool
        for block in pool.blocks:
            block.prev_free_block = block.next_free_block = None
            if not block.is_null:
                block.pool = self
        pool.free_block_queue = Queue(self)
        self._count()
        original, allocate, shared = pool.get_cached_block, manager.allocate_slots, self

        def get_cached_block(_: Any, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None:
            got: list[Any] | None = original(block_hash, kv_cache_group_ids)
            return got if got is not None else shared.adopt(block_hash, kv_cache_group_ids)

        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            result = allocate(request, num_new_tokens, *args, **kwargs)
            wanted = 1 + sum(
                -(-(request.num_tokens + num_new_tokens) // each.block_size)
                for each in manager.coordinator.single_type_managers
            )
            while result is None and wanted:
                if shared.take(wanted):
                    result = allocate(request, num_new_tokens, *args, **kwargs)
                else:
                    wanted //= 2
            shared.trim()
            return result

        def get_usage(_: Any) -> float:
            free = int(pool.get_num_free_blocks())
            return (len(shared._own) + len(shared._leases) - free) / (len(pool.blocks) - 1 or 1)

        pool.get_cached_block = types.MethodType(get_cached_block, pool)
        pool.get_usage = types.MethodType(get_usage, pool)
        manager.allocate_slots = allocate_slots

    def _count(self) -> None:
        self.pool.num_gpu_blocks = 1 + len(self._own) + len(self._leases)  # less the free ones: in use

    # ---- own blocks ----

    def take(self, count: int) -> bool:
        """Reserve blocks in the pool and give them to vLLM as free ones: all or none."""
        if self._is_private or len(self._own) + len(self._leases) + count > self._limit:
            return False
        try:
            numbers = self._stock.take(count)
        except kvpool.PoolFull:
            return False
        except kvpool.Error as error:
            self._on_gone(error)
            return False
        self._region.allow(numbers, write=True)
        blocks = [self.pool.blocks[number + 1] for number in numbers]
        for block in blocks:
            block.pool = self.pool
        self._own.update(block.block_id for block in blocks)
        self._count()
        FreeKVCacheBlockQueue.append_n(self.pool.free_block_queue, blocks)
        return True

    def trim(self) -> None:
        """Give free blocks back that another engine may need."""
        queue = self.pool.free_block_queue
        if not self._is_private and queue.num_free_blocks:
            self._give(queue.popleft_n(queue.num_free_blocks))

    def _give(self, blocks: Sequence[Any]) -> None:
        numbers = [block.block_id - 1 for block in blocks]
        for block in blocks:
            self.pool._maybe_evict_cached_block(block)
            block.pool = self
            self._own.discard(block.block_id)
        self._count()
        self._region.allow(numbers, write=False)
        try:
            self._stock.give(numbers)
        except kvpool.Error as error:
            self._on_gone(error)

    def offer(self, numbers: Iterable[int]) -> list[int]:
        """vLLM's numbers of blocks that are full after this step: those that are own get a reference, and are
        returned."""
        chosen = []
        for number in numbers:
            block = self.pool.blocks[number]
            if number in self._own and number not in self._offered and not self._is_private:
                block.ref_cnt += 1
                self._offered.add(number)
                chosen.append(number)
        return chosen

    def settle(self, number: int, *, is_published: bool) -> None:
        """An offered block is shared now, or (another has its key) stays own."""
        block = self.pool.blocks[number]
        self._offered.discard(number)
        if not is_published or self._is_private:
            self.pool.free_blocks([block])
            return
        self._own.discard(number)
        block.pool = self
        self._leases[number] = block
        self._count()
        if block.ref_cnt == 1:
            self.release([block])

    # ---- shared blocks ----

    def lease(self, key: bytes) -> Any | None:
        """The block that the pool has under a key, pinned; None: there is none, or no more may be held."""
        if self._is_private or not self.may_adopt or len(self._own) + len(self._leases) >= self._limit:
            return None
        try:
            number = self._stock.find(key)
        except kvpool.NoPins:
            return None
        except kvpool.Error as error:
            self._on_gone(error)
            return None
        if number is None:
            return None
        block = self.pool.blocks[number + 1]
        if number + 1 not in self._leases:
            block.ref_cnt = 1
            self._leases[number + 1] = block
            self._fresh.append(block)
            self._count()
        return block

    def adopt(self, block_hash: Any, group_ids: list[int]) -> list[Any] | None:
        """What `get_cached_block` answers when vLLM has no block of its own: the pool's, as if they were local hits."""
        found = []
        for group in group_ids:
            name = make_block_hash_with_group_id(block_hash, group)
            block = self.pool.cached_block_hash_to_block.get_one_block(name)
            if block is None:
                block = self.lease(self.ring.key(group, bytes(block_hash)))
                if block is None:
                    return None
                self.pool._insert_block_hash(name, block, num_tokens=None)
            found.append(block)
        return found

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        """vLLM's pool hands us what it does not own: a user less."""
        done = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 1 and block.block_id in self._leases:
                done.append(block)
        self.release(done)

    def release(self, blocks: Sequence[Any]) -> None:
        """End leases that nobody uses."""
        if not blocks:
            return
        for block in blocks:
            self.pool._remove_cached_block_hashes(block)
            block.ref_cnt = 0
            del self._leases[block.block_id]
        self._count()
        if self._is_private:
            for block in blocks:
                block.pool = self.pool
                self._own.add(block.block_id)
            self._count()
            self.pool.free_block_queue.append_n(list(blocks))
            return
        try:
            self._stock.release([block.block_id - 1 for block in blocks])
        except kvpool.Error as error:
            self._on_gone(error)

    def sweep(self) -> None:
        """At the end of a step's scheduling: blocks that were found and not used go back."""
        self.stats.add("adopted_blocks", sum(block.ref_cnt > 1 for block in self._fresh))
        self._fresh.clear()
        self.release([block for block in self._leases.values() if block.ref_cnt == 1])

    # ---- without the pool ----

    def held(self) -> list[int]:
        """Numbers of the pool's blocks that this engine holds."""
        return [number - 1 for number in (*self._own, *self._leases)]

    def go_private(self) -> None:
        """The pool has gone and the region is private memory: every block that is not leased is own and free."""
        if self._is_private:
            return
        self._is_private = True
        absent = [
            block
            for block in self.pool.blocks
            if not block.is_null and block.block_id not in self._own and block.block_id not in self._leases
        ]
        for block in absent:
            block.pool = self.pool
            self._own.add(block.block_id)
        self._count()
        self.pool.free_block_queue.append_n(absent)
