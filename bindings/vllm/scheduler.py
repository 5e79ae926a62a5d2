"""The scheduler's side of the connector: what is in the pool, what is to be loaded, what is to be stored."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash

import kvpool
from kvpool.bindings.vllm.events import Events
from kvpool.bindings.vllm.identity import KeyRing, engine_identity
from kvpool.bindings.vllm.layout import GroupLayout, group_layouts
from kvpool.bindings.vllm.link import PoolLink
from kvpool.bindings.vllm.lookup import Finder, Found
from kvpool.bindings.vllm.messages import Load, Orders, Results, Store
from kvpool.bindings.vllm.options import Options
from kvpool.bindings.vllm.stats import PoolStats

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SchedulerSide", "key_ranks"]

log = logging.getLogger("vllm.kvpool")
NULL_BLOCK = 0


def key_ranks(vllm_config: Any, kv_cache_config: Any) -> tuple[int, int]:
    """How many ranks have blocks of their own, and how many consecutive ones hold the same (MLA)."""
    same = max(1, int(kv_cache_config.kv_tp_replicas))
    return max(1, vllm_config.parallel_config.tensor_parallel_size // same), same


def _pinned(refs: NDArray[np.uint64], pool: kvpool.Pool) -> kvpool.Hit | None:
    return pool.pin(refs)


@dataclass
class Tracked:
    """What is remembered of a request."""

    request: Any
    found: Found = field(default_factory=Found)
    cursor: dict[int, int] = field(default_factory=dict)
    """Per group: the first block that was not yet given to be stored."""
    hit: int = 0
    """Tokens of its prefix that the engine has with the pool's help, as last asked."""
    tries: int = 0
    """Times that blocks were held for it and it was not scheduled."""
    has_failed: bool = False
    """A load of it has failed: it is computed."""


@dataclass
class Announcement:
    """What a KV event will say once every rank has stored a job."""

    request: Any
    group: int
    first: int
    hashes: list[bytes]


class SchedulerSide:
    """Made in the scheduler's process. One thread."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        options: Options,
        *,
        may_load: bool,
        may_store: bool,
        layouts: list[GroupLayout | None] | None = None,
    ) -> None:
        self._options = options
        self._may_load, self._may_store = may_load, may_store
        self.layouts = layouts or group_layouts(kv_cache_config)
        ranks, _ = key_ranks(vllm_config, kv_cache_config)
        self._workers: int = vllm_config.parallel_config.world_size
        self._identities = [
            engine_identity(vllm_config, kv_cache_config, options, rank, ranks, self.layouts) for rank in range(ranks)
        ]
        self.link = PoolLink(
            options, self._identities[0], [None if each is None else each.block_bytes for each in self.layouts]
        )
        self.epoch = b""
        self._is_async = options.load == "async" or (options.load == "auto" and len(self.layouts) > 1)
        if options.load == "sync" and len(self.layouts) > 1:
            log.warning("kvpool: loads are asynchronous: vLLM cannot recompute failed synchronous ones of this model")
            self._is_async = True
        self._mamba = {
            number
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            if getattr(group.kv_cache_spec, "mamba_cache_mode", None) == "align"
        }
        events = vllm_config.kv_events_config
        self.events = Events(self.link) if events and events.enable_kv_cache_events else None
        self.stats = PoolStats()
        self._requests: dict[str, Tracked] = {}
        self._loads: list[Load] = []
        self._pins: dict[int, list[kvpool.Hit]] = {}
        self._announcements: dict[int, list[Announcement]] = {}
        self._awaited: dict[int, int] = {}
        self._jobs = 0
        self._finder: Finder | None = None
        self._blocks: list[Any] = []
        self._has_hashes = True

    def _rings(self) -> list[KeyRing]:
        return [KeyRing(each, self._options.tenant, len(self.layouts), self.epoch) for each in self._identities]

    def bind(self, manager: Any) -> None:
        """vLLM's cache manager is there."""
        self._has_hashes = bool(manager.enable_caching)
        self._finder = Finder(manager, self.layouts, self._rings(), self.link)
        self._blocks = manager.block_pool.blocks

    def on_new_request(self, request: Any) -> None:
        """Also after a preemption, and of a request that is known: nothing is lost."""
        tracked = self._requests.setdefault(request.request_id, Tracked(request))
        tracked.request = request

    # ---- loads ----

    def matched(self, request: Any, local: int) -> tuple[int, bool]:
        """How many tokens beyond the first `local` can be loaded, and whether between steps."""
        tracked = self._requests.setdefault(request.request_id, Tracked(request))
        if not self._may_load or tracked.has_failed or request.skip_reading_prefix_cache or self._finder is None:
            return 0, False
        finder = self._finder
        before = finder.looked_up, finder.hits
        tracked.hit = finder.hit_tokens(tracked.found, request, local)
        more = max(0, tracked.hit - local)
        self.stats.add("lookup_keys", finder.looked_up - before[0])
        self.stats.add("lookup_hits", finder.hits - before[1])
        return more, self._is_async and more > 0

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """The request has its blocks: order the load of those that hold the last `external` tokens of the hit."""
        if not external:
            return
        tracked = self._requests[request.request_id]
        total = tracked.hit
        self._jobs += 1
        load = Load(self._jobs, request.request_id, self._is_async)
        for layout in self.layouts:
            if layout is None:
                continue
            hashes = tracked.found.keys[layout.group][0]
            span = range((total - external) // layout.block_tokens, total // layout.block_tokens)
            ids = block_ids[layout.group]
            wanted = [(ids[i], hashes[i]) for i in span if i < len(ids) and ids[i] != NULL_BLOCK]
            if wanted:
                load.groups[layout.group] = [each[0] for each in wanted], [each[1] for each in wanted]
        self._loads.append(load)
        self._awaited[load.number] = self._workers
        self._pins[load.number] = self._pin(tracked.found, load)

    def _pin(self, found: Found, load: Load) -> list[kvpool.Hit]:
        """Keep the blocks until every rank has them. Without pins (none left, just evicted) a load may fail instead."""
        hits = []
        for group, (_, hashes) in load.groups.items():
            known = [found.refs.get((group, each), ()) for each in hashes]
            refs = np.array([ref for of_ranks in known for ref in of_ranks], np.uint64)
            hit = self.link.run(partial(_pinned, refs), None)
            if hit is not None:
                hits.append(hit)
        return hits

    # ---- stores ----

    def _full_blocks(
        self, tracked: Tracked, group: int, ids: list[int], end: int
    ) -> tuple[int, list[int], list[bytes]]:
        """Blocks of a group from the cursor on that hold only tokens before `end`, and are cached by vLLM."""
        layout = self.layouts[group]
        if layout is None:
            return 0, [], []
        first = tracked.cursor[group]
        stop = min(end // layout.block_tokens, len(ids))
        tracked.cursor[group] = max(first, stop)
        if not self._has_hashes and self._finder is not None:
            known = self._finder.hashes(tracked.request, group, end)
            wanted = [i for i in range(first, min(stop, len(known))) if ids[i] != NULL_BLOCK]
            return first, [ids[i] for i in wanted], [known[i] for i in wanted]
        numbers, hashes = [], []
        for i in range(first, stop):
            kept = self._blocks[ids[i]].block_hash if ids[i] != NULL_BLOCK else None
            if kept is not None:  # vLLM gives no hash to blocks that no hit can need
                numbers.append(ids[i])
                hashes.append(bytes(get_block_hash(kept)))
        return first, numbers, hashes

    def _boundary_states(
        self, tracked: Tracked, group: int, offers: Any, end: int
    ) -> tuple[int, list[int], list[bytes]]:
        """State groups: vLLM says which block holds the state at which boundary."""
        layout, finder = self.layouts[group], self._finder
        numbers: list[int] = []
        hashes: list[bytes] = []
        first = 0
        if layout is None or finder is None:
            return first, numbers, hashes
        for of_group, number, tokens in offers or ():
            if of_group != group or number == NULL_BLOCK or tokens % layout.block_tokens or tokens > end:
                continue
            known = finder.hashes(tracked.request, group, tokens)
            if len(known) == tokens // layout.block_tokens:
                first = len(known) - 1
                numbers.append(number)
                hashes.append(known[-1])
        return first, numbers, hashes

    def _order_store(self, tracked: Tracked, start: int, scheduled: int, state: Any) -> Store | None:
        """What of a request is full after this step, which computes tokens start to start + scheduled."""
        request = tracked.request
        ids = state.get_block_ids(request.request_id) if state is not None else None
        if ids is None:
            return None
        end = min(start + scheduled, request.num_tokens)
        offers = state.boundary_state_offloads.get(request.request_id)
        store = Store(self._jobs + 1, request.request_id)
        told = []
        for layout in self.layouts:
            if layout is None:
                continue
            group, at = layout.group, start // layout.block_tokens
            tracked.cursor[group] = min(tracked.cursor.get(group, at), at)  # tokens are computed again after a failure
            if group in self._mamba:
                first, numbers, hashes = self._boundary_states(tracked, group, offers, end)
            else:
                first, numbers, hashes = self._full_blocks(tracked, group, ids[group], end)
            if numbers:
                store.groups[group] = numbers, hashes
                told.append(Announcement(request, group, first, hashes))
        if not store.groups:
            return None
        self._jobs += 1
        self._awaited[store.number] = self._workers
        if self.events:
            self._announcements[store.number] = told
        return store

    def orders(self, output: Any) -> Orders:
        """Of one step."""
        orders = Orders(self._loads, [], self.epoch)
        self._loads = []
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        if not self._may_store:
            return orders
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        state = output.kv_connector_block_state
        for name, start in starts.items():
            tracked = self._requests.get(name)
            if tracked is not None:
                store = self._order_store(tracked, start, output.num_scheduled_tokens.get(name, 0), state)
                if store is not None:
                    orders.stores.append(store)
        return orders

    # ---- results ----

    def _is_done(self, number: int, count: int) -> bool:
        self._awaited[number] = self._awaited.get(number, 0) - count
        if self._awaited[number] > 0:
            return False
        del self._awaited[number]
        return True

    def results(self, results: Results) -> None:
        """What the workers have done."""
        for name in results.failed:
            if name in self._requests:
                self._requests[name].has_failed = True
        for number, count in results.loaded.items():
            if self._is_done(number, count):
                for hit in self._pins.pop(number, ()):
                    hit.release()
        for number, count in results.stored.items():
            if self._is_done(number, count):
                told = self._announcements.pop(number, [])
                if number not in results.skipped:
                    self._announce(told)

    def _announce(self, told: list[Announcement]) -> None:
        if self.events is None or self._finder is None:
            return
        for each in told:
            layout = self.layouts[each.group]
            if layout is None:
                continue
            keys = [self._finder.rings[0].key(each.group, one) for one in each.hashes]
            known = self._finder.hashes(each.request, each.group, each.first * layout.block_tokens)
            parent = known[-1] if known else None
            self.events.stored(each.request, each.group, keys, each.hashes, each.first, layout.block_tokens, parent)

    def finished(self, request: Any) -> None:
        """A request has ended or was aborted. Pins of a load that is under way go when the load has ended."""
        self._requests.pop(request.request_id, None)

    def reset(self) -> bool:
        """What was stored so far is not to be found any more: by this engine, which from now on shares with no
        other."""
        self.epoch = os.urandom(8)
        if self._finder is not None:
            self._finder.rings = self._rings()
        for tracked in self._requests.values():
            tracked.found = Found()
        log.warning("kvpool: the cache was reset: this engine shares nothing with others until it is started again")
        return True

    def take_stats(self) -> PoolStats | None:
        """Since the last time."""
        self.stats.add("pool_failures", self.link.take_failures())
        return self.stats.take()

    def close(self) -> None:
        """Idempotent."""
        for hits in self._pins.values():
            for hit in hits:
                hit.release()
        self._pins.clear()
        self._requests.clear()
        self.link.close()
