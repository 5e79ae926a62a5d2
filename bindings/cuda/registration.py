"""The payload of a pool, registered with a device for as long as that is needed."""

from __future__ import annotations

import logging
import os
from typing import Any

import kvpool
from kvpool.bindings.cuda.device import Device, DeviceError

__all__ = ["CHUNK_MAX", "Registration"]

CHUNK_MAX = 256 << 30  # what one call of the driver takes
PAGE = 4096
logger = logging.getLogger("kvpool")


class Registration:
    """Registers at once, in chunks; `close` unregisters all of them. A context manager.

    Holds the mapping: the pool may be closed meanwhile, but its memory is unmapped only after this was closed. In a
    forked child it is inert: CUDA does not survive a fork.
    """

    def __init__(self, pool: kvpool.Pool, device: Device, *, chunk: int = CHUNK_MAX) -> None:
        """`chunk`: bytes a call, at most 256 GiB, whole pages. Raises `DeviceError`; then nothing stays registered."""
        if not 0 < chunk <= CHUNK_MAX or chunk % PAGE:
            raise kvpool.InvalidArgument(f"chunks of {chunk} bytes: at most {CHUNK_MAX}, in whole pages of {PAGE}")
        self.pool, self.device, self.chunk = pool, device, chunk
        self._memory: Any = pool.writable(0)  # keeps the mapping
        core, info = pool.core, pool.info
        self.base = int(core.ffi.cast("uintptr_t", core.lib.kvp_pool_base(pool.handle))) + info["payload_offset"]
        self._process = os.getpid()
        self._chunks: list[int] = []
        end = self.base + -(-info["payload_bytes"] // PAGE) * PAGE
        try:
            for address in range(self.base, end, chunk):
                device.register(address, min(chunk, end - address))
                self._chunks.append(address)
            self._delta = self._find_delta()
        except DeviceError as error:
            self._undo()
            error.add_note(
                f"while registering {info['payload_bytes']} bytes of {pool.uri} in chunks of {chunk}: the driver must "
                "be allowed to lock as much, and the memory must not be registered already"
            )
            raise
        except BaseException:
            self._undo()
            raise

    def _find_delta(self) -> int | None:
        """How far the device sees the memory from where we do; None if not all chunks lie alike."""
        deltas = {self.device.device_pointer(address) - address for address in self._chunks}
        return deltas.pop() if len(deltas) == 1 else None

    def address(self, block_class: int, number: int) -> int:
        """Host address of a block. Raises `OutOfRange`."""
        classes = self.pool.info["classes"]
        if not 0 <= block_class < len(classes) or not 0 <= number < classes[block_class]["blocks"]:
            raise kvpool.OutOfRange(f"class {block_class} has no block {number}")
        return int(self.base + number * classes[block_class]["block_bytes"])

    def split(self, address: int, size: int) -> list[tuple[int, int]]:
        """(offset, size) of the parts of a range of host memory, each of one registered chunk."""
        parts, done = [], 0
        while done < size:
            room = self.chunk - (address + done - self.base) % self.chunk
            parts.append((done, min(room, size - done)))
            done += parts[-1][1]
        return parts

    def device_pointer(self, block_class: int = 0, number: int = 0) -> int:
        """Where kernels see a block; blocks of a class follow each other by their size. Raises `DeviceError` if the
        device sees the chunks apart from each other: then only copies work.
        """
        if self._delta is None:
            raise DeviceError("device_pointer", 0, "the device does not map all chunks at one distance")
        return int(self.address(block_class, number) + self._delta)

    def device_array(self, block_class: int = 0) -> Any:
        """All blocks of a class as an object that torch.as_tensor and cupy.asarray take: uint8 [blocks, block_bytes] in
        device memory terms, no copy. Kernels write only blocks that this process reserved. Keeps this registration.
        """
        part = self.pool.info["classes"][block_class]
        return _DeviceArray(self, self.device_pointer(block_class), (part["blocks"], part["block_bytes"]))

    def _undo(self) -> list[DeviceError]:
        """Unregister everything, in reverse; one that fails does not keep the others."""
        failed = []
        while self._chunks:
            try:
                self.device.unregister(self._chunks.pop())
            except DeviceError as error:
                failed.append(error)
        return failed

    def close(self) -> None:
        """Unregister. Copies must have ended. Idempotent. Raises the first `DeviceError` after all were tried."""
        if os.getpid() != self._process:
            self._chunks.clear()
        failed = self._undo()
        self._memory = None
        if failed:
            raise failed[0]

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_chunks", None):
            logger.warning("a registration of %s was not closed", self.pool.uri)
            try:
                self.close()
            except DeviceError as error:
                logger.warning("%s: %s", self.pool.uri, error)


class _DeviceArray:
    """Blocks where a device sees them, in the form of the CUDA array interface."""

    def __init__(self, registration: Registration, pointer: int, shape: tuple[int, int]) -> None:
        self._registration = registration
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": (pointer, False),
            "shape": shape,
            "strides": None,
            "typestr": "|u1",
        }
