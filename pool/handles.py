"""What a caller holds: blocks pinned for reading, and blocks reserved for writing."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.arguments import whole
from kvpool.bindings import ffi, lib
from kvpool.bindings.errors import Closed, InvalidArgument, NotOwned, PoolFull, WrongThread
from kvpool.keys import KeysLike, key_buffer

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from kvpool.pool import Pool

__all__ = ["Hit", "Reservation"]


def demand_room(pool: Pool, block_class: int, count: int) -> None:
    """Refuse what can never be had before memory for the list of it is taken. Raises `PoolFull`."""
    most = pool.info["classes"][block_class]["blocks"]
    if count > most:
        raise PoolFull(f"{count} blocks were asked for: the pool has {most} of this size")


def new_hold(pool: Pool, block_class: int, capacity: int) -> Any:
    """An empty hold whose destructor is a C function.

    A `__del__` in Python could swallow a KeyboardInterrupt that arrives while it runs; this cannot, and it knows what
    is held at whatever moment an exception comes.
    """
    core = pool.core
    raw = core.lib.kvp_hold_new(pool.handle, block_class, capacity)
    if not raw:
        raise MemoryError(f"no memory for a list of {capacity} blocks")
    return core.ffi.gc(raw, core.lib.kvp_hold_end)


_unpack, _buffer = ffi.unpack, ffi.buffer
_SPARES_MAX = 64
"""How many released holds of a class and size wait for the next hit: making one costs more than a match."""


def _bytes_of(refs: Any, count: int) -> bytes:
    """References, as they are now."""
    if count == 1:
        return int(refs[0]).to_bytes(8, sys.byteorder)
    copy: bytes = _buffer(refs, 8 * count)[:]
    return copy


class Hit:
    """Blocks that are pinned: while it is held they are neither reused nor moved. A context manager.

    `blocks` are uint32 block numbers within `block_class`: rows of `pool.tensor(block_class)`. `refs` are uint64
    references that may be sent to another process, which pins them with `pool.pin`. Release is idempotent and happens
    at the end of a `with`, on `release()`, and when the object goes. Any thread may release; the process must be the
    one that made it (in a forked child it is inert).
    """

    __slots__ = (
        "__weakref__", "_blocks", "_box", "_first", "_pool", "_raw", "_refs", "_spares", "block_class", "count", "held",
    )  # fmt: skip

    def __init__(self, pool: Pool, block_class: int, capacity: int) -> None:
        self._pool = pool
        self.block_class = block_class
        self.count = 0
        """How many of the references in `held` are pinned, from the first on."""
        self._raw: bytes | None = None
        self._refs: NDArray[np.uint64] | None = None
        self._blocks: NDArray[np.uint32] | None = None
        spares = self._spares = pool.spares[block_class][capacity.bit_length()]
        try:
            made = spares.pop()
        except IndexError:
            held = new_hold(pool, block_class, (1 << capacity.bit_length()) - 1)
            made = held, held.refs
        self.held: Any = made[0]
        self._first = made[1]  # of its references: reading the member costs as much as a reference
        self._box = [made]  # who takes it out releases it: one of two threads

    def hold(self, count: int, *, holes: bool = False) -> Hit:
        """The first `count` references are pinned now, but for holes."""
        self.count = count
        if holes:
            self._raw = self._bytes()
        return self

    @property
    def refs(self) -> NDArray[np.uint64]:
        """The references, as they were when the blocks were pinned."""
        if self._refs is None:
            self._refs = np.frombuffer(self._bytes(), np.uint64)
        return self._refs

    def _bytes(self) -> bytes:
        _held, raw = self.held, self._raw  # in the reverse order of `release`; what is held is not freed
        now = _bytes_of(self._first, self.count) if raw is None else raw
        return now if self._raw is None else self._raw

    @property
    def blocks(self) -> NDArray[np.uint32]:
        """The numbers of the blocks."""
        if self._blocks is None:
            self._blocks = (self.refs & np.uint64(lib.KVP_BLOCKS_MAX)).astype(np.uint32)
            self._blocks[self.refs == 0] = lib.KVP_NO_BLOCK
        return self._blocks

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def views(self) -> list[NDArray[np.uint8]]:
        """One read-only uint8 array per block, over the pool's memory. Valid while the hit is held."""
        rows, held, first = self._pool.rows[self.block_class], self.held, self._first
        if held is None or self._raw is not None:
            return list(map(rows.__getitem__, self.refs.tolist()))
        if self.count == 1:
            return [rows[first[0]]]
        return list(map(rows.__getitem__, _unpack(first, self.count)))

    def views_as(self, dtype: DTypeLike, shape: tuple[int, ...] | None = None) -> list[NDArray[Any]]:
        """One read-only array of `dtype` and `shape` (default: a whole block) per block, over the pool's memory."""
        rows = self._pool.tensor(self.block_class, dtype, shape)
        return [rows[number] for number in self.blocks]

    def release(self) -> None:
        """Undo the pins. Idempotent."""
        try:
            made = self._box.pop()
        except IndexError:
            return
        if self._raw is None:
            self._raw = _bytes_of(made[1], self.count)
        self.held = None
        self._pool.clear_hold(made[0])
        if len(self._spares) < _SPARES_MAX:
            self._spares.append(made)

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Hit {len(self)} blocks of class {self.block_class}>"


class Reservation:
    """Blocks to fill and publish. A context manager: what is not published when it ends is withdrawn.

    Belongs to the thread that made it (`WrongThread` elsewhere). `views` are writable until publish or withdraw; do not
    keep other writable references to their memory. `keys[i]` will name `views[i]`; blocks that were reserved by number
    have no keys until `publish`.
    """

    __slots__ = ("__weakref__", "_pool", "_thread", "_views", "block_class", "blocks", "held", "keys", "refs")

    def __init__(self, pool: Pool, block_class: int, keys: tuple[Any, int]) -> None:
        self._pool = pool
        self.block_class = block_class
        self.keys = keys
        self._thread = threading.get_ident()
        self.held = new_hold(pool, block_class, keys[1])
        self._views: list[NDArray[Any]] = []
        self.blocks: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.refs: NDArray[np.uint64] = np.zeros(0, np.uint64)

    def _numbers(self) -> NDArray[np.uint32]:
        """What is still reserved, by position, as C has it now."""
        return np.frombuffer(ffi.buffer(self.held.numbers, 4 * len(self)), np.uint32)

    def hold(self) -> Reservation:
        """All blocks are reserved now."""
        self.blocks = self._numbers().copy()
        self.blocks.flags.writeable = False
        return self

    def _enter(self) -> None:
        if threading.get_ident() != self._thread:
            raise WrongThread("this reservation was made by another thread: reserve in the thread that fills")

    def __len__(self) -> int:
        return self.keys[1]

    @property
    def is_open(self) -> bool:
        """Is anything still reserved, neither published nor withdrawn?"""
        return bool((self._numbers() != lib.KVP_NO_BLOCK).any())

    @property
    def views(self) -> list[NDArray[np.uint8]]:
        """One writable uint8 array per block, over the pool's memory."""
        return self.views_as(np.uint8)

    def views_as(self, dtype: DTypeLike, shape: tuple[int, ...] | None = None) -> list[NDArray[Any]]:
        """One writable array of `dtype` and `shape` (default: as long as a block) per block, over the pool's memory."""
        self._enter()
        if len(self) and not self.is_open:
            raise Closed("this reservation is over: published blocks are write-once, withdrawn ones are not yours")
        rows = self._pool.writable(self.block_class, dtype, shape)
        made = [rows[number] for number in self.blocks]
        self._views += made
        return made

    def fill(self, index: int, data: Any) -> None:
        """Copy a buffer, at most a block long, into block `index` with non-temporal stores; the rest stays."""
        self._enter()
        try:
            source = ffi.from_buffer(data)
        except (TypeError, ValueError, BufferError) as error:
            raise InvalidArgument(f"block data must be a contiguous buffer: {error}") from error
        number = int(self._numbers()[whole("index", index, 0, len(self) - 1)])
        core = self._pool.core
        core.check(core.lib.kvp_fill(self._pool.handle, self.block_class, number, source, len(source)))

    def _end(self) -> None:
        for view in self._views:
            view.flags.writeable = False
        self._views.clear()

    def publish(self, keys: KeysLike | None = None) -> int:
        """Make all blocks visible at once under their keys; returns how many are ours.

        `keys`: if they were not known when the blocks were reserved (or are others now), one per block.

        A block whose key was published by somebody else meanwhile is given back: the first whole block wins. `refs[i]`
        is the reference of block i, 0 if it was given back. Raises `NotOwned` when there is nothing left to publish,
        `InvalidArgument` if there are no keys, or not one per block.
        """
        refs = np.zeros(len(self), np.uint64)
        return self._publish(keys, self._pool.core.lib.kvp_publish, ffi.cast("uint64_t *", ffi.from_buffer(refs)), refs)

    def publish_pinned(self, keys: KeysLike | None = None) -> Hit:
        """As `publish`, for who goes on reading these blocks: the Hit pins them from before anybody can see them.

        It has an entry per block; where another block of the key was there, `refs` has a 0, `blocks` 0xFFFFFFFF, and
        our block stays reserved until `withdraw`. Raises `NoPins` as well: then nothing has happened.
        """
        self._enter()
        hit = Hit(self._pool, self.block_class, len(self))
        refs = np.frombuffer(ffi.buffer(hit.held.refs, 8 * len(self)), np.uint64)
        self._publish(keys, self._pool.core.lib.kvp_publish_kept, hit.held.refs, refs)
        return hit.hold(len(self), holes=not self.refs.all())

    def _publish(self, keys: KeysLike | None, verb: Any, target: Any, refs: NDArray[np.uint64]) -> int:
        """`verb` writes to `target`, which `refs` shows."""
        self._enter()
        self._name(keys)
        pointer, count = self.keys
        if count and not self.is_open:
            raise NotOwned("this reservation is over: it was published or withdrawn before")
        for view in self._views:
            view.flags.writeable = False
        core = self._pool.core
        published = core.check(verb(self._pool.handle, self.block_class, self.held.numbers, pointer, count, target))
        self._end()
        self.refs = refs.copy()
        return published

    def _name(self, keys: KeysLike | None) -> None:
        """From here on these are the keys of the blocks."""
        pointer, count = self.keys if keys is None else key_buffer(keys)
        if count != len(self) or (count and pointer == ffi.NULL):
            raise InvalidArgument(f"{len(self)} blocks and {count if pointer else 0} keys: one key per block")
        self.keys = pointer, count

    def withdraw(self) -> None:
        """Give unpublished blocks back. Idempotent."""
        self._enter()
        self._withdraw()

    def _withdraw(self) -> None:
        self._end()
        self._pool.core.lib.kvp_hold_clear(self.held)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._withdraw()

    def __repr__(self) -> str:
        return f"<Reservation {len(self)} blocks of class {self.block_class}{'' if self.is_open else ', over'}>"
