"""Batches of blocks between a pool and a device's memory, on streams of their own.

The rules, which the tests with a recording device check: memory is registered before the first copy and unregistered
after the last; pins are released and reservations given back only when no copy is under way; a block is published only
after the event behind its copies.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import kvpool
from kvpool.bindings.cuda.device import Device, DeviceError
from kvpool.bindings.cuda.registration import CHUNK_MAX, Registration

__all__ = ["Pieces", "Transfer", "Transfers"]

PITCH_MAX = (1 << 31) - 1


@dataclass(frozen=True)
class Pieces:
    """Part of a page in device memory: `count` pieces of `size` bytes, `pitch` bytes from one to the next.

    In the block they follow each other without gaps. A page is a sequence of these, e.g. one for keys and one for
    values; a layout with a page's layers far apart is one with a count and a pitch.
    """

    address: int
    size: int
    count: int = 1
    pitch: int = 0

    def __post_init__(self) -> None:
        if self.size <= 0 or self.count <= 0 or (self.count > 1 and self.pitch < self.size):
            raise kvpool.InvalidArgument(f"{self}: sizes and counts are positive, pieces do not overlap")

    @property
    def bytes(self) -> int:
        """All pieces together."""
        return self.size * self.count


Page = Sequence[Pieces]


@dataclass(frozen=True)
class _Move:
    """Rows between the device and the pool; one row is a plain copy."""

    far: int
    near: int
    width: int
    rows: int = 1
    far_pitch: int = 0


def _moves(page: Page, near: int) -> Iterator[_Move]:
    """The copies of one page; pitches that the device does not take become single copies."""
    for part in page:
        if part.count == 1 or part.pitch == part.size:
            yield _Move(part.address, near, part.bytes)
        elif part.pitch <= PITCH_MAX:
            yield _Move(part.address, near, part.size, part.count, part.pitch)
        else:
            for i in range(part.count):
                yield _Move(part.address + i * part.pitch, near + i * part.size, part.size)
        near += part.bytes


def _merged(moves: Iterator[_Move]) -> Iterator[_Move]:
    """Plain copies that continue each other on both sides become one."""
    last: _Move | None = None
    for move in moves:
        if last is None:
            last = move
        elif move.rows == last.rows == 1 and move.far == last.far + last.width and move.near == last.near + last.width:
            last = _Move(last.far, last.near, last.width + move.width)
        else:
            yield last
            last = move
    if last is not None:
        yield last


class Transfer:
    """Copies under way. `finish` once; until then what they read or write is held.

    A store must be finished by the thread that began it (it owns the reservation).
    """

    def __init__(self, owner: Transfers, end: Callable[[bool], int]) -> None:
        self._owner = owner
        self._end: Callable[[bool], int] | None = end
        self._events: list[int] = []
        self.result = 0
        """After `finish`: blocks loaded, or published."""

    @property
    def is_done(self) -> bool:
        """Have the copies ended? Does not wait. Raises `DeviceError`."""
        return all(self._owner.device.is_done(event) for event in self._events)

    def then(self, stream: int) -> None:
        """What comes next on that stream (the engine's own) waits for these copies."""
        for event in self._events:
            self._owner.device.stream_wait(stream, event)

    def finish(self) -> int:
        """Wait, then release the pins of a load, or publish a store. Returns `result`. Idempotent.

        Raises `DeviceError` if the copies failed, an `Error` of the pool if the blocks were not protected all the time
        (it was closed): then a load has loaded nothing that may be used, a store has published nothing.
        """
        if self._end is not None:
            self._settle(True)
        return self.result

    def abort(self) -> None:
        """Wait for the copies, then release or give back; nothing is published. Idempotent. Raises `DeviceError`."""
        if self._end is not None:
            self._settle(False)

    def _settle(self, is_wanted: bool) -> None:
        end, self._end = self._end, None
        failed = self._owner._wait_all(self._events)
        self._events.clear()
        self._owner._open.discard(self)
        assert end is not None
        self.result = end(is_wanted and failed is None)
        if failed is not None:
            raise failed


class Transfers:
    """Loads and stores between one pool and one device. A context manager.

    `load` and `store` may be called by several threads; each copies on the next of its streams. Close it before the
    pool.
    """

    def __init__(self, pool: kvpool.Pool, device: Device, *, streams: int = 2, chunk: int = CHUNK_MAX) -> None:
        """Registers the pool's memory. Raises `DeviceError`; then nothing stays registered or made."""
        if streams < 1:
            raise kvpool.InvalidArgument("at least one stream")
        self.pool, self.device = pool, device
        self._open: set[Transfer] = set()
        self._streams: list[int] = []
        self._turn = 0
        self._process = os.getpid()
        self.registration = Registration(pool, device, chunk=chunk)
        try:
            for _ in range(streams):
                self._streams.append(device.new_stream())
        except BaseException:
            self._end_streams()
            self.registration.close()
            raise

    # ---- moving ----

    def load(self, hit: kvpool.Hit, pages: Sequence[Page], *, after: int | None = None) -> Transfer:
        """Copy pinned blocks to the device: block i of the hit to pages[i]. Takes over the hit, also if this raises.

        `after`: an event that the copies wait for (the engine's, for when the pages are free). Raises `DeviceError`,
        `InvalidArgument` for pages that are larger than a block, or not one per block.
        """

        def end(is_right: bool) -> int:
            try:
                if is_right:
                    self._assure()
                return len(hit) if is_right else 0
            finally:
                hit.release()

        try:
            self._check_pages(hit.block_class, len(hit), pages)
        except BaseException:
            hit.release()
            raise
        return self._begin(end, hit.block_class, hit.blocks.tolist(), pages, after, is_store=False)

    def store(
        self,
        namespace: kvpool.Namespace,
        keys: Any,
        pages: Sequence[Page],
        *,
        after: int | None = None,
        timeout: float | None = None,
    ) -> Transfer:
        """Copy pages from the device into reserved blocks; `finish` publishes them under `keys`, one per page.

        `after`: an event that the copies wait for (the engine's, for when the pages are written). Raises `PoolFull`,
        `DeviceError`, `InvalidArgument`; then nothing is reserved.
        """
        new = namespace.reserve(keys, timeout=timeout)

        def end(is_right: bool) -> int:
            try:
                return new.publish() if is_right else 0
            finally:
                new.withdraw()

        try:
            self._check_pages(namespace.block_class, len(new), pages)
        except BaseException:
            new.withdraw()
            raise
        return self._begin(end, namespace.block_class, new.blocks.tolist(), pages, after, is_store=True)

    def _assure(self) -> None:
        """Raise if the pool was closed, removed or left behind by a fork: the pins that were held may have ended."""
        self.pool.pin([]).release()

    def _check_pages(self, block_class: int, count: int, pages: Sequence[Page]) -> None:
        size = self.pool.block_bytes[block_class]
        if len(pages) != count:
            raise kvpool.InvalidArgument(f"{count} blocks and {len(pages)} pages: one page per block")
        for page in pages:
            needed = sum(part.bytes for part in page)
            if not 0 < needed <= size:
                raise kvpool.InvalidArgument(f"a page of {needed} bytes; a block has {size}")

    def _begin(
        self,
        end: Callable[[bool], int],
        block_class: int,
        numbers: Sequence[int],
        pages: Sequence[Page],
        after: int | None,
        *,
        is_store: bool,
    ) -> Transfer:
        """Submit all copies and record an event behind them. If one fails, those before it are waited for."""
        transfer = Transfer(self, end)
        self._open.add(transfer)
        stream = self._streams[self._turn % len(self._streams)]
        self._turn += 1
        places = (self.registration.address(block_class, number) for number in numbers)
        moves = _merged(move for page, near in zip(pages, places, strict=True) for move in _moves(page, near))
        try:
            event = self.device.new_event()
            transfer._events.append(event)
            if after is not None:
                self.device.stream_wait(stream, after)
            try:
                for move in moves:
                    self._copy(move, stream, is_store)
            finally:
                self.device.record(event, stream)
        except BaseException:
            with contextlib.suppress(DeviceError):  # the first error is the one to tell
                self.device.drain(stream)  # the event may not stand behind all copies
            with contextlib.suppress(DeviceError):
                transfer.abort()
            raise
        return transfer

    def _copy(self, move: _Move, stream: int, is_store: bool) -> None:
        parts = self.registration.split(move.near, move.width * move.rows)
        if move.rows > 1 and len(parts) > 1:
            for i in range(move.rows):
                row = _Move(move.far + i * move.far_pitch, move.near + i * move.width, move.width)
                self._copy(row, stream, is_store)
        elif move.rows == 1:
            for offset, size in parts:
                target, source = (move.near, move.far) if is_store else (move.far, move.near)
                self.device.copy(target + offset, source + offset, size, stream)
        elif is_store:
            self.device.copy_rows(move.near, move.width, move.far, move.far_pitch, move.width, move.rows, stream)
        else:
            self.device.copy_rows(move.far, move.far_pitch, move.near, move.width, move.width, move.rows, stream)

    def _wait_all(self, events: Sequence[int]) -> DeviceError | None:
        """Wait for and give back every event; the first error, if there was one."""
        failed: DeviceError | None = None
        for event in events:
            for call in (self.device.wait, self.device.end_event):
                try:
                    call(event)
                except DeviceError as error:
                    failed = failed or error
        return failed

    # ---- life ----

    def _end_streams(self) -> DeviceError | None:
        failed: DeviceError | None = None
        while self._streams:
            try:
                self.device.end_stream(self._streams.pop())
            except DeviceError as error:
                failed = failed or error
        return failed

    def close(self) -> None:
        """Abort what is under way (waiting for it), give back the streams, unregister. Idempotent.

        Raises the first `DeviceError` after everything was tried. In a forked child it does nothing.
        """
        if os.getpid() != self._process:
            self._open.clear()
            self._streams.clear()
        failed: DeviceError | None = None
        for transfer in list(self._open):
            try:
                transfer.abort()
            except DeviceError as error:
                failed = failed or error
        failed = self._end_streams() or failed
        try:
            self.registration.close()
        except DeviceError as error:
            failed = failed or error
        if failed is not None:
            raise failed

    def __enter__(self) -> Transfers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
