"""The engine's KV cache in a pool's memory: how the tensors get there, and what the engine may write.

Block 0 of vLLM is a scratch block; it is private memory in front of the pool's. Block n + 1 is the pool's block n. vLLM
lays its cache out layer by layer over all blocks; here each block has all its layers, as the pool's blocks do.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import kvpool
from kvpool.bindings.errors import InvalidArgument, SystemFailure
from kvpool.bindings.vllm.layout import GroupLayout, group_layouts

__all__ = ["Layout", "PoolAllocation", "Region", "Unfit", "block_major"]

HUGE = 2 << 20
PROTECTED_MOST = 16384  # blocks: each may be an area of its own to the kernel, which allows 65,530

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
READ, WRITE = mmap.PROT_READ, mmap.PROT_WRITE
PRIVATE, SHARED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.MAP_SHARED
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
REMAP_FIXED = 3  # MREMAP_MAYMOVE | MREMAP_FIXED


class Unfit(InvalidArgument):
    """This engine cannot work in place; it copies."""


def _map(address: int | None, length: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    got = _libc.mmap(address, length, protection, flags, fd, offset)
    if got is None or got == ctypes.c_void_p(-1).value:
        raise SystemFailure(f"mmap of {length} bytes: error {ctypes.get_errno()}")
    return int(got)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an engine's cache lies in the pool's blocks."""

    stride: int
    """Bytes of a block with all its layers."""
    groups: list[GroupLayout | None]
    tensors: list[Any]
    """vLLM's KVCacheTensors, changed so that it makes its views there."""
    layers: list[tuple[int, int, int]]
    """See `Region`."""


def block_major(kv_cache_config: Any, *, is_layered: bool) -> Layout:
    """Each block with all its layers. Raises `Unfit` for a cache that cannot be laid out so.

    `is_layered`: vLLM's kernels are to see each layer's rows in one piece nevertheless.
    """
    blocks, size = kv_cache_config.num_blocks, kv_cache_config.kv_cache_tensors[0].size
    turned: list[Any] = []
    starts: dict[str, int] = {}
    layers: list[tuple[int, int, int]] = []
    for tensor in kv_cache_config.kv_cache_tensors:
        layer_stride, offset = tensor.layer_stride, tensor.offset
        is_outer = tensor.block_stride <= tensor.layer_stride or len(tensor.layers) == 1
        if is_outer:
            if tensor.size % blocks or layer_stride % blocks or offset % blocks:
                raise Unfit(f"the cache of {tensor.layers[0]} cannot be laid out block by block")
            layer_stride, offset = layer_stride // blocks, offset // blocks
        starts |= {name: offset + i * layer_stride for i, name in enumerate(tensor.layers)}
        if is_layered and (not is_outer or layer_stride % mmap.PAGESIZE or offset % mmap.PAGESIZE):
            raise Unfit(
                f"its pages of {layer_stride} bytes are no multiple of {mmap.PAGESIZE}, so they cannot be mapped"
            )
        for i in range(len(tensor.layers)):
            layers.append((tensor.offset + i * tensor.layer_stride, offset + i * layer_stride, layer_stride))
        turned.append(
            dataclasses.replace(tensor, layer_stride=layer_stride, block_stride=size // blocks, offset=offset)
        )
    groups: list[GroupLayout | None] = []
    for layout in group_layouts(kv_cache_config):
        if layout is None:
            raise Unfit("a cache group that no prefix cache may have shares the tensors of the others")
        placed = dataclasses.replace(layout, starts=tuple(starts[name] for name in layout.layers))
        if placed.block_bytes > size // blocks:
            raise Unfit("a block's layers do not fit its share of the cache")
        groups.append(placed)
    if not is_layered:
        return Layout(size // blocks, groups, turned, [])
    if len(layers) * blocks > PROTECTED_MOST:
        raise Unfit(f"{len(layers)} layers of {blocks} blocks would be too many mappings")
    return Layout(size // blocks, groups, list(kv_cache_config.kv_cache_tensors), sorted(set(layers)))


@dataclasses.dataclass(frozen=True)
class Area:
    """Rows in memory of the pool's blocks: number n lies at address + n * step, and is at `start` of the pool's
    block.
    """

    address: int
    step: int
    start: int


class Region:
    """What vLLM takes for its cache: (1 + blocks) rows, row 0 private, the others the pool's, read-only until unlocked.

    `layers` is empty where each row is a whole block. Where the kernels want each layer's rows in one piece, it has for
    each layer where it begins in vLLM's cache and where in a block, and the bytes of its row: then every row is
    mapped by
    itself, and the pool's blocks are as they always are. Unmapped when the last tensor over it has gone.
    """

    def __init__(
        self, pool: kvpool.Pool, blocks: int, stride: int, layers: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        self.stride, self.blocks = stride, blocks
        self.is_shared = True
        self._fd = int(pool.core.lib.kvp_pool_fd(pool.handle))
        self._offset = int(pool.info["payload_offset"])
        size = (blocks + 1) * stride
        self._whole = size + 2 * HUGE
        self._start = _map(None, self._whole, 0, PRIVATE | MAP_NORESERVE)
        weakref.finalize(self, _libc.munmap, self._start, self._whole)
        if layers:
            self.is_protected = True
            self.address = -(-self._start // mmap.PAGESIZE) * mmap.PAGESIZE
            self._areas = [self._map_layer(*layer) for layer in layers]
        else:
            self.is_protected = stride % mmap.PAGESIZE == 0 and blocks <= PROTECTED_MOST
            self._areas = [self._map_blocks()]

    def _allowed(self) -> int:
        return READ if self.is_protected else READ | WRITE

    def _map_blocks(self) -> Area:
        # As far from a huge page as in the file, so that the kernel can map huge ones.
        payload = -(-(self._start + self.stride) // HUGE) * HUGE + self._offset % HUGE
        self.address = payload - self.stride
        scratch = self.address // mmap.PAGESIZE * mmap.PAGESIZE
        _map(scratch, payload - scratch, READ | WRITE, PRIVATE | MAP_FIXED)
        _map(payload, self.blocks * self.stride, self._allowed(), SHARED | MAP_FIXED, self._fd, self._offset)
        return Area(payload, self.stride, 0)

    def _map_layer(self, begin: int, start: int, row: int) -> Area:
        first = self.address + begin
        _map(first, row, READ | WRITE, PRIVATE | MAP_FIXED)
        for number in range(self.blocks):
            at = self._offset + number * self.stride + start
            _map(first + (number + 1) * row, row, self._allowed(), SHARED | MAP_FIXED, self._fd, at)
        return Area(first + row, row, start)

    def tensor(self) -> torch.Tensor:
        """All rows, as bytes."""
        length = (self.blocks + 1) * self.stride
        memory = (ctypes.c_char * length).from_address(self.address)
        memory.region = self  # type: ignore[attr-defined]  # kept by the tensor, and so the mapping is
        return torch.frombuffer(memory, dtype=torch.int8)

    def allow(self, numbers: Iterable[int], *, write: bool) -> None:
        """From now on blocks may be written, or only read: a stray write is a SIGSEGV here, not wrong bytes
        elsewhere.
        """
        if not self.is_protected:
            return
        start = end = -1
        for number in [*sorted(numbers), -1]:
            if number == end:
                end += 1
                continue
            if start >= 0:
                for area in self._areas:
                    self._protect(area.address + start * area.step, (end - start) * area.step, write)
            start, end = number, number + 1

    def _protect(self, address: int, length: int, write: bool) -> None:
        if _libc.mprotect(address, length, READ | WRITE if write else READ):
            raise SystemFailure(f"mprotect: error {ctypes.get_errno()} (vm.max_map_count?)")

    def detach(self, numbers: Iterable[int]) -> None:
        """Make all of it private memory with the bytes of these blocks, at the same addresses. No thread may write."""
        held = list(numbers)
        for area in self._areas:
            length = -(-self.blocks * area.step // mmap.PAGESIZE) * mmap.PAGESIZE
            fresh = _map(None, length, READ | WRITE, PRIVATE | MAP_NORESERVE)
            for number in held:
                ctypes.memmove(fresh + number * area.step, area.address + number * area.step, area.step)
            if _libc.mremap(fresh, length, length, REMAP_FIXED, area.address) != area.address:
                raise SystemFailure(f"mremap: error {ctypes.get_errno()}")
        self.is_protected = self.is_shared = False


class PoolAllocation(TorchFunctionMode):
    """While vLLM allocates its KV cache: the one `torch.zeros` of that size is the region.

    Zeroing it would wipe what others have published, so the call itself is answered.
    """

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region = region
        self.answered = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch.overrides."""
        kwargs = kwargs or {}
        size = (self._region.blocks + 1) * self._region.stride
        if function is torch.zeros and kwargs.get("dtype") is torch.int8 and args == (size,):
            self.answered += 1
            return self._region.tensor()
        return function(*args, **kwargs)
