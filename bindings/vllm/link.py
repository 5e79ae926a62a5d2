"""An engine's hold on a pool that may vanish, be full or be made anew: every call has an answer, which may be a
miss."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import kvpool
from kvpool.bindings.vllm.layout import class_for
from kvpool.bindings.vllm.options import Options

__all__ = ["PoolLink", "open_pool"]

T = TypeVar("T")
log = logging.getLogger("vllm.kvpool")  # below vLLM's own logger, so that it is shown where vLLM's are

HARMLESS = (kvpool.PoolFull, kvpool.NoPins, kvpool.Stale)
PATIENCE_S = 10.0
PAUSE_S = 0.05
LEAST_BLOCK = 4096


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
            strides = sorted({max(size, LEAST_BLOCK) for size in block_bytes})
            try:
                return kvpool.create(options.uri, options.size, strides, policy=options.policy)
            except kvpool.Exists:
                pass  # another engine was faster
        time.sleep(PAUSE_S)


class PoolLink:
    """The pool as one role of an engine sees it. Thread-safe.

    `call` never raises what the pool says: a pool that has gone answers as if it were empty, and is looked for again
    every `retry` seconds. The constructor does raise: an engine does not start without its pool.
    """

    def __init__(self, options: Options, identity: kvpool.Identity, block_bytes: Sequence[int | None]) -> None:
        self._options = options
        self._identity = identity
        self._block_bytes = list(block_bytes)
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._pool: kvpool.Pool | None = None
        self._namespaces: list[kvpool.Namespace | None] = []
        self._is_closed = False
        self._memory: Any = None
        self.failures = 0
        """Calls that found no pool."""
        self._adopt(open_pool(options, [size for size in block_bytes if size is not None]))

    def _adopt(self, pool: kvpool.Pool) -> None:
        try:
            namespaces = [
                None
                if size is None
                else pool.namespace(self._identity, self._options.tenant, class_for(size, pool.block_bytes))
                for size in self._block_bytes
            ]
        except BaseException:
            pool.close()
            raise
        self._pool, self._namespaces = pool, namespaces
        first = next(each for each in namespaces if each is not None)
        if self._memory is None:
            self._memory = pool.tensor(first.block_class)

    @property
    def pool(self) -> kvpool.Pool | None:
        """The pool, or None while it is gone."""
        return self._pool

    def _current(self) -> kvpool.Pool | None:
        with self._lock:
            if self._pool is None and not self._is_closed and time.monotonic() >= self._retry_at:
                self._retry_at = time.monotonic() + self._options.retry
                try:
                    self._adopt(kvpool.open(self._options.uri, host=self._options.host))
                    log.warning("kvpool: %s is there again", self._options.uri)
                except kvpool.Error as error:
                    log.debug("kvpool: %s is still gone: %s", self._options.uri, error)
            return self._pool

    def _drop(self, pool: kvpool.Pool, error: kvpool.Error) -> None:
        with self._lock:
            if self._pool is not pool:
                return
            self._pool, self._namespaces = None, []
            self._retry_at = time.monotonic() + self._options.retry
        log.error("kvpool: %s has gone, its blocks are misses until it is there again: %s", self._options.uri, error)
        try:
            pool.close()
        except kvpool.Error as reason:
            log.debug("kvpool: closing %s: %s", self._options.uri, reason)

    def call(self, otherwise: T, work: Callable[[kvpool.Pool], T]) -> T:
        """work(pool), or `otherwise` if there is no pool, or it is full, or says that it has gone."""
        pool = self._current()
        if pool is None:
            self.failures += 1
            return otherwise
        try:
            return work(pool)
        except HARMLESS as error:
            log.debug("kvpool: %s", error)
        except kvpool.InvalidArgument:
            raise
        except kvpool.Error as error:
            self.failures += 1
            self._drop(pool, error)
        return otherwise

    def group(self, otherwise: T, group: int, work: Callable[[kvpool.Namespace], T]) -> T:
        """As `call`, with the namespace of a cache group."""

        def there(_: kvpool.Pool) -> T:
            namespaces: list[Any] = self._namespaces
            return work(namespaces[group]) if namespaces else otherwise

        return self.call(otherwise, there)

    def namespace(self, group: int) -> kvpool.Namespace:
        """Of a group; for work that is in a `call`."""
        namespace = self._namespaces[group] if self._namespaces else None
        if namespace is None:
            raise kvpool.Closed("the pool has gone")
        return namespace

    def memory(self) -> Any:
        """The blocks of the first group as rows of bytes, also of a pool that has been removed since."""
        return self._memory

    def close(self) -> None:
        """Leave the pool. Idempotent."""
        with self._lock:
            self._is_closed = True
            pool, self._pool, self._namespaces = self._pool, None, []
        if pool is not None:
            pool.close()
