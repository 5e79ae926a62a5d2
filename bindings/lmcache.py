"""LMCache's second level in a pool: the client of its `native_plugin` adapter.

    --l2-adapter '{"type": "native_plugin", "module_path": "kvpool.bindings.lmcache", "class_name": "PoolClient",
                   "adapter_params": {"uri": "shm:kv", "revision": "...", "dtype": "bfloat16", "chunk_tokens": 256}}'

An object (one chunk of one rank and group) lies in as many blocks as it needs, in order, and ends with a trailer that
says how long it is; so a get into a buffer of another length is a miss. What a lookup finds stays pinned for a while,
because LMCache's locks are its own: until it is read, or `hold_seconds` are over.

LMCache's key names the model, rank, group, chunk hash and salt. What it does not name is in the identity: the revision,
the dtype, the tokens of a chunk and the hash algorithm, which are this client's parameters.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

import kvpool
from kvpool.bindings.door import Door

__all__ = ["PoolClient"]

logger = logging.getLogger("kvpool")
TRAILER = struct.Struct("<8sQ")  # at the end of an object's first block: mark, bytes
MARK = b"kvpool1\0"
TRAILER_ROOM = 64
HELD_MAX = 4096  # objects

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Completion = tuple[int, bool, str, list[bool] | None]


class PoolClient:
    """The methods that LMCache calls. Thread-safe; submitting does not block, the work is done by threads.

    Each submission is answered by one completion of `drain_completions`, and `event_fd` is readable while there are
    some. A pool that is gone, full or closed is a miss or a store that failed; a pool that was made anew is opened
    again.
    """

    def __init__(
        self,
        uri: str,
        *,
        revision: str,
        dtype: str,
        chunk_tokens: int,
        tenant: str = "",
        hash_algorithm: str = "",
        block_class: int | None = None,
        hold_seconds: float = 10.0,
        threads: int = 2,
        host: int | None = None,
    ) -> None:
        """`block_class`: which of the pool's block sizes (default: the largest). Raises `InvalidArgument` for a
        parameter that is missing or wrong, and what `kvpool.open` raises: a wrong pool is refused at start.
        """
        if not 1 <= threads <= 64 or hold_seconds < 0:
            raise kvpool.InvalidArgument(f"threads={threads} is 1 to 64, hold_seconds={hold_seconds} not negative")
        if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int) or chunk_tokens < 1:
            raise kvpool.InvalidArgument(f"chunk_tokens={chunk_tokens!r}: LMCache's --chunk-size")
        if hash_algorithm == "builtin" and os.environ.get("PYTHONHASHSEED") in (None, "random"):
            raise kvpool.InvalidArgument(
                "hash_algorithm='builtin' makes other hashes in each process: set PYTHONHASHSEED to the same number "
                "for all, or choose another algorithm"
            )
        self.identity = kvpool.Identity(
            model="lmcache",
            revision=revision,
            dtype=dtype,
            layout="lmcache",
            extra=(("chunk_tokens", str(chunk_tokens)), ("hash", hash_algorithm)),
        )
        self.tenant, self.hold_seconds = tenant, hold_seconds
        self._wanted_class = block_class
        self._objects: _Objects | None = None
        self._held: OrderedDict[str, tuple[float, kvpool.Hit]] = OrderedDict()
        self._lock = threading.Lock()
        self._done: list[Completion] = []
        self._submitted = 0
        self._is_closed = False
        self.door = Door(uri, host=host, opened=self._opened)
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="kvpool-lmcache")

    def _opened(self, pool: kvpool.Pool) -> None:
        """Each time that a pool is opened, before it is used."""
        sizes = pool.block_bytes
        chosen = sizes.index(max(sizes)) if self._wanted_class is None else self._wanted_class
        self._objects = _Objects(pool.namespace(self.identity, self.tenant, chosen))
        self._release_old(keep=0)

    # ---- what LMCache calls ----

    def event_fd(self) -> int:
        """An eventfd that is readable while completions wait."""
        return self._event

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """Store objects; the completion is ok if all are there now. Buffers must stay until then."""
        return self._submit(self._set, keys, [_bytes(buffer) for buffer in buffers])

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """Load objects; the completion says for each whether its buffer holds it now."""
        return self._submit(self._get, keys, [_bytes(buffer) for buffer in buffers])

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Which objects are there; those stay for `hold_seconds`, or until they are got."""
        return self._submit(self._exists, keys)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Remove objects; the completion says for each whether it was there."""
        return self._submit(self._delete, keys)

    def drain_completions(self) -> list[Completion]:
        """All completions since the last call: (number, ok, error, one bool per key or None)."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._lock:
            done, self._done = self._done, []
        self._release_old()
        return done

    def close(self) -> None:
        """Finish what was submitted, give back all pins, leave the pool. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._threads.shutdown(wait=True)
        with self._lock:
            held, self._held = self._held, OrderedDict()
        for _, hit in held.values():
            hit.release()
        self.door.close()
        self._objects = None  # with which the memory of the pool goes
        os.close(self._event)

    # ---- submitting ----

    def _submit(self, work: Callable[..., Completion], keys: Sequence[str], *columns: Any) -> int:
        """Have a thread do it; returns the number that its completion will carry."""
        if isinstance(keys, str):
            raise kvpool.InvalidArgument(f"{keys!r} is one key: a batch is a list of them")
        with self._lock:
            if self._is_closed:
                raise kvpool.Closed("this client is closed")
            self._submitted += 1
            number = self._submitted
        self._threads.submit(self._work, number, work, list(keys), *columns)
        return number

    def _work(self, number: int, work: Callable[..., Completion], *arguments: Any) -> None:
        """Whatever happens, there is a completion: LMCache waits for it."""
        try:
            _, ok, error, each = work(*arguments)
        except Exception as failure:
            logger.exception("a batch of LMCache failed")
            ok, error, each = False, f"{type(failure).__name__}: {failure}", [False] * len(arguments[0])
        with self._lock:
            self._done.append((number, ok, error, each))
            os.eventfd_write(self._event, 1)

    # ---- the work ----

    def _each(self, work: Callable[..., bool], keys: list[str], *columns: list[Bytes]) -> list[bool]:
        """`work(key, .., pool)` for each key; what goes wrong with the pool is False."""
        if any(len(column) != len(keys) for column in columns):
            raise kvpool.InvalidArgument(f"{len(keys)} keys and another number of buffers")
        return [self.door.run(partial(work, *row), False) for row in zip(keys, *columns, strict=True)]

    def _set(self, keys: list[str], buffers: list[Bytes]) -> Completion:
        stored = self._each(self._set_one, keys, buffers)
        return 0, all(stored), "" if all(stored) else f"{stored.count(False)} of {len(keys)} not stored", stored

    def _set_one(self, key: str, data: Bytes, pool: kvpool.Pool) -> bool:
        """True if an object of this length is there now: ours, or one of the same key that was there before."""
        objects = self._objects_of(pool)
        if objects.has(key, data.nbytes):
            return True
        self._release_old()
        keys = objects.keys(key, data.nbytes)
        with objects.namespace.reserve(keys) as new:
            for view, part in zip(new.views, objects.parts(data), strict=True):
                view[: part.nbytes] = part
            objects.sign(new.views[0], data.nbytes)
            new.publish()
        # Others may have published some of its blocks meanwhile, or one of another length; or evicted some since.
        return objects.has(key, data.nbytes)

    def _get(self, keys: list[str], buffers: list[Bytes]) -> Completion:
        loaded = self._each(self._get_one, keys, buffers)
        return 0, all(loaded), "" if all(loaded) else f"{loaded.count(False)} of {len(keys)} not there", loaded

    def _get_one(self, key: str, data: Bytes, pool: kvpool.Pool) -> bool:
        objects = self._objects_of(pool)
        try:
            hit = objects.find(key, data.nbytes)
        finally:
            self._let_go(key)
        if hit is None:
            return False
        with hit:
            for view, part in zip(hit.views, objects.parts(data), strict=True):
                part[:] = view[: part.nbytes]
            pool.pin([]).release()  # raises if the pool was closed meanwhile: then the pins ended with it
        return True

    def _exists(self, keys: list[str]) -> Completion:
        return 0, True, "", self._each(self._hold, keys)

    def _hold(self, key: str, pool: kvpool.Pool) -> bool:
        """Is it there, whole? Then it stays pinned, as long as pins are not short."""
        objects = self._objects_of(pool)
        try:
            hit = objects.find(key, None)
        except kvpool.NoPins:
            self._release_old(keep=0)
            hit = objects.find(key, None)
        if hit is None:
            return False
        self._let_go(key)
        with self._lock:
            self._held[key] = time.monotonic() + self.hold_seconds, hit
        self._release_old()
        return True

    def _delete(self, keys: list[str]) -> Completion:
        return 0, True, "", self._each(self._delete_one, keys)

    def _delete_one(self, key: str, pool: kvpool.Pool) -> bool:
        """A part of one that is not whole goes by eviction; nobody finds it without the first."""
        self._let_go(key)
        objects = self._objects_of(pool)
        size = objects.size(key)
        return size is not None and objects.namespace.remove(objects.keys(key, size)) > 0

    # ---- what is held ----

    def _objects_of(self, pool: kvpool.Pool) -> _Objects:
        objects = self._objects
        if objects is None or objects.namespace.pool is not pool:
            raise kvpool.Closed("the pool was opened anew meanwhile")
        return objects

    def _let_go(self, key: str) -> None:
        """Undo the pins of a lookup."""
        with self._lock:
            _, held = self._held.pop(key, (0.0, None))
        if held is not None:
            held.release()

    def _release_old(self, keep: int = HELD_MAX) -> None:
        """Undo the pins of lookups that nobody has followed up."""
        now, old = time.monotonic(), []
        with self._lock:
            while self._held:
                key = next(iter(self._held))
                if self._held[key][0] > now and len(self._held) <= keep:
                    break  # those behind it are younger
                old.append(self._held.pop(key)[1])
        for hit in old:
            hit.release()


class _Objects:
    """Objects of any length as blocks of one class. The key of the first block names the object, the others' its length
    as well: so parts of two lengths never make one object.
    """

    def __init__(self, namespace: kvpool.Namespace) -> None:
        self.namespace = namespace
        # The trailer lies behind the part in the first block; the others leave its place empty.
        self.capacity = namespace.pool.block_bytes[namespace.block_class] - TRAILER_ROOM

    def parts(self, data: Bytes) -> list[Bytes]:
        """The bytes of each block; an empty object has one block."""
        return [data[at : at + self.capacity] for at in range(0, max(data.nbytes, 1), self.capacity)]

    def keys(self, key: str, size: int) -> kvpool.Keys:
        """Of all blocks of an object. LMCache's keys have no line breaks."""
        others = (f"{key}\n{size}\n{at}" for at in range(self.capacity, size, self.capacity))
        return self.namespace.named([key, *others])

    def sign(self, view: Bytes, size: int) -> None:
        """Write the trailer into the first block."""
        view[self.capacity : self.capacity + TRAILER.size] = np.frombuffer(TRAILER.pack(MARK, size), np.uint8)

    def size(self, key: str) -> int | None:
        """How long the object is, from its first block; None if that is not there."""
        with self.namespace.match(self.namespace.named([key])) as first:
            if not first:
                return None
            end = self.capacity + TRAILER.size
            mark, size = TRAILER.unpack(first.views[0][self.capacity : end].tobytes())
        return size if mark == MARK else None

    def find(self, key: str, size: int | None) -> kvpool.Hit | None:
        """All blocks of an object of this length (None: of any), pinned; None if it is not there, or not whole."""
        there = self.size(key)
        if there is None or (size is not None and there != size):
            return None
        keys = self.keys(key, there)
        hit = self.namespace.match(keys)
        # The first block may be another by now: the length is looked at again, under the pins.
        if len(hit) == len(keys) and self.size(key) == there:
            return hit
        hit.release()
        return None

    def has(self, key: str, size: int) -> bool:
        """Is an object of this length there, whole?"""
        hit = self.find(key, size)
        if hit is not None:
            hit.release()
        return hit is not None


def _bytes(buffer: Any) -> Bytes:
    """Any contiguous buffer as bytes, also a view of ctypes, whose format memoryview itself does not assign."""
    try:
        return np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise kvpool.InvalidArgument(f"an object's buffer is contiguous memory: {error}") from error
