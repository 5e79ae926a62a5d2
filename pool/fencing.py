"""What a site does about a host that has fallen silent: ask its power or fabric control, and have one survivor adopt.

A lapsed lease proves nothing: the host may wake up and go on writing. So a pool never takes over by itself. A `Fence`
is the site's word that it will not wake up: a function that resets the host (or finds out that it was reset), waits for
the confirmation, and names the one host that adopts what it owned. `Pool.tend` asks it; a `Tender` does so regularly:

    def fence(lost):
        if not bmc.power_cycle(f"node{lost.host}"):
            return None          # not confirmed: ask again later
        return min(rack.alive)   # the same answer for whoever asks

    with kvpool.open("dax:/dev/dax0.0", host=2) as pool, kvpool.Tender(pool, fence):
        serve(pool)

What a hook must keep:

- It answers with a number only when the reset is *confirmed*, and nothing that the host wrote can arrive any more.
- Every host of the pool asks for itself, and every worker that tends: all must get the same name for one incarnation.
  Answer from one place (a file with a lock, a service), which writes the name down before it tells it.
- Another adopter may be named for the same incarnation only when the first was itself lost, and its reset confirmed.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from kvpool.bindings.errors import Busy, Closed, Error, Fenced, Forked, InvalidArgument, Replaced

if TYPE_CHECKING:
    from kvpool.pool import Pool

__all__ = ["Fence", "LostHost", "Tender"]

_log = logging.getLogger("kvpool.fencing")
_CLOSE_S = 10.0


@dataclass(frozen=True)
class LostHost:
    """A host whose lease has lapsed, as the asking host sees it."""

    host: int
    incarnation: int
    """Which start of it: a reset confirmed for this one says nothing about a later one."""
    silent_ms: int
    """Since its beat was last seen to change, by the asking host's monotonic clock."""
    segments: int
    """That it owns."""
    uri: str
    """Of the pool, as the asking host opened it."""


class Fence(Protocol):
    """The site's power or fabric control, as a function."""

    def __call__(self, host: LostHost, /) -> int | None:
        """The number of the host that is to adopt, after the reset was confirmed; None if it is not confirmed yet.

        It may take its time: nothing of the pool waits for it. An exception is logged and the question put again later.
        """


class Answers:
    """What the site has answered so far, for one handle. Thread-safe: one question is put at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._named: dict[tuple[int, int], int] = {}

    def tend(self, pool: Pool, fence: Fence) -> int:
        """See `Pool.tend`."""
        with self._lock:
            hosts = pool.hosts()
            states = {row["host"]: row["state"] for row in hosts}
            return sum(self._one(pool, fence, row, states) for row in hosts if row["state"] == "lapsed")

    def _one(self, pool: Pool, fence: Fence, row: dict[str, Any], states: dict[int, str]) -> int:
        lost = LostHost(row["host"], row["incarnation"], row["silent_ms"], row["segments"], pool.uri)
        which = lost.host, lost.incarnation
        named = self._named.get(which)
        if named is None or (named != pool.host and states[named] in ("lapsed", "fenced")):
            named = _ask(fence, lost, len(states))
            if named is None:
                return 0
            self._named[which] = named
        if named != pool.host:
            return 0
        return self._adopt(pool, lost)

    def _adopt(self, pool: Pool, lost: LostHost) -> int:
        try:
            adopted = pool.fence(lost.host, lost.incarnation)
        except (Busy, InvalidArgument) as error:  # it has come back since we looked: the answer was for what was there
            _log.error("host %d was said to be reset and shows signs of life: %s", lost.host, error)
            del self._named[lost.host, lost.incarnation]
            return 0
        _log.info("adopted %d segments of host %d, incarnation %d", adopted, lost.host, lost.incarnation)
        return adopted


def _ask(fence: Fence, lost: LostHost, hosts: int) -> int | None:
    try:
        named = fence(lost)
    except Exception:  # whatever a site's control raises, the other hosts still need tending
        _log.exception(
            "the fence hook failed for host %d, incarnation %d: asked again later", lost.host, lost.incarnation
        )
        return None
    if named is None:
        return None
    if isinstance(named, bool) or not isinstance(named, int) or not 0 <= named < hosts or named == lost.host:
        _log.error(
            "the fence hook named %r to adopt host %d: another host of 0 to %d was expected",
            named,
            lost.host,
            hosts - 1,
        )
        return None
    return named


class Tender:
    """A thread that calls `Pool.tend` every `interval` seconds, as long as the `with` lasts.

    It ends by itself when the handle is closed, or its pool removed, or this host fenced. Leaving the `with` waits for
    a hook that is being asked, ten seconds at most; an adoption is not cut short.
    """

    def __init__(self, pool: Pool, fence: Fence, interval: float = 1.0) -> None:
        if not interval > 0:
            raise InvalidArgument(f"an interval of {interval!r} seconds: more than 0 was expected")
        self.pool = pool
        self.fence = fence
        self.interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvpool-tender", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            try:
                self.pool.tend(self.fence)
            except (Closed, Forked, Replaced) as error:
                _log.info("no more tending of %s: %s", self.pool.uri, error)
                return
            except Fenced as error:
                _log.error("no more tending of %s: %s", self.pool.uri, error)
                return
            except Error:
                _log.exception("tending %s failed: tried again later", self.pool.uri)

    def __enter__(self) -> Tender:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_CLOSE_S)
