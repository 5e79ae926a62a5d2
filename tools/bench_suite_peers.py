"""The suite `peers`: the same work by others that are installed here. A ratio below 1 says that this pool is faster.

What is not here is said in the notes, never installed: a peer's packages are its users' affair.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np

from kvpool.tools.bench_suite import Effort, Report, Row, Timed, in_turn, per_call_ns
from kvpool.tools.bench_suite_core import CALLS, COPY_BYTES, SAMPLES, Copies, elapsed_us, reserver
from kvpool.tools.bench_suite_driver import ROOT, TIMEOUT_S
from kvpool.tools.bench_suite_pool import CHAIN, STRIDE_MIN, World, make_pool, make_world

__all__ = ["run"]

BLOCKS = 100_000
SIZES = {"64 KiB": 64 << 10, "2 MiB": 2 << 20}
ALLOCATORS = ("tcmalloc_minimal", "jemalloc", "mimalloc")
NOT_DRIVEN = ("iceoryx2", "mooncake", "lmcache", "dynamo")
SOURCE = ROOT / "tests" / "native" / "bench_malloc.c"


# ---- index ----


def dict_lookup(world: World) -> Timed:
    """A Python dict of the same keys: the longest prefix."""
    table = {key: number for tokens in world.tokens for number, key in enumerate(world.space.keys(tokens))}

    def sample() -> float:
        keys = list(world.any_keys(CHAIN))

        def prefix() -> int:
            found = 0
            for key in keys:
                if table.get(key) is None:
                    break
                found += 1
            return found

        return elapsed_us(prefix)[0]

    return sample


def vllm_lookup(world: World) -> Timed:
    """vLLM's BlockPool with as many cached blocks, asked key by key as its manager does."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    pool = BlockPool(BLOCKS, True, 16)
    hashes = [bytes(key) * 2 for tokens in world.tokens for key in world.space.keys(tokens)]
    for block, digest in zip(pool.get_new_blocks(len(hashes)), hashes, strict=True):
        block.block_hash = make_block_hash_with_group_id(digest, 0)
        pool.cached_block_hash_to_block.insert(block.block_hash, block)

    def sample() -> float:
        chain = [bytes(key) * 2 for key in world.any_keys(CHAIN)]
        return elapsed_us(lambda: [pool.get_cached_block(digest, [0]) for digest in chain])[0]

    return sample


def index_rows(effort: Effort, notes: list[str]) -> Iterator[Row]:
    """A chain of 1,024 keys looked up."""
    world = make_world(BLOCKS)
    others: dict[str, Callable[[World], Timed]] = {"dict": dict_lookup}
    if importlib.util.find_spec("vllm") is None:
        notes.append("vLLM's BlockPool: vLLM is not installed here")
    else:
        others["vLLM BlockPool"] = vllm_lookup

    def ours() -> float:
        keys = world.any_keys(CHAIN)
        return elapsed_us(lambda: world.space.lookup(keys))[0]

    for name, make in others.items():
        spent, theirs = in_turn(effort.samples(200), ours, make(world))
        yield Row.of(f"lookup of 1024 keys of 1e5, to {name}", "us", spent, theirs)
    world.pool.close()


# ---- allocation ----


def malloc_ns(program: Path, size: int, library: str | None) -> float:
    """A pair of the C library's allocator, or of the one preloaded."""
    environment = os.environ | ({"LD_PRELOAD": library} if library else {})
    done = subprocess.run([program, str(size)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    return float(done.stdout)


def alloc_rows(effort: Effort, notes: list[str]) -> Iterator[Row]:
    """A pair of calls in C; ours from Python has a row in the suite `alloc`."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None or not SOURCE.is_file():
        notes.append("allocators: they need a source tree and a C compiler")
        return
    pool = make_pool(1 << 16, STRIDE_MIN)
    ours = in_turn(effort.samples(SAMPLES), per_call_ns(reserver(pool, 64), CALLS))[0] / 64
    pool.close()
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as folder:
        program = Path(folder) / "bench_malloc"
        subprocess.run([compiler, "-O2", str(SOURCE), "-o", str(program)], check=True, timeout=TIMEOUT_S)
        for name in ("the C library", *ALLOCATORS):
            library = None if name == "the C library" else ctypes.util.find_library(name)
            if name != "the C library" and library is None:
                notes.append(f"{name}: the library is not installed here")
                continue
            for size_name, size in SIZES.items():
                theirs = malloc_ns(program, size, library)
                yield Row.of(
                    f"reserve+withdraw, 64 at once (Python), to {name} at {size_name}", "ns/block", ours, theirs
                )


# ---- copies ----


def shared_memory_put(stride: int, buffers: list[np.ndarray], segment: shared_memory.SharedMemory) -> Timed:
    """`multiprocessing.shared_memory`: a numpy copy to the oldest place, and no index."""
    rows = np.ndarray((len(buffers), stride), np.uint8, buffer=segment.buf)
    turn = iter(range(1 << 62))

    def sample() -> float:
        at = next(turn) % len(buffers)
        start = time.perf_counter_ns()
        rows[at] = buffers[at]
        return (time.perf_counter_ns() - start) / 1e3

    return sample


def copy_rows(effort: Effort) -> Iterator[Row]:
    """A block in."""
    for name, stride in COPY_BYTES.items():
        copies = Copies(stride)
        segment = shared_memory.SharedMemory(create=True, size=stride * copies.count)
        try:
            theirs = shared_memory_put(stride, copies.buffers, segment)
            for _ in range(copies.count):
                theirs()
            spent, bound = in_turn(effort.samples(200), copies.put, theirs)
            yield Row.of(f"put, {name}, to multiprocessing.shared_memory without an index", "us", spent, bound)
        finally:
            copies.close()
            del theirs
            segment.close()
            segment.unlink()


def run(effort: Effort) -> Report:
    """All rows of the suite."""
    notes = [f"{name}: not driven by this suite" for name in NOT_DRIVEN]
    rows = [*index_rows(effort, notes), *alloc_rows(effort, notes), *copy_rows(effort)]
    return Report(rows, notes)
