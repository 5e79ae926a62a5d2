"""What a device must be able to do, in terms of addresses and handles, and the one error for all of it."""

from __future__ import annotations

from typing import Protocol

from kvpool.bindings.errors import Error

__all__ = ["Device", "DeviceError"]


class DeviceError(Error):
    """A call of the device's runtime failed; `call`, `device_code` and `device_name` say which and how."""

    def __init__(self, call: str, device_code: int, device_name: str) -> None:
        super().__init__(f"{call}: {device_name} ({device_code})")
        self.call, self.device_code, self.device_name = call, device_code, device_name


class Device(Protocol):
    """One GPU. Addresses are integers, of host or device memory; streams and events are handles that it gave out.

    Every method checks the return code of what it calls and raises `DeviceError`. Thread-safe. Copies are asynchronous:
    they run in the order of their stream, at some time before an event recorded behind them is done.
    """

    def register(self, address: int, size: int) -> None:
        """Page-lock host memory and map it for the device; page-aligned. At most 256 GiB at once."""

    def unregister(self, address: int) -> None:
        """Undo `register` of what begins at this address."""

    def device_pointer(self, address: int) -> int:
        """Where the device sees registered host memory."""

    def new_stream(self) -> int:
        """A stream that does not wait for the default one."""

    def end_stream(self, stream: int) -> None:
        """Give it back; what runs on it runs on."""

    def drain(self, stream: int) -> None:
        """Wait until nothing runs on it any more."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy bytes; the direction follows from the addresses. Host memory: of one registration."""

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Copy `rows` pieces of `width` bytes that lie a pitch apart on either side; a pitch is below 2 GiB."""

    def new_event(self) -> int:
        """An event without timing."""

    def record(self, event: int, stream: int) -> None:
        """The event is done once all that the stream has so far is done."""

    def is_done(self, event: int) -> bool:
        """Without waiting."""

    def wait(self, event: int) -> None:
        """Wait for it on this thread. What failed on the device since is raised here."""

    def stream_wait(self, stream: int, event: int) -> None:
        """What comes next on the stream waits for the event."""

    def end_event(self, event: int) -> None:
        """Give it back."""
