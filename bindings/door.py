"""What every engine adapter needs of a pool: a block class that fits, and a handle that outlives pools.

An adapter never makes an engine fail because of the pool: what goes wrong there is a miss, counted with its reason.
Only what can never work (no such class, no identity) is refused, at start.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import kvpool

__all__ = ["Door", "Misses", "class_for", "pool_block_bytes"]

T = TypeVar("T")
logger = logging.getLogger("kvpool")

BLOCK_STEP, BLOCK_MIN = 64, 4096
REOPEN_S = 1.0

# After these the handle is of no use any more; a new one may be.
LOST = (kvpool.Replaced, kvpool.Closed, kvpool.Forked, kvpool.Fenced)


def pool_block_bytes(needed: int) -> int:
    """The smallest block size of a pool that holds so many bytes."""
    return max(-(-needed // BLOCK_STEP) * BLOCK_STEP, BLOCK_MIN)


def class_for(pool: kvpool.Pool, needed: int, what: str) -> int:
    """The number of the class with the smallest blocks that hold `needed` bytes.

    `what` says in the message whose bytes they are. Raises `InvalidArgument`, which says how to make the pool instead.
    """
    sizes = pool.block_bytes
    fitting = [size for size in sizes if size >= needed]
    if not fitting:
        raise kvpool.InvalidArgument(
            f"{what} needs blocks of {needed} bytes; the pool {pool.uri} has blocks of {', '.join(map(str, sizes))}: "
            f"make one with --block {pool_block_bytes(needed)}"
        )
    return sizes.index(min(fitting))


class Misses(Counter[str]):
    """Errors that became misses, by name."""

    def note(self, uri: str, error: Exception, log: logging.Logger = logger) -> None:
        """Count one; the first of each kind is told."""
        name = type(error).__name__
        self[name] += 1
        if self[name] == 1:
            log.warning("%s: %s: %s; from now on this is a miss", uri, name, error)


class Door:
    """A pool by its URI, opened at first use and again when it was replaced, closed or inherited by a fork.

    Thread-safe. `enter` gives the pool or None; `run` makes every error of the pool a miss. `misses` counts those by
    the name of their error. A pool that was lost or cannot be opened is tried again after `pause` seconds, not before.
    """

    def __init__(
        self,
        uri: str,
        *,
        host: int | None = None,
        opened: Callable[[kvpool.Pool], None] | None = None,
        first: Callable[[], kvpool.Pool] | None = None,
        pause: float | None = None,
        log: logging.Logger = logger,
    ) -> None:
        """`opened` is called with each pool that was opened, before anybody uses it; what it raises closes it again.

        Opens the pool now (by `first`, if given), so that a wrong URI, another version or a class that is missing is
        refused at start.
        """
        self.uri, self.host = uri, host
        self.misses = Misses()
        self._absences = 0
        self._opened, self._log = opened, log
        self._pause = pause
        self._lock = threading.Lock()
        self._closed = False
        self._next_try = 0.0
        self._pool: kvpool.Pool | None = self._checked((first or self._open)())

    def _open(self) -> kvpool.Pool:
        return kvpool.open(self.uri, host=self.host)

    def _checked(self, pool: kvpool.Pool) -> kvpool.Pool:
        try:
            if self._opened:
                self._opened(pool)
        except BaseException:
            pool.close()
            raise
        return pool

    def _later(self) -> float:
        return time.monotonic() + (REOPEN_S if self._pause is None else self._pause)

    @property
    def pool(self) -> kvpool.Pool | None:
        """The pool, or None while there is none; does not look for one."""
        return self._pool

    def enter(self) -> kvpool.Pool | None:
        """The pool, or None while there is none."""
        pool = self._pool
        if pool is not None or self._closed:
            return pool
        with self._lock:
            if self._pool is None and not self._closed and time.monotonic() >= self._next_try:
                self._next_try = self._later()
                try:
                    self._pool = self._checked(self._open())
                    self._log.warning("%s: it is there again", self.uri)
                except (kvpool.Error, OSError) as error:
                    self.miss(error)
            return self._pool

    def take_absences(self) -> int:
        """How many calls of `run` have found no pool, or have lost it, since the last time."""
        taken, self._absences = self._absences, 0
        return taken

    def miss(self, error: Exception) -> None:
        """An error has become a miss."""
        self.misses.note(self.uri, error, self._log)

    def run(self, work: Callable[[kvpool.Pool], T], otherwise: T) -> T:
        """`work(pool)`, or `otherwise` if there is no pool or it raises an `Error`."""
        pool = self.enter()
        if pool is None:
            self._absences += 1
            return otherwise
        try:
            return work(pool)
        except LOST as error:
            self._absences += 1
            self.miss(error)
            self._lose(pool)
        except kvpool.Error as error:
            self.miss(error)
        return otherwise

    def _lose(self, pool: kvpool.Pool) -> None:
        with self._lock:
            if self._pool is not pool:
                return
            self._pool = None
            self._next_try = self._later()
        try:
            pool.close()
        except kvpool.Error as error:
            self._log.debug("closing %s: %s", self.uri, error)

    def close(self) -> None:
        """Leave the pool; from now on all is a miss. Idempotent."""
        self._closed = True
        pool = self._pool
        if pool is not None:
            self._lose(pool)
