"""The suite `scale`: what grows with the pool and with the workers, and what must not.

The bound of a row is the same operation where it is smallest, so its ratio says how much it has grown.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import kvpool
from kvpool.bindings import core
from kvpool.tools.bench_suite import Effort, Report, Row, Spread, spread
from kvpool.tools.bench_suite_core import elapsed_us, reserver
from kvpool.tools.bench_suite_pool import CHAIN, STRIDE_MIN, World, make_pool, make_world
from kvpool.tools.children import children

__all__ = ["run"]

SIZES = (10**4, 10**5, 10**6)
WORKERS = (1, 2, 4, 8, 16)
HOSTS = (1, 2, 4, 16, 64)
SAMPLES, BATCH, SECONDS = 200, 64, 0.5
BLOCK = 128 << 10


def find_us(world: World, samples: int) -> Spread:
    """A lookup of a chain."""

    def one() -> float:
        keys = world.any_keys(CHAIN)
        return elapsed_us(lambda: world.space.lookup(keys))[0]

    return spread(one() for _ in range(samples))


def publish_us(world: World, samples: int) -> Spread:
    """A publication of a batch, which evicts as much once the pool is full."""

    def one() -> float:
        keys = world.new_keys(BATCH)
        with world.space.reserve(keys) as new:
            return elapsed_us(new.publish)[0]

    return spread(one() for _ in range(samples))


def size_rows(effort: Effort) -> Iterator[Row]:
    """Time by the number of blocks."""
    first: dict[str, float] = {}
    for blocks in SIZES[: 2 if effort.quick else None]:
        world = make_world(blocks)
        samples = effort.samples(SAMPLES)
        measured = {"lookup of 1024 keys": find_us(world, samples), "publish of 64": publish_us(world, samples)}
        world.pool.close()
        for name, spent in measured.items():
            yield Row.of(f"{name}, {blocks:.0e} blocks", "us", spent, first.setdefault(name, float(spent)))


def reserve_for_a_while(uri: str, link: Connection) -> None:
    """A worker: reserve and withdraw until the time is over; says how often."""
    with kvpool.open(uri) as pool:
        pair = reserver(pool, BATCH)
        link.send(None)
        link.recv()
        done, end = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            pair()
            done += BATCH
        link.send(done)


def worker_rows(effort: Effort) -> Iterator[Row]:
    """Nanoseconds of a pair by all workers together."""
    first = 0.0
    for workers in WORKERS[: 2 if effort.quick else None]:
        with (
            make_pool(1 << 16, STRIDE_MIN, workers=32) as pool,
            children(reserve_for_a_while, [(pool.uri,)] * workers) as links,
        ):
            for link in links:
                link.recv()
            for link in links:
                link.send(None)
            each = SECONDS * 1e9 / sum(link.recv() for link in links)
        first = first or each
        yield Row.of(f"reserve+withdraw, batch of 64, {workers} processes together", "ns/block", each, first)


def host_bytes(hosts: int) -> float:
    """Bytes of the image and of one host's own memory, without payload, for a block of a million."""
    plan = core("noncoherent" if hosts > 1 else "coherent")
    request: Any = plan.ffi.new("struct kvp_request *")
    request.blocks, request.classes, request.hosts, request.workers = 10**6, 1, hosts, 64 // hosts or 1
    request.stride = [BLOCK] + [0] * 7
    layout = plan.ffi.new("uint64_t[2]")
    plan.check(plan.lib.kvp_layout_metadata(request, layout))
    return float(layout[0] + layout[1]) / 10**6


def host_rows() -> Iterator[Row]:
    """Metadata by the number of hosts; 64 workers in all."""
    for hosts in HOSTS:
        yield Row.of(f"metadata, 1e6 blocks, {hosts} hosts", "B/block", host_bytes(hosts), host_bytes(1))


def run(effort: Effort) -> Report:
    """All rows of the suite."""
    return Report([*size_rows(effort), *worker_rows(effort), *host_rows()])
