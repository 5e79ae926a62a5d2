"""The suite `core`: the paths that every request takes, each beside what it cannot beat."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvpool import Keys, Namespace, Pool
from kvpool.bindings import ffi, lib
from kvpool.bindings.hashing import HASH
from kvpool.handles import new_hold
from kvpool.tools.bench_suite import SEED, Effort, Report, Row, Timed, in_turn, per_call_ns
from kvpool.tools.bench_suite_driver import driver_rows
from kvpool.tools.bench_suite_pool import (
    CHAIN,
    IDENTITY,
    STRIDE_MIN,
    TOKENS,
    World,
    empty_call,
    make_pool,
    make_world,
    random_tokens,
    raw_pointer,
)
from kvpool.tools.bench_suite_recovery import recovery_rows

__all__ = ["alloc", "copy", "handoff", "index", "recovery", "run"]

MILLION = 1_000_000
BATCH = 64
CALLS, SAMPLES = 2000, 41
COPY_BYTES = {"128 KiB": 128 << 10, "512 KiB": 512 << 10, "2 MiB": 2 << 20}
COLD_BYTES = 96 << 20  # several times what the caches hold, so that each block is cold when its turn comes
HUGE_PAGE = 2 << 20
METADATA_PERCENT_MAX = 0.1


# ---- alloc and free ----


def reserver(pool: Pool, count: int) -> Callable[[], None]:
    """Reserve and withdraw `count` blocks through the lowest calls, in a hold made before."""
    hold, reserve, withdraw = new_hold(pool.core, pool.handle, 0, count), lib.kvp_hold_reserve, lib.kvp_hold_clear

    def pair() -> None:
        reserve(hold)
        withdraw(hold)

    pair()
    return pair


def two_calls(pool: Pool) -> Callable[[], None]:
    """The bound of whatever takes two calls."""
    fd, handle = lib.kvp_pool_fd, pool.handle

    def pair() -> None:
        fd(handle)
        fd(handle)

    return pair


def alloc_rows(effort: Effort) -> list[Row]:
    """alloc+free from Python."""
    pool = make_pool(1 << 16, STRIDE_MIN)
    bodies = (reserver(pool, 1), reserver(pool, BATCH), two_calls(pool))
    one, batch, bound = in_turn(effort.samples(SAMPLES), *(per_call_ns(body, CALLS) for body in bodies))
    pool.close()
    return [
        Row.of("alloc+free, 1 block (Python)", "ns/pair", one, bound),
        Row.of("alloc+free, batch of 64 (Python)", "ns/block", batch / BATCH, bound / BATCH),
    ]


# ---- hash and match ----


def elapsed_us(call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds of one call, and what it returned."""
    start = time.perf_counter_ns()
    result = call()
    return (time.perf_counter_ns() - start) / 1e3, result


def prompt_timer(world: World) -> Timed:
    """Tokens to pinned blocks, as a caller writes it."""
    space = world.space

    def sample() -> float:
        tokens = world.any_tokens()
        spent, (_, hit) = elapsed_us(lambda: space.match_tokens(tokens))
        if len(hit) != CHAIN:
            raise RuntimeError(f"{len(hit)} of {CHAIN} keys were found")
        hit.release()
        return spent

    return sample


def hash_timer(world: World) -> Timed:
    """The hash alone, through the lowest call."""
    out, secret = np.empty((CHAIN, lib.KVP_KEY_BYTES), np.uint8), bytes(lib.KVP_SECRET_BYTES)
    chain, pointer = ffi.new("struct kvp_chain *"), ffi.from_buffer(out)

    def sample() -> float:
        tokens = raw_pointer(world.any_tokens(), "uint32_t *")
        return elapsed_us(lambda: lib.kvp_keys(HASH, secret, tokens, CHAIN, TOKENS, chain, pointer))[0]

    return sample


def match_rows(world: World, effort: Effort) -> list[Row]:
    """A prompt of 16,384 tokens: hashed, found, pinned."""
    prompt, alone = in_turn(effort.samples(400), prompt_timer(world), hash_timer(world))
    return [Row.of("hash+match of 16384 tokens, 1e6 entries (Python)", "us", prompt, alone)]


# ---- copies ----


class Copies:
    """A pool whose blocks are all cold when their turn comes, and buffers that are too."""

    def __init__(self, stride: int) -> None:
        """Fill a pool of blocks of so many bytes."""
        self.stride = stride
        self.count = COLD_BYTES // stride
        self.pool = make_pool(3 * self.count, stride)
        self.space: Namespace = self.pool.namespace(IDENTITY)
        self._rng = np.random.default_rng(SEED)
        self.buffers = list(np.full((self.count, stride), 7, np.uint8))
        self.stored: list[Keys] = []
        self.reserved = self.space.reserve(self._new_keys(self.count))
        for turn in range(2 * self.count):  # full: from here on a put evicts the oldest block
            self._put(turn)
        self._turns = iter(range(1 << 62))

    def _new_keys(self, count: int) -> Any:
        return self.space.keys(random_tokens(self._rng, count))

    def _put(self, turn: int) -> float:
        key = self._new_keys(1)
        self.stored.append(key)
        buffer = [self.buffers[turn % self.count]]
        return elapsed_us(lambda: self.space.put(key, buffer))[0]

    def put(self) -> float:
        """One block into the pool, as a caller writes it."""
        return self._put(next(self._turns))

    def get(self) -> float:
        """One block out of the pool, as a caller writes it: of those that stay longest."""
        turn = next(self._turns)
        key, buffer = self.stored[-1 - turn % self.count], [self.buffers[turn % self.count]]
        spent, got = elapsed_us(lambda: self.space.get_into(key, buffer))
        if not got.all():
            raise RuntimeError("a block that was just stored is gone")
        return spent

    def bare(self) -> float:
        """The non-temporal copy alone into a reserved block, less what an empty call costs."""
        turn = next(self._turns)
        fill, handle, number = lib.kvp_fill, self.pool.handle, int(self.reserved.blocks[turn % self.count])
        source = ffi.from_buffer(self.buffers[turn % self.count])
        spent = elapsed_us(lambda: fill(handle, 0, number, source, self.stride))[0]
        return spent - elapsed_us(empty_call(self.pool))[0]

    def bare_out(self) -> float:
        """The same of the copy out of a block, into the caller's memory."""
        turn = next(self._turns)
        block = self.pool.tensor()[self.reserved.blocks[turn % self.count]]
        target, source = ffi.from_buffer(self.buffers[turn % self.count]), ffi.from_buffer(block)
        spent = elapsed_us(lambda: lib.kvp_copy_out(target, source, self.stride))[0]
        return spent - elapsed_us(empty_call(self.pool))[0]

    def close(self) -> None:
        """Give the memory back."""
        self.reserved.withdraw()
        self.pool.close()


def copy_rows(effort: Effort) -> Iterator[Row]:
    """put and get_into of one cold block."""
    for name, stride in COPY_BYTES.items():
        copies = Copies(stride)
        samples = effort.samples(320 if stride < HUGE_PAGE else 120)
        # Apart from each other: what one leaves in the caches the next would have to write back.
        for verb, timed, alone in (("put", copies.put, copies.bare), ("get_into", copies.get, copies.bare_out)):
            spent, bare = in_turn(samples, timed, alone)
            yield Row.of(f"{verb}, {name} (Python)", "us", spent, bare)
        copies.close()


# ---- reading in place ----


def namespace_reader(world: World, count: int) -> Callable[[], None]:
    """Match, look at each block, release: as a caller writes it."""
    keys, match = world.any_keys(count), world.space.match

    def read() -> None:
        with match(keys) as hit:
            hit.views  # noqa: B018 - making them is what is timed

    return read


def lowest_reader(world: World, count: int) -> Callable[[], None]:
    """The same through the lowest calls, into a hold made before."""
    (keys, _), shelf = world.any_keys(count).pointer, world.pool.shelves[0][(count - 1).bit_length()]
    (hold, blocks, _), rows, seen = shelf.take(), shelf.rows, shelf.rows.seen
    get, match, clear = lib.kvp_hold_get, lib.kvp_hold_match, lib.kvp_hold_clear
    rows.add(get(hold, keys))
    clear(hold)

    def read_one() -> None:
        seen[get(hold, keys)]
        clear(hold)

    def read() -> None:
        rows.of(blocks[: match(hold, keys, count)])
        clear(hold)

    return read_one if count == 1 else read


def read_rows(effort: Effort) -> list[Row]:
    """Blocks where they lie: pinned, seen as arrays, released."""
    world = make_world(1 << 14)
    bodies = [make(world, count) for count in (1, BATCH) for make in (lowest_reader, namespace_reader)]
    timed = [per_call_ns(body, CALLS // 4) for body in [*bodies, two_calls(world.pool)]]
    *spent, bound = in_turn(effort.samples(SAMPLES), *timed)
    world.pool.close()
    names = [f"{what}, {how} (Python)" for what in ("1 block", "batch of 64") for how in ("lowest calls", "Namespace")]
    units = [("ns", 1)] * 2 + [("ns/block", BATCH)] * 2
    return [
        Row.of(f"get in place, {name}", unit, each / share, bound / share)
        for name, (unit, share), each in zip(names, units, spent, strict=True)
    ]


# ---- metadata ----


def metadata_bytes(blocks: int) -> int:
    """All that is not payload in a pool of so many blocks of 128 KiB and 64 workers.

    Tiny blocks stand for them: only the number of blocks counts.
    """
    pool = make_pool(blocks, STRIDE_MIN, workers=64)
    offset: int = pool.info["payload_offset"]
    pool.close()
    return offset


def metadata_rows() -> Iterator[Row]:
    """What the pool needs for itself; the bound is a thousandth of the payload."""
    block = COPY_BYTES["128 KiB"]
    for name, blocks in (("1e4", 10**4), ("1e5", 10**5), ("1e6", MILLION)):
        each = metadata_bytes(blocks) / blocks
        bound = METADATA_PERCENT_MAX / 100 * block
        yield Row.of(f"metadata, {name} blocks of 128 KiB", "B/block", each, bound)
        yield Row.of(f"metadata, {name} blocks of 128 KiB, share", "%", each / block * 100, METADATA_PERCENT_MAX)


def alloc(effort: Effort) -> Report:
    """Blocks taken and given back, and what the pool needs for itself."""
    report = driver_rows(effort, "alloc")
    report.rows += [*alloc_rows(effort), *metadata_rows()]
    return report


def index(effort: Effort) -> Report:
    """Prefixes found, pinned and looked at."""
    report = driver_rows(effort, "index")
    world = make_world(MILLION)
    report.rows += match_rows(world, effort)
    world.pool.close()
    report.rows += read_rows(effort)
    return report


def copy(effort: Effort) -> Report:
    """Blocks in and out by copy."""
    return Report(list(copy_rows(effort)))


def handoff(effort: Effort) -> Report:
    """From a publication to who waits for it."""
    return driver_rows(effort, "handoff")


def recovery(effort: Effort) -> Report:
    """From a kill to the reuse of what the dead held."""
    report = driver_rows(effort, "recovery")
    world = make_world(MILLION)
    report.rows += recovery_rows(world.pool, effort)
    world.pool.close()
    return report


def run(effort: Effort) -> Report:
    """All rows of the suite."""
    report = driver_rows(effort)
    report.rows += alloc_rows(effort)
    world = make_world(MILLION)
    report.rows += match_rows(world, effort)
    report.rows += recovery_rows(world.pool, effort)
    world.pool.close()
    del world
    report.rows += copy_rows(effort)
    report.rows += read_rows(effort)
    report.rows += metadata_rows()
    return report
