"""How long the blocks of a killed worker are gone: a child opens the pool, reserves, and is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool import Pool
from kvpool import open as open_pool
from kvpool.bindings import check, ffi, lib
from kvpool.tools.bench_suite import Effort, Row, spread

__all__ = ["recovery_rows", "victim"]

KILLS, KILLS_MIN = 16, 2
RESERVED, WORD = 4096, 8
WAIT_S = 10.0
SETTLE_S = 0.25  # by then the keepers of the others watch the new worker: they look for it every 100 ms
FREE = 0


def victim(uri: str) -> None:
    """The child: map all of the pool, hold blocks and wait for the end."""
    with open_pool(uri) as pool:
        pool.tensor(0).max()  # every page is mapped, as in a worker that has run for a while
        numbers = ffi.new("uint32_t[]", RESERVED)
        check(lib.kvp_reserve(pool.handle, 0, RESERVED, numbers))
        print(pool.worker, flush=True)
        sys.stdin.read()


def start_victim(pool: Pool) -> tuple[subprocess.Popen[str], int]:
    """A child that holds blocks, and its slot."""
    code = f"from kvpool.tools.bench_suite_recovery import victim; victim({pool.uri!r})"
    command = [sys.executable, "-P", "-c", code]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    slot = child.stdout.readline().strip()
    if not slot:
        raise RuntimeError(f"the worker to be killed did not start: exit code {child.wait()}")
    return child, int(slot)


def await_ns(condition: Callable[[], bool]) -> int:
    """Spin until the condition holds; the clock then."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        os.sched_yield()  # the dying process may need this processor
        if time.monotonic() > deadline:
            raise RuntimeError(f"a killed worker was not recovered within {WAIT_S} s")
    return time.perf_counter_ns()


def time_kill(pool: Pool) -> tuple[float, float]:
    """Microseconds from SIGKILL until a keeper knows of the death, and until the blocks can be reserved again.

    The keeper takes the dead worker's lock as soon as it knows, so its own account of the recovery says when that was.
    """
    child, slot = start_victim(pool)
    raw: Any = ffi.new("struct kvp_worker_info *")
    look, handle = lib.kvp_pool_worker, pool.handle

    def spent_ns() -> int:
        look(handle, pool.worker, raw)
        return int(raw.counter[lib.KVP_COUNT_RECOVERY_NS])

    def reusable() -> bool:
        look(handle, slot, raw)
        return bool(raw.state == FREE)

    before = spent_ns()
    time.sleep(SETTLE_S)
    start = time.perf_counter_ns()
    os.kill(child.pid, signal.SIGKILL)
    ended = await_ns(reusable) - start
    child.communicate()
    return (ended - (spent_ns() - before)) / 1e3, ended / 1e3


def time_scan(words: np.ndarray[Any, np.dtype[np.uint64]]) -> float:
    """Microseconds to read each word once: no recovery can do without."""
    start = time.perf_counter_ns()
    words.max()
    return (time.perf_counter_ns() - start) / 1e3


def recovery_rows(pool: Pool, effort: Effort) -> list[Row]:
    """Kill workers of a pool of a million blocks."""
    blocks: int = pool.info["classes"][0]["blocks"]
    words = np.ones(max(blocks, (8 << 20) // WORD), np.uint64)
    kills = KILLS_MIN if effort.quick else KILLS
    spent = [(*time_kill(pool), time_scan(words)) for _ in range(kills)]
    detected, reusable, bound = (spread(each) for each in zip(*spent, strict=True))
    unit = f"us, {'2 MiB' if pool.stats()['huge_bytes'] else '4 KiB'} pages"
    return [
        Row.of("recovery, SIGKILL to detected, 1e6 blocks", unit, detected, bound),
        Row.of("recovery, SIGKILL to reusable, 1e6 blocks", unit, reusable, bound),
    ]
