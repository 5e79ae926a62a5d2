"""Rows of the suite `coherence` on larger pools: a put in both modes, and how fast a host follows another's log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np

import kvpool
from kvpool import Pool
from kvpool.bindings import core
from kvpool.tools.bench_suite import SEED, Effort, Row, in_turn
from kvpool.tools.bench_suite_pool import IDENTITY, STRIDE_MIN, TOKENS, random_tokens

__all__ = ["mode_rows"]

SIZES = {"128 KiB": 128 << 10, "512 KiB": 512 << 10, "2 MiB": 2 << 20}
COLD_BYTES = 96 << 20
RECORDS, RECORD_WORDS, BLOCKS_A_HOST = 1024, 4, 1 << 19


class Putter:
    """A pool of one mode that is full, and cold buffers."""

    def __init__(self, mode: str, stride: int, stack: ExitStack) -> None:
        self.count = COLD_BYTES // stride
        hosts = 1 if mode == "coherent" else 2
        uri = f"shm:bench-put-{mode}-{os.getpid()}"
        self.pool = stack.enter_context(
            kvpool.create(uri, block=stride, blocks=hosts * self.count, workers=4, mode=mode, hosts=hosts, replace=True)
        )
        stack.callback(kvpool.remove, uri, force=True)
        self.space = self.pool.namespace(IDENTITY)
        self.buffers = list(np.full((self.count, stride), 7, np.uint8))
        self._rng, self._turn = np.random.default_rng(SEED), 0
        for _ in range(self.count):
            self.put()

    def put(self) -> float:
        """Microseconds of one put of a new key; it evicts the oldest block."""
        self._turn += 1
        key, buffer = self.space.keys(random_tokens(self._rng, 1)), [self.buffers[self._turn % self.count]]
        start = time.perf_counter_ns()
        self.space.put(key, buffer)
        return (time.perf_counter_ns() - start) / 1e3


def put_rows(effort: Effort) -> Iterator[Row]:
    """The same put in both modes, in turn."""
    for name, stride in SIZES.items():
        with ExitStack() as stack:
            plain, other = (Putter(mode, stride, stack) for mode in ("coherent", "noncoherent"))
            spent, bound = in_turn(effort.samples(320), other.put, plain.put)
            yield Row.of(f"put, noncoherent, {name}, to coherent", "us", spent, bound)


def tiny_pool(stack: ExitStack) -> tuple[Pool, Pool]:
    """Two hosts over blocks of a line each, whose logs take many records."""
    door, uri = core("noncoherent"), f"shm:bench-replay-{os.getpid()}"
    request = door.ffi.new("struct kvp_request *")
    request.blocks, request.workers, request.classes, request.hosts = 2 * BLOCKS_A_HOST, 2, 1, 2
    request.stride = [STRIDE_MIN] + [0] * 7
    out = door.ffi.new("kvp_pool **")
    door.check(door.lib.kvp_pool_create(uri.encode(), request, b"leaf", out))
    near = stack.enter_context(Pool(door, door.ffi.gc(out[0], door.lib.kvp_pool_free)))
    stack.callback(kvpool.remove, uri, force=True)
    return near, stack.enter_context(kvpool.open(uri, host=1))


def replay_row(effort: Effort) -> Row:
    """Publications that another host learns from the log, beside the records alone, read once."""
    with ExitStack() as stack:
        near, far = tiny_pool(stack)
        space, rng = near.namespace(IDENTITY), np.random.default_rng(SEED)
        records = np.ones(RECORDS * RECORD_WORDS, np.uint64)

        def replay() -> float:
            keys = space.keys(rng.integers(0, 1 << 16, RECORDS * TOKENS, dtype=np.uint32))
            with space.reserve(keys) as new:
                new.publish()
            start = time.perf_counter_ns()
            applied = far.follow()
            spent = (time.perf_counter_ns() - start) / 1e3
            return spent / max(applied, 1)

        def read() -> float:
            start = time.perf_counter_ns()
            records.max()
            return (time.perf_counter_ns() - start) / 1e3 / RECORDS

        spent, bound = in_turn(effort.samples(200), replay, read)
    return Row.of(f"replay of {RECORDS} records, to reading them", "us/record", spent, bound)


def mode_rows(effort: Effort) -> Iterator[Row]:
    """All of them."""
    yield from put_rows(effort)
    yield replay_row(effort)
