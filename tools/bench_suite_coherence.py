"""The suite `coherence`: what mode noncoherent costs, beside mode coherent and beside its bare cache instructions.

Both modes run on ordinary memory, in this process, in turn: mode noncoherent with the CPU's real instructions and two
hosts, mode coherent with two workers. In a row "VERB, to coherent" the bound is the same verb in mode coherent; in the
others it is a loop of the cache instructions, with one fence, over the lines that the verb cannot do without.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

import kvpool
from kvpool.bindings import Core, core
from kvpool.tools.bench_suite import Effort, Report, Row, Timed, in_turn
from kvpool.tools.bench_suite_modes import mode_rows
from kvpool.tools.bench_suite_pool import IDENTITY, TOKENS

__all__ = ["run"]

SAMPLES = 200
BATCH, BLOCK, BLOCKS, RECORDS, LINE, RECORD = 64, 4096, 1024, 16, 64, 32
KEY_BYTES = 16


def elapsed_us(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


class Duo:
    """A pool and two that use it: hosts, or in mode coherent workers. `near` publishes, `far` reads."""

    def __init__(self, mode: str, stack: ExitStack) -> None:
        hosts = 1 if mode == "coherent" else 2
        uri = f"shm:bench-{mode}-{os.getpid()}"
        self.near = stack.enter_context(
            kvpool.create(uri, block=BLOCK, blocks=hosts * BLOCKS, workers=4, mode=mode, hosts=hosts, replace=True)
        )
        stack.callback(kvpool.remove, uri, force=True)
        self.far = stack.enter_context(kvpool.open(self.near.uri, host=hosts - 1))
        self.core: Core = core(mode)
        self.ffi, self.lib = self.core.ffi, self.core.lib
        keys = self.near.namespace(IDENTITY).keys(np.arange(3 * BATCH * TOKENS, dtype=np.uint32))
        raw = b"".join(bytes(key) for key in keys)
        self.changing, self.standing, self.logged = (
            self.ffi.new("uint8_t[]", raw[i * BATCH * KEY_BYTES : (i + 1) * BATCH * KEY_BYTES]) for i in range(3)
        )
        self.numbers, self.refs = self.ffi.new("uint32_t[]", BATCH), self.ffi.new("uint64_t[]", BATCH)
        self.pins = self.ffi.new("uint64_t[]", BATCH)
        self.content = self.ffi.new("uint8_t[]", bytes(range(256)) * (BLOCK // 256))
        self.buffers = [self.ffi.new("uint8_t[]", BLOCK) for _ in range(BATCH)]
        self.targets, self.got = self.ffi.new("void *[]", self.buffers), self.ffi.new("uint8_t[]", BATCH)
        self.reserve(BATCH)
        self.publish(self.standing, BATCH)
        self.ask(self.lib.kvp_pool_follow(self.far.handle))
        if self.ask(self.lib.kvp_lookup(self.far.handle, 0, self.standing, BATCH, self.pins)) != BATCH:
            raise RuntimeError("the other side does not find what was published")

    def ask(self, status: int) -> int:
        """A call that must succeed."""
        return self.core.check(status)

    def reserve(self, count: int) -> None:
        """Blocks of the near side, filled."""
        self.ask(self.lib.kvp_reserve(self.near.handle, 0, count, self.numbers))
        for i in range(count):
            self.ask(self.lib.kvp_fill(self.near.handle, 0, self.numbers[i], self.content, BLOCK))

    def publish(self, keys: Any, count: int) -> None:
        """What was reserved."""
        if self.ask(self.lib.kvp_publish(self.near.handle, 0, self.numbers, keys, count, self.refs)) != count:
            raise RuntimeError("not every block could be published")

    def remove(self, keys: Any, count: int) -> None:
        """And back."""
        self.ask(self.lib.kvp_remove(self.near.handle, 0, keys, count))

    def address(self, number: int) -> Any:
        """Of a block."""
        base = self.ffi.cast("uint8_t *", self.lib.kvp_pool_base(self.near.handle))
        return base + self.near.info["payload_offset"] + number * BLOCK

    # ---- what is timed ----

    def time_publish(self) -> float:
        """One batch, reserved and filled before, removed after."""
        self.reserve(BATCH)
        spent = elapsed_us(lambda: self.publish(self.changing, BATCH))
        self.remove(self.changing, BATCH)
        return spent

    def time_pin(self) -> float:
        """Pin and unpin a batch that the other side has published."""
        self.ffi.memmove(self.refs, self.pins, 8 * BATCH)
        far, lib = self.far.handle, self.lib

        def pair() -> None:
            self.ask(lib.kvp_pin_refs(far, self.refs, BATCH) - BATCH)
            lib.kvp_unpin_refs(far, self.refs, BATCH)

        return elapsed_us(pair)

    def time_copy(self) -> float:
        """Copy a batch out that the other side has published."""
        return elapsed_us(
            lambda: self.ask(
                self.lib.kvp_read(self.far.handle, 0, self.standing, BATCH, self.targets, BLOCK, self.got) - BATCH
            )
        )

    def time_lookup(self) -> float:
        """Find a batch that the other side has published."""
        return elapsed_us(
            lambda: self.ask(self.lib.kvp_lookup(self.far.handle, 0, self.standing, BATCH, self.refs) - BATCH)
        )

    def time_replay(self) -> float:
        """Follow the other side's log over a few publications."""
        self.reserve(RECORDS)
        self.publish(self.logged, RECORDS)
        spent = elapsed_us(lambda: self.ask(self.lib.kvp_pool_follow(self.far.handle)))
        self.remove(self.logged, RECORDS)
        self.ask(self.lib.kvp_pool_follow(self.far.handle))
        return spent

    def time_nothing_new(self) -> float:
        """Follow when there is nothing to follow."""
        return elapsed_us(lambda: self.ask(self.lib.kvp_pool_follow(self.far.handle)))

    def time_hand_off(self) -> float:
        """A free segment, there and back; microseconds of one way."""
        near, far, lib = self.near.handle, self.far.handle, self.lib

        def round_trip() -> None:
            for giver, taker, to in ((near, far, 1), (far, near, 0)):
                self.ask(lib.kvp_pool_give(giver, to, 1) - 1)
                self.ask(lib.kvp_pool_follow(taker))
                self.ask(lib.kvp_pool_follow(giver))

        return elapsed_us(round_trip) / 2

    # ---- their bounds ----

    def lines(self, size: int, *, write_back: bool = False, invalidate: bool = False, copy: bool = False) -> Timed:
        """The cache instructions alone over so many bytes, a fence after them; then perhaps the bytes read again."""
        back, drop, start = self.lib.kvp_lines_write_back, self.lib.kvp_lines_invalidate, self.address(0)
        into = self.ffi.new("uint8_t[]", size)

        def walk() -> None:
            if write_back:
                back(start, size)
            if invalidate:
                drop(start, size)
            if copy:
                self.ffi.memmove(into, start, size)

        return lambda: elapsed_us(walk)


def compare(name: str, unit: str, per: int, samples: int, **timed: Timed) -> list[Row]:
    """A verb in mode noncoherent beside each of its bounds, sampled in turn."""
    for each in timed.values():
        each()  # once, so that nothing is touched for the first time
    medians = dict(zip(timed, (value / per for value in in_turn(samples, *timed.values())), strict=True))
    verb = medians.pop("verb")
    return [Row.of(f"{name}, to {bound.replace('_', ' ')}", unit, verb, value) for bound, value in medians.items()]


def run(effort: Effort) -> Report:
    """Measure both modes."""
    samples = effort.samples(SAMPLES)
    with ExitStack() as stack:
        one, two = Duo("coherent", stack), Duo("noncoherent", stack)
        segment = two.near.info["segment_bytes"]
        block, batch = f"us/block of {BLOCK >> 10} KiB", f"batch of {BATCH}"
        payload = BATCH * BLOCK
        written, dropped = two.lines(payload, write_back=True), two.lines(payload, invalidate=True)
        rows = [
            *compare(f"publish, {batch}", block, BATCH, samples, verb=two.time_publish, coherent=one.time_publish,
                     its_payload_written_back=written),
            *compare(f"pin and unpin, {batch}", block, BATCH, samples, verb=two.time_pin, coherent=one.time_pin,
                     its_payload_dropped=dropped),
            *compare(f"copy out, {batch}", block, BATCH, samples, verb=two.time_copy, coherent=one.time_copy,
                     its_payload_dropped_and_copied=two.lines(payload, invalidate=True, copy=True)),
            *compare(f"lookup, {batch}", "us/key", BATCH, samples, verb=two.time_lookup, coherent=one.time_lookup),
            *compare(f"replay of {RECORDS} records", "us/record", RECORDS, samples, verb=two.time_replay,
                     its_records_dropped_and_copied=two.lines(RECORDS * RECORD, invalidate=True, copy=True)),
            *compare("follow, nothing new", "us", 1, samples, verb=two.time_nothing_new,
                     one_line_dropped_and_copied=two.lines(LINE, invalidate=True, copy=True)),
            *compare(f"hand-off of a free segment of {segment >> 10} KiB", "us", 1, samples, verb=two.time_hand_off,
                     its_lines_written_back_and_dropped=two.lines(segment, write_back=True, invalidate=True)),
        ]  # fmt: skip
        instructions = two.ffi.string(two.lib.kvp_line_instructions()).decode()
    about = {"cache instructions": instructions, "memory": "ordinary, coherent: what the device adds is not in it"}
    return Report([*rows, *mode_rows(effort)], [], about)
