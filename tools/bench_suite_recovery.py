"""How long the blocks of a killed Python worker are gone: a child opens the pool, reserves, and is killed.

Most of that the kernel spends on taking the interpreter apart, before it says that the process has ended; the bound is
the end of such an interpreter without a pool. The victims of the rows marked (C) are without one.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from kvpool import Pool
from kvpool import open as open_pool
from kvpool.bindings import check, ffi, lib
from kvpool.tools.bench_suite import Effort, Row, spread

__all__ = ["recovery_rows", "victim"]

KILLS, KILLS_MIN = 16, 2
RESERVED = 4096
WAIT_S = 10.0
SETTLE_S = 0.25  # by then the keepers of the others watch the new worker: they look for it every 100 ms
FREE = 0


def victim(uri: str) -> None:
    """The child: map all of the pool, if there is one, hold blocks and wait for the end."""
    if not uri:
        print(-1, flush=True)
        sys.stdin.read()
        return
    with open_pool(uri) as pool:
        pool.tensor(0).max()  # every page is mapped, as in a worker that has run for a while
        numbers = ffi.new("uint32_t[]", RESERVED)
        check(lib.kvp_reserve(pool.handle, 0, RESERVED, numbers))
        print(pool.worker, flush=True)
        sys.stdin.read()


def start_victim(uri: str) -> tuple[subprocess.Popen[str], int]:
    """A child that holds blocks, and its slot."""
    code = f"from kvpool.tools.bench_suite_recovery import victim; victim({uri!r})"
    command = [sys.executable, "-P", "-c", code]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    slot = child.stdout.readline().strip()
    if not slot:
        raise RuntimeError(f"the worker to be killed did not start: exit code {child.wait()}")
    time.sleep(SETTLE_S)
    return child, int(slot)


def kill(child: subprocess.Popen[str]) -> int:
    """Kill, and sleep until the process has ended: who recovers it may need this processor. The clock at the kill."""
    end = os.pidfd_open(child.pid)
    start = time.perf_counter_ns()
    os.kill(child.pid, signal.SIGKILL)
    select.select([end], [], [], WAIT_S)
    os.close(end)
    return start


def time_end() -> float:
    """Microseconds from SIGKILL until an interpreter without a pool has ended."""
    child, _ = start_victim("")
    start = kill(child)
    ended = time.perf_counter_ns()
    child.communicate()
    return (ended - start) / 1e3


def time_kill(pool: Pool) -> float:
    """Microseconds from SIGKILL until the blocks can be reserved again."""
    child, slot = start_victim(pool.uri)
    raw: Any = ffi.new("struct kvp_worker_info *")
    deadline = time.monotonic() + WAIT_S
    start = kill(child)
    while lib.kvp_pool_worker(pool.handle, slot, raw) or raw.state != FREE:
        if time.monotonic() > deadline:
            raise RuntimeError(f"a killed worker was not recovered within {WAIT_S} s")
    ended = time.perf_counter_ns()
    child.communicate()
    return (ended - start) / 1e3


def recovery_rows(pool: Pool, effort: Effort) -> list[Row]:
    """Kill workers of a pool of a million blocks."""
    kills = KILLS_MIN if effort.quick else KILLS
    spent = [(time_kill(pool), time_end()) for _ in range(kills)]
    reusable, bound = (spread(each) for each in zip(*spent, strict=True))
    unit = f"us, {'2 MiB' if pool.stats()['huge_bytes'] else '4 KiB'} pages"
    return [Row.of("recovery of a Python worker, 1e6 blocks, to the end of its interpreter", unit, reusable, bound)]
