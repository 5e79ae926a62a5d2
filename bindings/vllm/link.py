"""An engine's hold on a pool that may vanish, be full or be made anew: all has an answer, which may be a miss."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import kvpool
from kvpool.bindings.door import Door, class_for, pool_block_bytes
from kvpool.bindings.vllm.options import Options

__all__ = ["PoolLink", "open_pool", "read_rows", "write_rows"]

T = TypeVar("T")
log = logging.getLogger("vllm.kvpool")  # below vLLM's own logger, so that it is shown where vLLM's are

PATIENCE_S = 10.0
PAUSE_S = 0.05


def open_pool(options: Options, block_bytes: Sequence[int]) -> kvpool.Pool:
    """The engine's pool; if the option `size` is given and there is none, it is made. Raises what `kvpool.open`
    raises."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return kvpool.open(options.uri, host=options.host)
        except kvpool.NotReady:
            if time.monotonic() > deadline:
                raise
        except kvpool.NotFound:
            if options.size is None:
                raise
            strides = sorted({pool_block_bytes(size) for size in block_bytes})
            try:
                return kvpool.create(options.uri, options.size, strides, policy=options.policy)
            except kvpool.Exists:
                pass  # another engine was faster
        time.sleep(PAUSE_S)


def read_rows(keys: bytes, parts: kvpool.Parts, rows: Any, namespace: kvpool.Namespace) -> Any:
    """`Namespace.get_into_parts`, with the namespace last, for `PoolLink.group`."""
    return namespace.get_into_parts(keys, parts, rows)


def write_rows(keys: bytes, parts: kvpool.Parts, rows: Any, namespace: kvpool.Namespace) -> int:
    """`Namespace.put_parts`, likewise: a full pool must not hold up the engine."""
    return namespace.put_parts(keys, parts, rows, timeout=0)


class PoolLink:
    """The pool as one role of an engine sees it: a `Door`, and a namespace for each cache group. Thread-safe.

    What the pool says never stops the engine: a pool that has gone answers as if it were empty, and is looked for again
    every `retry` seconds. The constructor does raise: an engine does not start without its pool.
    """

    def __init__(self, options: Options, identity: kvpool.Identity, block_bytes: Sequence[int | None]) -> None:
        self._identity, self._tenant = identity, options.tenant
        self._block_bytes = list(block_bytes)
        self._namespaces: list[kvpool.Namespace | None] = []
        self._memory: Any = None
        sizes = [size for size in block_bytes if size is not None]
        self._door = Door(
            options.uri,
            host=options.host,
            opened=self._opened,
            first=lambda: open_pool(options, sizes),
            pause=options.retry,
            log=log,
        )

    def _opened(self, pool: kvpool.Pool) -> None:
        self._namespaces = [self._namespace(pool, size) for size in self._block_bytes]
        first = next(each for each in self._namespaces if each is not None)
        if self._memory is None:
            self._memory = pool.tensor(first.block_class)

    def _namespace(self, pool: kvpool.Pool, size: int | None) -> kvpool.Namespace | None:
        """Of a group with blocks of this size; None for one that has none in the pool."""
        if size is None:
            return None
        chosen = class_for(pool, size, "a block of this engine, on each rank,")
        return pool.namespace(self._identity, self._tenant, chosen)

    @property
    def pool(self) -> kvpool.Pool | None:
        """The pool, or None while it is gone."""
        return self._door.pool

    def run(self, work: Callable[[kvpool.Pool], T], otherwise: T) -> T:
        """See `Door.run`."""
        return self._door.run(work, otherwise)

    def take_failures(self) -> int:
        """See `Door.take_absences`."""
        return self._door.take_absences()

    def group(self, otherwise: T, group: int, work: Callable[[kvpool.Namespace], T]) -> T:
        """As `run`, with the namespace of a cache group."""
        return self._door.run(lambda pool: work(self.namespace(pool, group)), otherwise)

    def namespace(self, pool: kvpool.Pool, group: int) -> kvpool.Namespace:
        """Of a group; for work that is in a `run`."""
        namespace = self._namespaces[group]
        if namespace is None or namespace.pool is not pool:
            raise kvpool.Closed("the pool was opened anew meanwhile")
        return namespace

    def memory(self) -> Any:
        """The blocks of the first group as rows of bytes, also of a pool that has been removed since."""
        return self._memory

    def close(self) -> None:
        """Leave the pool, and let go of its memory. Idempotent."""
        self._door.close()
        self._namespaces = []
