"""KV events of the pool's tier: blocks that this engine has published there, and that have gone since."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

import kvpool
from kvpool.bindings.vllm.link import PoolLink

__all__ = ["Events"]

MOST = 1 << 20
PAUSE_S = 0.1
ENDS = ("evicted", "removed")


class Events:
    """Collects what `take_events` hands to vLLM's publisher. The medium is CPU, the owner "kvpool".

    Only removals of blocks that this engine has announced are announced; of the last million of them.
    """

    def __init__(self, link: PoolLink) -> None:
        self._link = link
        self._announced: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._queue: list[Any] = []
        self._stream: kvpool.EventStream | None = None
        self._next_poll = 0.0

    def stored(
        self,
        request: Any,
        group: int,
        keys: Iterable[bytes],
        hashes: list[Any],
        first: int,
        block_tokens: int,
        parent: Any,
    ) -> None:
        """Blocks first, first + 1, ... of a request were published under keys (of rank 0)."""
        if self._stream is None or self._stream.pool is not self._link.pool:
            self._stream = self._link.run(lambda pool: pool.events(), None)
            if self._stream is not None:
                self._poll(quiet=True)  # what was before is not ours to tell
        for key, block_hash in zip(keys, hashes, strict=True):
            self._announced[key] = maybe_convert_block_hash(block_hash), group
            self._announced.move_to_end(key)
        while len(self._announced) > MOST:
            self._announced.popitem(last=False)
        lora = request.lora_request
        self._queue.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(each) for each in hashes],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=list(request.all_token_ids[first * block_tokens : (first + len(hashes)) * block_tokens]),
                block_size=block_tokens,
                lora_id=lora.adapter_id if lora else None,
                lora_name=lora.name if lora else None,
                medium=MEDIUM_CPU,
                group_idx=group,
                ownership="kvpool",
            )
        )

    def _poll(self, *, quiet: bool = False) -> None:
        stream = self._stream
        if stream is None:
            return
        nothing: list[kvpool.Event] = []
        for event in self._link.run(lambda pool: stream.poll() if stream.pool is pool else nothing, nothing):
            known = self._announced.pop(event.key, None) if event.kind in ENDS else None
            if known is not None and not quiet:
                self._queue.append(
                    BlockRemoved(block_hashes=[known[0]], medium=MEDIUM_CPU, group_idx=known[1], ownership="kvpool")
                )

    def take(self) -> list[Any]:
        """What has happened since the last time."""
        if self._stream is not None and time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + PAUSE_S
            self._poll()
        taken, self._queue = self._queue, []
        return taken
