"""Blocks by number, for an engine whose cache is the pool: some reserved to fill, some pinned to read."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.arguments import whole
from kvpool.bindings import ffi, lib
from kvpool.bindings.errors import Closed, InvalidArgument, NotOwned
from kvpool.handles import demand_room, new_hold
from kvpool.keys import KeysLike, key_buffer

if TYPE_CHECKING:
    from kvpool.pool import Pool

__all__ = ["Stock"]


class Stock:
    """What one engine holds of a block class: made by `Pool.stock`. Thread-safe. A context manager.

    A block is here either *reserved* (`take`, until `publish` or `give`), or *pinned* (`find` or `publish`, until
    `release`), or not at all. Everything goes back when the stock is closed or collected, and by the pool's recovery if
    the process dies. `pool.writable(block_class)` has the blocks as rows, by number.
    """

    def __init__(self, pool: Pool, block_class: int) -> None:
        self._pool = pool
        self._core = pool.core
        self.block_class = block_class
        self._blocks: int = pool.info["classes"][block_class]["blocks"]
        # A place for each number: its reference, and itself.
        self._hold = new_hold(pool.core, pool.handle, block_class, self._blocks)
        self._lock = threading.Lock()
        self._refs = np.frombuffer(ffi.buffer(self._hold.refs, 8 * self._blocks), np.uint64)
        self._numbers = np.frombuffer(ffi.buffer(self._hold.numbers, 4 * self._blocks), np.uint32)
        self._is_closed = False

    def _enter(self) -> None:
        if self._is_closed:
            raise Closed("this stock was closed: its blocks have gone back")

    def _checked(self, numbers: Sequence[int], *, reserved: bool) -> list[int]:
        """Each is here, once, as that. Raises `NotOwned`."""
        seen: set[int] = set()
        try:
            listed = [operator.index(number) for number in numbers]
        except TypeError as error:
            raise InvalidArgument(f"{numbers!r} is no list of block numbers: {error}") from error
        for number in listed:
            here = 0 <= number < self._blocks and (
                self._numbers[number] != lib.KVP_NO_BLOCK if reserved else self._refs[number] != 0
            )
            if not here or number in seen:
                raise NotOwned(
                    f"block {number} is not {'reserved' if reserved else 'pinned'} by this stock, or is named twice"
                )
            seen.add(number)
        return listed

    @property
    def reserved(self) -> int:
        """Blocks that are reserved."""
        return int((self._numbers != lib.KVP_NO_BLOCK).sum())

    @property
    def pinned(self) -> int:
        """Blocks that are pinned."""
        return int((self._refs != 0).sum())

    def take(self, count: int) -> list[int]:
        """Reserve blocks, evicting in policy order: all or none. Never waits. Raises `PoolFull`."""
        count = whole("count", count)
        demand_room(self._pool, self.block_class, count)
        numbers = ffi.new("uint32_t[]", count)
        with self._lock:
            self._enter()
            self._core.check(self._core.lib.kvp_reserve(self._pool.handle, self.block_class, count, numbers))
            taken = list(numbers)
            self._numbers[taken] = taken
        return taken

    def give(self, numbers: Sequence[int]) -> None:
        """Give reserved blocks back. Raises `NotOwned`; then none was."""
        with self._lock:
            self._enter()
            given = self._checked(numbers, reserved=True)
            self._core.check(
                self._core.lib.kvp_withdraw(
                    self._pool.handle, self.block_class, ffi.new("uint32_t[]", given), len(given)
                )
            )
            self._numbers[given] = lib.KVP_NO_BLOCK

    def publish(self, numbers: Sequence[int], keys: KeysLike) -> list[bool]:
        """Make reserved, filled blocks findable; those that are ours are pinned here from then on.

        False where an earlier block has the key, or the directory no room: that block stays reserved. Raises
        `NotOwned`, `NoPins`, `InvalidArgument`; then nothing has happened.
        """
        pointer, count = key_buffer(keys)
        if count != len(numbers):
            raise InvalidArgument(f"{count} keys for {len(numbers)} blocks: one each")
        refs = ffi.new("uint64_t[]", count)
        with self._lock:
            self._enter()
            which = self._checked(numbers, reserved=True)
            self._core.check(
                self._core.lib.kvp_publish_kept(
                    self._pool.handle, self.block_class, ffi.new("uint32_t[]", which), pointer, count, refs
                )
            )
            ours = [bool(ref) for ref in refs]
            for number, ref in zip(which, refs, strict=True):
                if ref:
                    self._refs[number], self._numbers[number] = ref, lib.KVP_NO_BLOCK
        return ours

    def find(self, key: bytes) -> int | None:
        """The number of the block that is published under a key, pinned from now on; None if there is none.

        One `release` undoes it, however often it was found. Raises `NoPins`.
        """
        pointer, count = key_buffer([key])
        ref = ffi.new("uint64_t[1]")
        with self._lock:
            self._enter()
            found = self._core.check(self._core.lib.kvp_match(self._pool.handle, self.block_class, pointer, count, ref))
            if not found:
                return None
            number = int(ref[0]) & int(lib.KVP_BLOCKS_MAX)
            if self._refs[number]:
                self._core.lib.kvp_unpin_refs(self._pool.handle, ref, 1)
            else:
                self._refs[number] = ref[0]
        return number

    def release(self, numbers: Sequence[int]) -> None:
        """Unpin: from then on anybody may evict them. Raises `NotOwned`; then none was."""
        with self._lock:
            self._enter()
            which = self._checked(numbers, reserved=False)
            refs = ffi.new("uint64_t[]", [int(self._refs[number]) for number in which])
            self._core.check(self._core.lib.kvp_unpin_refs(self._pool.handle, refs, len(which)))
            self._refs[which] = 0

    def close(self) -> None:
        """Give everything back. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._core.lib.kvp_hold_clear(self._hold)

    def __enter__(self) -> Stock:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Stock of class {self.block_class}: {self.reserved} reserved, {self.pinned} pinned>"
