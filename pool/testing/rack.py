"""A rack in one test: simulated hosts that share a pool, with processes that can be killed, hosts that can be lost."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

import kvpool
from kvpool.bindings import core
from kvpool.testing.child import is_function_path

__all__ = ["Child", "ChildEnded", "Rack"]

WAIT_S = 60.0
_CHILD = "from kvpool.testing.child import main; main()"
_PAUSE_S = 0.005
_OF_ALL = ("conflicts", "conflict_offset", "dirty_invalidated", "dirty_invalidated_offset", "flushed", "lost")
_numbers = itertools.count()


class ChildEnded(RuntimeError):
    """A child ended where a line of it was expected; its last words are in the message."""


class Child:
    """A process of one host of a rack, and a line-based channel to it. Made by `Rack.start`.

    What it prints on standard output are its lines; what it writes to standard error is kept for `ChildEnded`. `hears`
    may be called by any thread, `say` by one at a time.
    """

    def __init__(self, uri: str, host: int, body: str, args: tuple[Any, ...]) -> None:
        self.host = host
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        body = body if is_function_path(body) else textwrap.dedent(body)
        paths = [os.path.abspath(path) for path in sys.path if path]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, uri, str(host), body, json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},  # it imports what we can import
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Lines are taken off the pipe at once, so that a child never waits for a reader."""
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed under our hands
            for line in self.process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def hears(self, timeout: float = WAIT_S) -> str:
        """The next line of the child. Raises `ChildEnded`, or TimeoutError after so many seconds."""
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"the child on host {self.host} has said nothing for {timeout} s") from None
        if not line:
            self._lines.put("")  # whoever asks again hears the same
            raise ChildEnded(f"the child on host {self.host} ended with {self.process.wait()}: {self.last_words()}")
        return line.removesuffix("\n")

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        size = os.fstat(self._errors.fileno()).st_size
        return os.pread(self._errors.fileno(), 4000, max(0, size - 4000)).decode(errors="replace").strip()

    def say(self, *words: object) -> None:
        """A line to the child, which waits for it in `hear`. Raises `ChildEnded`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(" ".join(map(str, words)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ChildEnded(f"the child on host {self.host} has ended: {self.last_words()}") from None

    def stop(self) -> None:
        """SIGSTOP: it stands still, until `cont`."""
        self.process.send_signal(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent. Its host lives on, as long as another worker does."""
        self.process.kill()
        self.process.wait()

    @property
    def is_alive(self) -> bool:
        """Has it not ended yet?"""
        return self.process.poll() is None


def _end(owner: int, uri: str, pools: dict[int, kvpool.Pool], children: list[Child]) -> None:
    """Leave nothing behind. A forked copy of the rack has no say in this."""
    if os.getpid() != owner:
        return
    for child in children:
        child.kill()
    for pool in pools.values():
        pool.close()
    pools.clear()
    with contextlib.suppress(kvpool.NotFound):
        kvpool.remove(uri, force=True)


class Rack:
    """Simulated hosts that share one pool, of mode sim and a name of its own. A context manager.

    Each host has a cache of its own, and nothing keeps the caches coherent: what a host does not write back, others do
    not see; what it does not drop, it sees as it was. Lines are evicted and dropped at random from `seed`. `pool(host)`
    is a handle in this process, `start(host, ...)` a process of that host; `kill` ends one process, `lose` a host with
    what was in its cache. At the end, also at the end of the interpreter, all processes are killed and the pool is
    removed; only SIGKILL of this process leaves it behind (`kvpool rm`), and children end when they next `hear`.

    Belongs to one thread; the handles are as thread-safe as any. The children are processes of their own, so the order
    of what they do is not drawn from the seed: that of one process is.
    """

    def __init__(
        self,
        hosts: int = 4,
        *,
        blocks: int = 64,
        block: int | str = "4KiB",
        lease: float = 0.5,
        seed: int = 0,
        events: int | None = None,
        **options: Any,
    ) -> None:
        """`blocks`: of each host. `lease`: seconds of silence after which a host may be fenced, 0.3 at least.

        `events`: lines evicted and dropped at each call (default 4; 0: none). `options` go to `kvpool.create`.
        """
        self.hosts = hosts
        name = f"sim:rack-{os.getpid()}-{next(_numbers)}"
        more = "" if events is None else f"&events={events}"
        blocks = -(-blocks // 8) * 8  # a line of words has one owner, and has 8 blocks
        first = kvpool.create(
            f"{name}?seed={seed}{more}", block=block, blocks=blocks * hosts, hosts=hosts, lease=lease, **options
        )
        self.uri = name
        """What another process opens, with `host=`."""
        self._pools: dict[int, kvpool.Pool] = {first.host: first}
        self._children: list[Child] = []
        self.close = weakref.finalize(self, _end, os.getpid(), name, self._pools, self._children)
        """End it: kill the children, close the handles, remove the pool. Idempotent."""

    def __enter__(self) -> Rack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- hosts and processes ----

    def _demand(self, host: int) -> None:
        if not 0 <= host < self.hosts:
            raise kvpool.OutOfRange(f"host {host} does not exist: the rack has {self.hosts}, numbered from 0")

    def pool(self, host: int = 0) -> kvpool.Pool:
        """The rack's handle on a host, opened at first use; a host that was lost starts anew. Do not close it."""
        self._demand(host)
        if host not in self._pools:
            self._pools[host] = kvpool.open(self.uri, host=host)
        return self._pools[host]

    def start(self, host: int, body: str, *args: Any) -> Child:
        """Run Python in a new process of a host, which has opened the pool when this returns.

        `body` is source, which finds `pool`, `say(...)`, `hear()` and the list `args`; or "package.module:function",
        called as `function(here, *args)` with a `Here`. `args` are what JSON can say.
        """
        self._demand(host)
        child = Child(self.uri, host, body, args)
        self._children.append(child)
        if (line := child.hears()) != "ready":
            raise ChildEnded(f"the child on host {host} began with {line!r}: nothing may be printed by what it imports")
        return child

    def children(self, host: int) -> list[Child]:
        """Those processes of a host that have not ended."""
        return [child for child in self._children if child.host == host and child.is_alive]

    def kill(self, child: Child) -> None:
        """Kill -9 of one process. What it was in the middle of is mended by other workers of its host."""
        child.kill()

    def lose(self, host: int) -> int:
        """Lose a host: its processes die, and of what its cache had not written back, some. Returns how many lines.

        The rack's own handle there is closed first: it leaves in order, and where it was the host's last worker the
        host has left in order, too, and no lease is waited for. So run in a child what shall die in the middle. Views,
        hits and namespaces of that handle that are still in use keep the host alive: then this raises `Busy`.
        """
        self._demand(host)
        handle = self._pools.pop(host, None)
        if handle is not None:
            handle.close()
        del handle
        for child in self.children(host):
            child.kill()
        gc.collect()  # a handle is detached from its host when the last view of it is gone
        sim = core("sim")
        return sim.check(sim.lib.kvp_pool_lose_host(self.uri.encode(), host))

    def state(self, host: int, by: int | None = None) -> dict[str, Any]:
        """What another host (the first in use, unless told) knows of this one: see `Pool.hosts`."""
        self._demand(host)
        watcher = self.pool(next(other for other in self.used() if other != host) if by is None else by)
        watcher.follow()
        return watcher.hosts()[host]

    def fence(self, lost: int, adopter: int, timeout: float = WAIT_S) -> int:
        """Wait until the lease of a lost host has lapsed, and let `adopter` have what it owned.

        Returns how many segments were adopted. Raises `Busy` if the host still shows signs of life after `timeout`.
        """
        self._demand(lost)
        deadline = time.monotonic() + timeout
        while True:
            pool = self.pool(adopter)
            pool.follow()
            try:
                return pool.fence(lost, pool.hosts()[lost]["incarnation"])
            except kvpool.Busy:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)

    # ---- looking ----

    def used(self) -> list[int]:
        """The hosts that have a handle here or a process that has not ended."""
        return [host for host in range(self.hosts) if host in self._pools or self.children(host)]

    def settle(self) -> None:
        """Every host that is used has taken notice of what the others did, and of what owners did about it."""
        pools = [self.pool(host) for host in self.used()]
        for pool in pools * 2:
            pool.follow()

    def reports(self) -> dict[int, kvpool.CheckReport]:
        """What each host that is used finds when it walks all structures of its own."""
        return {host: self.pool(host).check() for host in self.used()}

    def counts(self) -> dict[str, int]:
        """What the simulated device has seen, of all hosts together.

        `conflicts`: lines that two hosts had written, so one of them wrote over the other; `dirty_invalidated`: lines
        that a host dropped with stores in them that were never written back; both must be 0. `lost` and `flushed`:
        lines that lost hosts had not written back, and what became of them.
        """
        counts = self.pool(next(iter(self.used()), 0)).line_counts()
        return {name: counts[name] for name in _OF_ALL}

    def check(self, timeout: float = 10.0) -> list[str]:
        """Sentences about what is broken; none if all is well. Never call it of a host that is stopped.

        All reports are clean, nothing is leaked, no line had two writers, no store was dropped. The dead may have to be
        recovered first: what is wrong must be wrong for `timeout` seconds.
        """
        return list(_lasting(self._problems, timeout))

    def _problems(self) -> list[str]:
        found = []
        for host, report in self.reports().items():
            found += [f"host {host}: {problem}" for problem in report.problems]
            if report.leaked:
                found.append(f"host {host}: {report.leaked} blocks belong to no live worker")
        counts = self.counts()
        if counts["conflicts"]:
            found.append(f"{counts['conflicts']} lines had two writers, one at offset {counts['conflict_offset']}")
        if counts["dirty_invalidated"]:
            where = counts["dirty_invalidated_offset"]
            found.append(f"{counts['dirty_invalidated']} lines were dropped unwritten, one at offset {where}")
        return found


def _lasting(problems: Callable[[], list[str]], timeout: float) -> list[str]:
    """What is wrong for so long."""
    deadline = time.monotonic() + timeout
    while (found := problems()) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return found
