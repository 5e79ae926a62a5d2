"""A device of this machine's own memory that records what it is asked, for tests of those who use devices."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvpool.bindings.cuda.device import DeviceError

__all__ = ["Call", "RecordingDevice"]

INVALID_VALUE, ALREADY_REGISTERED, NOT_REGISTERED, BAD_HANDLE = 1, 712, 713, 400
_NAMES = {
    INVALID_VALUE: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    ALREADY_REGISTERED: "cudaErrorHostMemoryAlreadyRegistered",
    NOT_REGISTERED: "cudaErrorHostMemoryNotRegistered",
    BAD_HANDLE: "cudaErrorInvalidResourceHandle",
    719: "cudaErrorLaunchFailure",
}
REGISTER_MAX = 256 << 30
PITCH_MAX = (1 << 31) - 1
ALIAS = 1 << 46  # device pointers of registered memory are so far from its addresses


class Call(NamedTuple):
    """One call, with its arguments."""

    name: str
    arguments: tuple[int, ...]


@dataclass
class _Stream:
    """Copies not yet done, and how many there were before."""

    waiting: list[Callable[[], None]] = field(default_factory=list)
    submitted: int = 0
    done: int = 0


class RecordingDevice:
    """Implements `Device`. Copies are done when an event behind them is waited for, or by `run`: so who publishes or
    releases too early is found out. Registered memory is known by its range, and copies from or to `guarded` memory
    that is not registered fail as a real device would read through a pageable copy.
    """

    def __init__(self, *, fail: dict[str, Iterable[int]] | None = None, code: int = 2, delta: int = ALIAS) -> None:
        """`fail`: the name of a method and the numbers of the calls of it (from 1) that answer `code`."""
        self.calls: list[Call] = []
        self.registered: dict[int, int] = {}
        self.guarded: list[tuple[int, int]] = []
        self._fail = {name: set(numbers) for name, numbers in (fail or {}).items()}
        self._code, self._delta = code, delta
        self._counts: Counter[str] = Counter()
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, tuple[int, int] | None] = {}
        self._handles = 0
        self._lock = threading.RLock()

    # ---- for the test ----

    def count(self, name: str) -> int:
        """How often a method was called."""
        return self._counts[name]

    def names(self, *only: str) -> list[str]:
        """The calls in order, or those of some methods."""
        return [call.name for call in self.calls if not only or call.name in only]

    def balance(self) -> dict[str, int]:
        """What is still registered, made or waiting: all 0 when everybody has cleaned up."""
        return {
            "registered": len(self.registered),
            "streams": len(self._streams),
            "events": len(self._events),
            "copies": sum(len(stream.waiting) for stream in self._streams.values()),
        }

    def run(self) -> None:
        """Do all copies that were submitted."""
        for stream in self._streams.values():
            self._advance(stream, stream.submitted)

    # ---- Device ----

    def register(self, address: int, size: int) -> None:
        """As `Device`; also fails for ranges that overlap and for more than 256 GiB."""
        self._note("register", address, size)
        if size > REGISTER_MAX or size <= 0 or address % 4096 or size % 4096:
            self._raise("register", INVALID_VALUE)
        if any(address < at + length and at < address + size for at, length in self.registered.items()):
            self._raise("register", ALREADY_REGISTERED)
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        """As `Device`."""
        self._note("unregister", address)
        if self.registered.pop(address, None) is None:
            self._raise("unregister", NOT_REGISTERED)

    def device_pointer(self, address: int) -> int:
        """As `Device`."""
        self._note("device_pointer", address)
        if not self._is_registered(address, 1):
            self._raise("device_pointer", INVALID_VALUE)
        return address + self._delta

    def new_stream(self) -> int:
        """As `Device`."""
        self._note("new_stream")
        self._streams[self._handle()] = _Stream()
        return self._handles

    def end_stream(self, stream: int) -> None:
        """As `Device`; what still runs on it is done first."""
        self._note("end_stream", stream)
        found = self._stream("end_stream", stream)
        self._advance(found, found.submitted)
        del self._streams[stream]

    def drain(self, stream: int) -> None:
        """As `Device`."""
        self._note("drain", stream)
        found = self._stream("drain", stream)
        self._advance(found, found.submitted)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """As `Device`."""
        self._note("copy", target, source, size, stream)
        self._submit("copy", stream, [(target, source, size)])

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """As `Device`."""
        self._note("copy_rows", target, target_pitch, source, source_pitch, width, rows, stream)
        if not width <= min(target_pitch, source_pitch) or max(target_pitch, source_pitch) > PITCH_MAX:
            self._raise("copy_rows", INVALID_VALUE)
        moves = [(target + i * target_pitch, source + i * source_pitch, width) for i in range(rows)]
        self._submit("copy_rows", stream, moves)

    def new_event(self) -> int:
        """As `Device`."""
        self._note("new_event")
        self._events[self._handle()] = None
        return self._handles

    def record(self, event: int, stream: int) -> None:
        """As `Device`."""
        self._note("record", event, stream)
        found = self._stream("record", stream)
        if event not in self._events:
            self._raise("record", BAD_HANDLE)
        self._events[event] = stream, found.submitted

    def is_done(self, event: int) -> bool:
        """As `Device`."""
        self._note("is_done", event)
        place = self._events.get(event)
        return place is None or place[0] not in self._streams or self._streams[place[0]].done >= place[1]

    def wait(self, event: int) -> None:
        """As `Device`."""
        self._note("wait", event)
        if event not in self._events:
            self._raise("wait", BAD_HANDLE)
        place = self._events[event]
        if place is not None and place[0] in self._streams:
            self._advance(self._streams[place[0]], place[1])

    def stream_wait(self, stream: int, event: int) -> None:
        """As `Device`: the work that the event stands for now is done when the stream comes to this place."""
        self._note("stream_wait", stream, event)
        place = self._events.get(event)

        def catch_up() -> None:
            if place is not None and place[0] in self._streams:
                self._advance(self._streams[place[0]], place[1])

        self._append(self._stream("stream_wait", stream), catch_up)

    def end_event(self, event: int) -> None:
        """As `Device`."""
        self._note("end_event", event)
        if self._events.pop(event, BAD_HANDLE) == BAD_HANDLE:
            self._raise("end_event", BAD_HANDLE)

    # ---- inside ----

    def _note(self, name: str, *arguments: int) -> None:
        with self._lock:
            self.calls.append(Call(name, arguments))
            self._counts[name] += 1
            if self._counts[name] in self._fail.get(name, ()):
                self._raise(name, self._code)

    @staticmethod
    def _raise(name: str, code: int) -> Any:
        raise DeviceError(name, code, _NAMES.get(code, "cudaErrorUnknown"))

    def _handle(self) -> int:
        self._handles += 1
        return self._handles

    def _stream(self, call: str, stream: int) -> _Stream:
        found = self._streams.get(stream)
        return found if found is not None else self._raise(call, BAD_HANDLE)

    def _is_registered(self, address: int, size: int) -> bool:
        """In one registration: a real device takes no copy that reaches from one into another."""
        return any(at <= address and address + size <= at + length for at, length in self.registered.items())

    def _check(self, call: str, address: int, size: int) -> int:
        """The host address of what a copy names. Memory that is guarded must be registered."""
        if self._delta and address >= self._delta and self._is_registered(address - self._delta, size):
            return address - self._delta
        touches = any(address < end and begin < address + size for begin, end in self.guarded)
        if touches and not self._is_registered(address, size):
            self._raise(call, INVALID_VALUE)
        return address

    def _submit(self, call: str, stream: int, moves: list[tuple[int, int, int]]) -> None:
        found = self._stream(call, stream)
        real = [(self._check(call, to, size), self._check(call, source, size), size) for to, source, size in moves]

        def move() -> None:
            for target, source, size in real:
                ctypes.memmove(target, source, size)

        self._append(found, move)

    def _append(self, stream: _Stream, work: Callable[[], None]) -> None:
        with self._lock:
            stream.waiting.append(work)
            stream.submitted += 1

    def _advance(self, stream: _Stream, until: int) -> None:
        with self._lock:
            while stream.done < until:
                stream.waiting.pop(0)()
                stream.done += 1
