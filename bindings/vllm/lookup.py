"""How long a hit in the pool is: vLLM's own rules, asked of the pool's directory.

Each kind of cache has its own rule (all blocks of a prefix, the last window, the state at the boundary), and several
kinds must agree on one length. vLLM's coordinator knows them; it looks blocks up through its block pool. So a copy of
the coordinator is given a directory that answers for the pool instead.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes

from kvpool.bindings.errors import InvalidArgument

if TYPE_CHECKING:
    from kvpool.bindings.vllm.identity import KeyRing
    from kvpool.bindings.vllm.layout import GroupLayout
    from kvpool.bindings.vllm.link import PoolLink

__all__ = ["Finder", "Found"]

NEEDED = ("block_pool", "single_type_managers", "find_longest_cache_hit", "scheduler_block_size")


class Directory:
    """What a lookup asks instead of vLLM's BlockPool: is there a block of this hash, in each of these groups?"""

    def __init__(self, hash_block_size: int) -> None:
        self.hash_block_size = hash_block_size
        self.null_block = KVCacheBlock(0)
        self.null_block.is_null = True
        self.there: set[tuple[int, bytes]] = set()
        self._some_block = KVCacheBlock(1)

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        """One block for each group, or None: which one does not matter here."""
        if all((group, bytes(block_hash)) in self.there for group in kv_cache_group_ids):
            return [self._some_block] * len(kv_cache_group_ids)
        return None


class Found:
    """The blocks of one request that were in the pool when it was last looked: hash -> references, one for each
    rank."""

    def __init__(self) -> None:
        self.keys: dict[int, tuple[list[bytes], list[bytes]]] = {}
        """Per group: the hashes in order, and for each rank their keys in one buffer."""
        self.refs: dict[tuple[int, bytes], tuple[int, ...]] = {}


def _asking(coordinator: Any, directory: Directory) -> Any:
    """A copy of vLLM's coordinator, with its managers, that asks another directory. Only its lookups may be called."""
    asking = copy.copy(coordinator)
    asking.block_pool = directory
    managers = [copy.copy(manager) for manager in coordinator.single_type_managers]
    for manager in managers:
        manager.block_pool = directory
    asking.single_type_managers = type(coordinator.single_type_managers)(managers)
    return asking


class Finder:
    """Looks requests up in the pool, for all groups and ranks at once."""

    def __init__(
        self, manager: Any, layouts: Sequence[GroupLayout | None], rings: Sequence[KeyRing], link: PoolLink
    ) -> None:
        coordinator = manager.coordinator
        missing = [name for name in NEEDED if not hasattr(coordinator, name)]
        if missing:
            raise InvalidArgument(
                f"this vLLM's KV cache coordinator has no {', '.join(missing)}: kvpool knows vLLM 0.32"
            )
        self._hash_tokens: int = manager.block_pool.hash_block_size
        self._directory = Directory(self._hash_tokens)
        self._find: Callable[[Any, int], int] = self._by_coordinator
        if manager.enable_caching:
            self._coordinator = _asking(coordinator, self._directory)
        elif len(layouts) == 1:
            self._find = self._by_manager
            self._manager = coordinator.single_type_managers[0]
        else:
            raise InvalidArgument("a model with several kinds of cache needs vLLM's prefix caching: it is switched off")
        self._step: int = coordinator.scheduler_block_size
        self._layouts = layouts
        self._link = link
        self.rings = rings
        self.looked_up = self.hits = 0

    def _by_coordinator(self, block_hashes: Any, most: int) -> int:
        return int(self._coordinator.find_longest_cache_hit(block_hashes, most)[1])

    def _by_manager(self, block_hashes: Any, most: int) -> int:
        """Where vLLM keeps no prefix cache of its own (MLA on a CPU) its coordinator knows no rule, its manager
        does."""
        spec = self._manager.kv_cache_spec
        return int(
            self._manager.find_longest_cache_hit(
                block_hashes=block_hashes,
                max_length=most,
                kv_cache_group_ids=[0],
                block_pool=self._directory,
                kv_cache_spec=spec,
                drop_eagle_block=False,
                alignment_tokens=self._step,
            )[1]
        )

    def hashes(self, request: Any, group: int, tokens: int) -> list[bytes]:
        """The hash of each full block of a group among the first `tokens` tokens."""
        layout = self._layouts[group]
        if layout is None:
            return []
        resolved = resolve_block_hashes(request.block_hashes, self._hash_tokens, layout.block_tokens)
        return [bytes(resolved[i]) for i in range(min(len(resolved), tokens // layout.block_tokens))]

    def _look(self, found: Found, request: Any, tokens: int) -> None:
        """Refresh what is there. Keys of a request are derived once."""
        found.refs = {}
        for layout in self._layouts:
            if layout is None:
                continue
            hashes, keys = found.keys.get(layout.group, ([], []))
            wanted = tokens // layout.block_tokens
            if len(hashes) < wanted:
                hashes = self.hashes(request, layout.group, tokens)
                keys = [ring.keys(layout.group, hashes) for ring in self.rings]
                found.keys[layout.group] = hashes, keys
            if not hashes:
                continue
            refs = [self._refs(layout.group, each, len(hashes)) for each in keys]
            self.looked_up += len(hashes)
            for i, block_hash in enumerate(hashes):
                of_ranks = tuple(int(each[i]) for each in refs)
                if all(of_ranks):
                    found.refs[layout.group, block_hash] = of_ranks
                    self.hits += 1

    def _refs(self, group: int, keys: bytes, count: int) -> Any:
        return self._link.group(np.zeros(count, np.uint64), group, lambda ns: ns.lookup(keys))

    def hit_tokens(self, found: Found, request: Any, local: int) -> int:
        """Tokens of the longest prefix that the engine has when the pool's blocks are added to its own first `local`.

        A multiple of the scheduler's block size; at least one token is left to compute.
        """
        most = (request.num_tokens - 1) // self._step * self._step
        if most <= local:
            return 0
        self._look(found, request, most)
        if not found.refs:
            return 0
        there = self._directory.there = set(found.refs)
        for layout in self._layouts:
            if layout is not None:  # what vLLM has itself below `local` is there, or is not needed for more
                there.update(
                    (layout.group, each) for each in found.keys[layout.group][0][: local // layout.block_tokens]
                )
        while most > local:
            hit = self._find(request.block_hashes, most)
            if hit >= most or hit % self._step == 0:
                return hit
            most = hit // self._step * self._step  # a hit inside a block: vLLM loads whole ones
        return 0
