"""Blocks by text prefix: the verbs of one identity and tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvpool.arguments import numbers, seconds
from kvpool.bindings import Core, ffi
from kvpool.bindings.errors import InvalidArgument, PoolFull
from kvpool.bindings.hashing import hash_of
from kvpool.handles import Hit, Reservation, demand_room
from kvpool.keys import Identity, KeyMaker, Keys, KeysLike, key_buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvpool.pool import Pool

__all__ = ["Namespace", "Parts"]

T = TypeVar("T")
WAIT_S = 1.0
_new: Any = object.__new__
_TURN_S = 0.1  # then Python looks for signals that another thread took
_MISSED, _GOT = np.array([False]), np.array([True])
_from_buffer = ffi.from_buffer
_BYTES, _POINTERS = ffi.typeof("char[]"), ffi.typeof("void *[]")
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.0005, 0.02


def patiently(attempt: Callable[[], T], timeout: float | None) -> T:
    """Repeat `attempt` while it raises PoolFull, for at most `timeout` seconds; holds no lock while it waits."""
    limit = WAIT_S if timeout is None else seconds("timeout", timeout)
    try:
        return attempt()  # nearly always: no clock is read
    except PoolFull:
        if limit == 0:
            raise
    deadline = time.monotonic() + limit
    pause = _PAUSE_S_MIN
    while True:
        try:
            return attempt()
        except PoolFull:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
        time.sleep(min(pause, left))
        pause = min(pause * 2, _PAUSE_S_MAX)


class Namespace:
    """What one identity and tenant sees of a pool. Thread-safe; cheap to make; holds no state in the pool.

    Made by `Pool.namespace`. Two namespaces share blocks exactly if identity, tenant and block class are equal, in
    whatever process they were made.
    """

    def __init__(self, pool: Pool, identity: Identity, tenant: str, block_class: int) -> None:
        self.pool = pool
        self.identity = identity
        self.tenant = tenant
        self.block_class = block_class
        self._maker = KeyMaker(identity, tenant)
        self._core = pool.core
        self._match = pool.core.lib.kvp_hold_match
        self._get = pool.core.lib.kvp_hold_get
        self._put_one, self._read_one = pool.core.lib.kvp_put_one, pool.core.lib.kvp_read_one
        self._handle = pool.handle
        self._shelves = pool.shelves[block_class]
        self._ones = self._shelves[0]
        self._hash = hash_of(pool.core)

    def keys(self, token_ids: Any, *, after: Keys | None = None) -> Keys:
        """One 16-byte key per full block of tokens, each covering all tokens before it.

        `token_ids`: any buffer or sequence of ints in 0..2^32-1. `after` goes on where those keys ended. Tokens that do
        not fill a block have no key. Raises `InvalidArgument`.
        """
        return self._maker.keys(token_ids, after)

    def named(self, names: Sequence[bytes | str]) -> Keys:
        """One 16-byte key per name, for engines that hash prefixes themselves: a name is their hash of a block.

        Bound to identity and tenant as `keys` are. What a name covers is the engine's affair.
        """
        return self._maker.named(names)

    def match(self, keys: KeysLike) -> Hit:
        """The longest prefix of `keys` that is in the pool, pinned until the Hit is released. An empty Hit is a miss.

        With few pin slots left the prefix is as long as they reach; `NoPins` if there is none.
        """
        pointer, count = keys.pointer if type(keys) is Keys else key_buffer(keys)
        shelf = self._ones if count == 1 else self._shelves[(count - 1).bit_length()]
        get, match, spare = self._get, self._match, shelf.spare  # a name of its own costs less than a method
        try:
            made = spare()
        except IndexError:
            made = shelf.take()
        found = get(made[0], pointer) if count == 1 else match(made[0], pointer, count)
        if found <= 0:
            return Hit(self.pool, shelf, made, self._core.check(found), b"")
        hit: Hit = _new(Hit)  # its __init__, which costs as much as the search, by hand
        hit._pool = self.pool
        hit._shelf = shelf
        hit._made = made
        if count == 1:
            hit.count = 1
            hit._raw = found
        else:
            hit.count = found
            hit._raw = None
        return hit

    def match_tokens(self, token_ids: Any, *, after: Keys | None = None) -> tuple[Keys, Hit]:
        """`keys` and `match` in one call: a key per full block of tokens, and the longest prefix that is there, pinned.

        Faster than both: the hash hides the latency of the directory.
        """
        arguments, array = self._maker.request(self._core.ffi, token_ids, after)
        hit = Hit.empty(self.pool, self.block_class, len(array))
        hit.count = self._core.check(self._core.lib.kvp_hold_match_tokens(hit.held, self._hash, *arguments))
        return self._maker.made(arguments, array), hit

    def wait(self, keys: KeysLike, timeout: float = WAIT_S) -> int:
        """Sleep until all of `keys` are in the pool, for at most `timeout` seconds; how many of the first ones are.

        A publication on this host wakes it within microseconds; what other hosts publish is looked for each
        millisecond. Interruptible. Pins nothing: `match` follows.
        """
        pointer, count = key_buffer(keys)
        deadline = time.monotonic() + seconds("timeout", timeout)
        while True:
            left = deadline - time.monotonic()
            turn_ms = int(1000 * min(max(left, 0), _TURN_S))
            found = self._core.check(
                self._core.lib.kvp_wait(self.pool.handle, self.block_class, pointer, count, turn_ms)
            )
            if found == count or left < 0.001:
                return found

    def reserve(self, keys: KeysLike | int, *, timeout: float | None = None) -> Reservation:
        """Blocks to fill for `keys`: all or none, evicting in policy order. See `Reservation`.

        A number instead of keys: so many blocks, whose keys are given to `Reservation.publish`.

        Where nothing may be evicted it waits up to `timeout` seconds (default 1; 0: not at all), interruptibly and
        without a lock, then raises `PoolFull`.
        """
        if isinstance(keys, int) and not 0 <= keys <= 0xFFFFFFFF:
            raise InvalidArgument(f"cannot reserve {keys} blocks")
        if isinstance(keys, bool):
            raise InvalidArgument(f"{keys} is no number of blocks")
        wanted = (ffi.NULL, int(keys)) if isinstance(keys, int) else key_buffer(keys)
        demand_room(self.pool, self.block_class, wanted[1])
        new = Reservation(self.pool, self.block_class, wanted)

        def attempt() -> Reservation:
            self._core.check(self._core.lib.kvp_hold_reserve(new.held))
            return new.hold()

        return patiently(attempt, timeout)

    def put(self, keys: KeysLike, buffers: Sequence[Any] | NDArray[Any], *, timeout: float | None = None) -> int:
        """Copy one buffer per key into the pool and publish; keys that are present are skipped.

        All buffers have the same length, at most a block's; the rest of a block becomes zeros. Works in batches of 64
        keys, each stored whole or not at all. Returns how many blocks were stored. Raises `PoolFull` if not even one
        batch could be after `timeout` seconds (default 1), `InvalidArgument` for buffers that do not fit.
        """
        pointer, count = keys.pointer if type(keys) is Keys else key_buffer(keys)
        if timeout is not None:
            seconds("timeout", timeout)
        if count == 1:  # by far the most frequent: nothing is made but the address
            source, one = _only(buffers, False), self._put_one
            stored: int = one(self._handle, self.block_class, pointer, source, len(source))
            if stored >= 0:
                return stored
            call: tuple[Any, ...] = one, self._handle, self.block_class, pointer, source, len(source)
        else:
            _held, array, length = _pointers(buffers, count, writable=False)
            call = self._core.lib.kvp_put, self._handle, self.block_class, pointer, count, array, length
        return patiently(lambda: self._core.check(call[0](*call[1:])), timeout)

    def get_into(self, keys: KeysLike, buffers: Sequence[Any] | NDArray[Any]) -> NDArray[np.bool_]:
        """Copy blocks out, without pinning; True where the buffer holds the right bytes.

        All buffers have the same length, at most a block's. A False is a miss: that buffer is as it was, or zeroed if
        the block was reused during the copy. The interpreter lock is released meanwhile.
        """
        pointer, count = keys.pointer if type(keys) is Keys else key_buffer(keys)
        if count == 1:
            target, one = _only(buffers, True), self._read_one
            found = one(self._handle, self.block_class, pointer, target, len(target))
            if found > 0:
                return _GOT.copy()
            self._core.check(found)
            return _MISSED.copy()
        targets, array, length = _pointers(buffers, count, writable=True)
        got = np.empty(count, np.bool_)
        read = self._core.lib.kvp_read
        self._core.check(read(self.pool.handle, self.block_class, pointer, count, array, length, ffi.from_buffer(got)))
        del targets
        return got

    def put_parts(
        self, keys: KeysLike, parts: Parts, rows: Sequence[int] | NDArray[np.uint64], *, timeout: float | None = None
    ) -> int:
        """As `put`, but the block of keys[i] is gathered from row rows[i] of each of the parts."""
        pointer, count = key_buffer(keys)
        which = _rows(rows, count)
        return patiently(
            lambda: self._core.check(
                self._core.lib.kvp_put_parts(
                    self.pool.handle,
                    self.block_class,
                    pointer,
                    count,
                    parts.pointer(self._core),
                    len(parts),
                    ffi.cast("uint64_t *", ffi.from_buffer(which)),
                )
            ),
            timeout,
        )

    def get_into_parts(
        self, keys: KeysLike, parts: Parts, rows: Sequence[int] | NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """As `get_into`, but the block of keys[i] is scattered to row rows[i] of each of the parts."""
        pointer, count = key_buffer(keys)
        which, got = _rows(rows, count), np.zeros(count, np.uint8)
        self._core.check(
            self._core.lib.kvp_read_parts(
                self.pool.handle,
                self.block_class,
                pointer,
                count,
                parts.pointer(self._core),
                len(parts),
                ffi.cast("uint64_t *", ffi.from_buffer(which)),
                ffi.from_buffer(got),
            )
        )
        return got.astype(np.bool_)

    def contains(self, keys: KeysLike) -> NDArray[np.bool_]:
        """True for each key that is in the pool now. Pins nothing: the answer may be old when it arrives."""
        present: NDArray[np.bool_] = self.lookup(keys) != 0
        return present

    def lookup(self, keys: KeysLike) -> NDArray[np.uint64]:
        """The reference of each key's block, 0 where there is none. Pins nothing; `Pool.pin` validates."""
        pointer, count = key_buffer(keys)
        refs = np.zeros(count, np.uint64)
        self._core.check(
            self._core.lib.kvp_lookup(
                self.pool.handle, self.block_class, pointer, count, ffi.cast("uint64_t *", ffi.from_buffer(refs))
            )
        )
        return refs

    def touch(self, keys: KeysLike) -> int:
        """Tell the eviction policy that these keys were used, in this order. Returns how many are present."""
        pointer, count = key_buffer(keys)
        return self._core.check(self._core.lib.kvp_touch(self.pool.handle, self.block_class, pointer, count))

    def remove(self, keys: KeysLike) -> int:
        """Remove keys: nobody finds them any more; memory is reused at once, or when the last pin goes.

        Returns how many were present. Raises `Busy` if a worker that is stopped (a debugger, SIGSTOP) was about to
        evict one of the blocks and may yet let it stand; the other keys are removed, and it can be tried again.
        """
        pointer, count = key_buffer(keys)
        return self._core.check(self._core.lib.kvp_remove(self.pool.handle, self.block_class, pointer, count))

    def __repr__(self) -> str:
        return f"<Namespace {self.identity.model} tenant={self.tenant!r} class={self.block_class}>"


class Parts:
    """Where an engine's blocks lie in its own memory: block number r is row r of each part.

    Each part is (address, stride, bytes, at): row r has `bytes` bytes at address + r * stride, which lie from byte `at`
    on in the pool's block. Addresses are taken as they are: the caller keeps that memory alive, and passes only rows
    that it has. Immutable.
    """

    __slots__ = ("array", "reach")

    def __init__(self, parts: Sequence[tuple[int, int, int, int]]) -> None:
        if not parts or any(len(part) != 4 or part[2] == 0 for part in parts):
            raise InvalidArgument("parts are (address, stride, bytes, at), none negative, of at least one byte")
        flat = numbers("parts (address, stride, bytes, at)", [value for part in parts for value in part])
        self.array = flat.reshape(len(parts), 4)
        self.array.flags.writeable = False
        self.reach = max(at + length for _, _, length, at in parts)
        """Bytes that a pool's block must have."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a block that are copied."""
        return int(self.array[:, 2].sum())

    def __len__(self) -> int:
        return len(self.array)

    def pointer(self, core: Core) -> Any:
        """The `struct kvp_part` array, which has the same four words, for the core of one mode."""
        return core.ffi.cast("struct kvp_part *", ffi.from_buffer(self.array))


assert ffi.sizeof("struct kvp_part") == 4 * 8


def _rows(rows: Sequence[int] | NDArray[np.uint64], count: int) -> NDArray[np.uint64]:
    """Row numbers, one per key."""
    row = numbers("rows", rows)
    if row.shape != (count,):
        raise InvalidArgument(f"{count} keys and rows of shape {row.shape}: one row per key")
    return row


def _only(buffers: Sequence[Any] | NDArray[Any], writable: bool) -> Any:
    """The cdata of one buffer, without a list or an array of addresses."""
    try:
        [buffer] = buffers
        held = _from_buffer(_BYTES, buffer, writable)
    except (TypeError, ValueError, BufferError):
        held = b""
    return held if len(held) else _pointers(buffers, 1, writable=writable)[0][0]  # which says what is wrong


def _pointers(buffers: Sequence[Any] | NDArray[Any], count: int, *, writable: bool) -> tuple[list[Any], Any, int]:
    """cdata of each buffer (to keep alive), the array of their addresses, and their common length in bytes."""
    if not hasattr(buffers, "__len__") or len(buffers) != count:
        how = f"{len(buffers)} buffers" if hasattr(buffers, "__len__") else repr(buffers)
        raise InvalidArgument(f"{count} keys and {how}: one buffer per key")
    try:
        held = [ffi.from_buffer(_BYTES, buffer, writable) for buffer in buffers]
    except (TypeError, ValueError, BufferError) as error:
        need = "contiguous, writable" if writable else "contiguous"
        raise InvalidArgument(f"each buffer must be a {need} block of bytes: {error}") from error
    length = len(held[0]) if held else 0
    if held and not length:
        raise InvalidArgument("a buffer of no bytes: nothing of a block would be copied")
    for buffer in held:
        if len(buffer) != length:
            lengths = sorted({len(each) for each in held})
            raise InvalidArgument(f"buffers of {lengths} bytes in one call: all must have the same length")
    return held, ffi.new(_POINTERS, held), length
