"""What a caller holds: blocks pinned for reading, and blocks reserved for writing."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.arguments import whole
from kvpool.bindings import Core, ffi, lib
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


def new_hold(core: Core, handle: Any, block_class: int, capacity: int) -> Any:
    """An empty hold whose destructor is a C function.

    A `__del__` in Python could swallow a KeyboardInterrupt that arrives while it runs; this cannot, and it knows what
    is held at whatever moment an exception comes.
    """
    raw = core.lib.kvp_hold_new(handle, block_class, capacity)
    if not raw:
        raise MemoryError(f"no memory for a list of {capacity} blocks")
    return core.ffi.gc(raw, core.lib.kvp_hold_end)


_SPARES_MAX = 64
"""How many released holds of a class and size wait for the next hit: making one costs more than a match."""
_ROWS_MAX = 1 << 16
_NUMBER: int = lib.KVP_BLOCKS_MAX
_buffer = ffi.buffer


class Rows:
    """A view of each block of a class, kept once it was made: making one costs more than finding the block."""

    __slots__ = ("_array", "_some", "every", "seen")

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        self.every: NDArray[Any] | None = None
        """By number, from the first use on; not where there are many."""
        self._some: dict[int, NDArray[np.uint8]] = {}
        self.seen: dict[int, NDArray[np.uint8]] = {}
        """Of single blocks, by reference. Bounded, for references are new for ever."""

    def add(self, ref: int) -> NDArray[np.uint8]:
        """The view of a block that was not seen under this reference."""
        if len(self.seen) >= min(4 * len(self._array), _ROWS_MAX):
            self.seen.clear()  # of publications that are long over
        row = self.seen[ref] = self._one(ref & _NUMBER)
        return row

    def _one(self, number: int) -> NDArray[np.uint8]:
        row = self._some.get(number)
        if row is None:
            row = self._array[number]
            if len(self._some) < _ROWS_MAX:
                self._some[number] = row
        return row

    def of(self, numbers: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """The views of blocks, by number. numpy picks them: a number that Python sees costs more than its view."""
        if self.every is None:
            if len(self._array) > _ROWS_MAX:
                return [self._one(number) for number in numbers.tolist()]
            every = np.empty(len(self._array), object)
            every[:] = list(self._array)
            self.every = every
        views: list[NDArray[np.uint8]] = self.every[numbers].tolist()
        return views


Made = tuple[Any, "NDArray[np.int64]", Any]
"""A hold, and where C says which blocks it has pinned: their numbers, and a buffer of their references. Both are valid
while the hold is there."""


class Shelf:
    """What the hits of one class and size share, and their holds that wait for the next one."""

    __slots__ = ("_capacity", "_core", "_handle", "block_class", "clear", "keep", "rows", "seen", "spare")

    def __init__(self, core: Core, handle: Any, block_class: int, capacity: int, rows: Rows) -> None:
        self._core = core
        self._handle = handle
        self._capacity = capacity
        self.block_class = block_class
        self.rows, self.seen = rows, rows.seen
        self.clear = core.lib.kvp_hold_clear
        spares: deque[Made] = deque(maxlen=_SPARES_MAX)
        self.spare, self.keep = spares.pop, spares.append

    def take(self) -> Made:
        """An empty hold."""
        try:
            return self.spare()
        except IndexError:
            held, count = new_hold(self._core, self._handle, self.block_class, self._capacity), self._capacity
            blocks = np.frombuffer(_buffer(held.blocks, 8 * count), np.int64)
            return held, blocks, _buffer(held.refs, 8 * count)


def shelves(core: Core, handle: Any, block_class: int, rows: Rows) -> list[Shelf]:
    """Those of a class: for a hit of `count` blocks number (count - 1).bit_length()."""
    return [Shelf(core, handle, block_class, 1 << bits, rows) for bits in range(33)]


class Hit:
    """Blocks that are pinned: while it is held they are neither reused nor moved. A context manager.

    `blocks` are uint32 block numbers within `block_class`: rows of `pool.tensor(block_class)`. `refs` are uint64
    references that may be sent to another process, which pins them with `pool.pin`. Release is idempotent and happens
    at the end of a `with`, on `release()`, and when the object goes. Any thread may release; the process must be the
    one that made it (in a forked child it is inert).
    """

    __slots__ = ("__weakref__", "_made", "_pool", "_raw", "_shelf", "count")

    def __init__(self, pool: Pool, shelf: Shelf, made: Any, count: int, raw: int | bytes | None) -> None:
        self._pool = pool
        self._shelf = shelf
        self._made = made  # as `Shelf.take` gave it. Who deletes it releases: one of two threads
        self.count = count
        """How many blocks are pinned, from the first key on."""
        self._raw = raw  # the references, of one block as a number; None: as they are in `held`

    @classmethod
    def empty(cls, pool: Pool, block_class: int, capacity: int) -> Hit:
        """With room for so many blocks, for C to pin them in `held`."""
        shelf = pool.shelves[block_class][(capacity - 1).bit_length()]
        return cls(pool, shelf, shelf.take(), 0, None)

    @property
    def held(self) -> Any:
        """What C has pinned, until it is released."""
        return self._made[0]

    def hold(self, count: int, *, holes: bool = False) -> Hit:
        """The first `count` references are pinned now, but for holes."""
        self.count = count
        if holes:
            self._keep_refs(self._made)
        return self

    @property
    def block_class(self) -> int:
        """Which size of blocks."""
        return self._shelf.block_class

    def _keep_refs(self, made: Made) -> None:
        """Before the hold may be another's. Whoever finds here that nothing was kept has read it before that."""
        now = made[2][: 8 * self.count]
        if self._raw is None:
            self._raw = now

    @property
    def refs(self) -> NDArray[np.uint64]:
        """The references, as they were when the blocks were pinned."""
        if self._raw is None:
            with suppress(AttributeError):  # released just now
                self._keep_refs(self._made)
        raw = self._raw
        return np.array([raw], np.uint64) if isinstance(raw, int) else np.frombuffer(raw or b"", np.uint64)

    @property
    def blocks(self) -> NDArray[np.uint32]:
        """The numbers of the blocks."""
        refs = self.refs
        blocks = (refs & np.uint64(_NUMBER)).astype(np.uint32)
        blocks[refs == 0] = lib.KVP_NO_BLOCK
        return blocks

    def __len__(self) -> int:
        return self.count

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def views(self) -> list[NDArray[np.uint8]]:
        """One read-only uint8 array per block, over the pool's memory. Valid while the hit is held."""
        raw, shelf = self._raw, self._shelf
        try:
            if raw is not None:
                return [shelf.seen[raw]]  # type: ignore[index]
            numbers, every = self._made[1][: self.count], shelf.rows.every
            views = every[numbers].tolist() if every is not None else shelf.rows.of(numbers)
            if self._raw is None:  # else it was released meanwhile, and they may be another's
                return views
        except (KeyError, AttributeError):
            if isinstance(raw, int):
                return [shelf.rows.add(raw)]
        numbers = self.blocks.astype(np.int64)
        if lib.KVP_NO_BLOCK in numbers:
            raise IndexError("one of the blocks is not pinned: another stands under its key")
        return shelf.rows.of(numbers)

    def views_as(self, dtype: DTypeLike, shape: tuple[int, ...] | None = None) -> list[NDArray[Any]]:
        """One read-only array of `dtype` and `shape` (default: a whole block) per block, over the pool's memory."""
        rows = self._pool.tensor(self.block_class, dtype, shape)
        return [rows[number] for number in self.blocks]

    def release(self) -> None:
        """Undo the pins. Idempotent."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            made = self._made
            if self._raw is None:
                now = made[2][: 8 * self.count]
                if self._raw is None:
                    self._raw = now
            del self._made
        except AttributeError:
            return
        shelf = self._shelf
        clear, keep = shelf.clear, shelf.keep  # a name of its own costs less than a method: the interpreter caches it
        clear(made[0])
        keep(made)

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
        self.held = new_hold(pool.core, pool.handle, block_class, keys[1])
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
        hit = Hit.empty(self._pool, self.block_class, len(self))
        refs = np.frombuffer(ffi.buffer(hit.held.refs, 8 * len(self)), np.uint64)
        self._publish(keys, self._pool.core.lib.kvp_publish_kept, hit.held.refs, refs)
        return hit.hold(len(self), holes=True)

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
