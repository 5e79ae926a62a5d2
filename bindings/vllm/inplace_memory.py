"""The engine's KV cache in a pool's memory: how the tensors get there, and what the engine may write.

Block 0 of vLLM is a scratch block; it is private memory in front of the pool's. Block n + 1 is the pool's block n. vLLM
lays its cache out layer by layer over all blocks; here each block has all its layers, as the pool's blocks do.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import kvpool
from kvpool.bindings.errors import InvalidArgument, SystemFailure
from kvpool.bindings.vllm.layout import GroupLayout, group_layouts

__all__ = ["PoolAllocation", "Region", "Unfit", "block_major"]

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
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
REMAP_FIXED = 3  # MREMAP_MAYMOVE | MREMAP_FIXED


class Unfit(InvalidArgument):
    """This engine cannot work in place; it copies."""


def _map(address: int | None, length: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    got = _libc.mmap(address, length, protection, flags, fd, offset)
    if got is None or got == ctypes.c_void_p(-1).value:
        raise SystemFailure(f"mmap of {length} bytes: error {ctypes.get_errno()}")
    return int(got)


def block_major(kv_cache_config: Any) -> tuple[int, list[Any], list[GroupLayout | None]]:
    """Bytes of a block with all its layers, vLLM's tensors laid out so, and the groups' layouts in such blocks.

    Raises `Unfit` for a layout that cannot be turned.
    """
    blocks = kv_cache_config.num_blocks
    turned, starts = [], {}
    size = kv_cache_config.kv_cache_tensors[0].size
    for tensor in kv_cache_config.kv_cache_tensors:
        layer_stride, offset = tensor.layer_stride, tensor.offset
        if tensor.block_stride <= tensor.layer_stride or len(tensor.layers) == 1:
            if tensor.size % blocks or layer_stride % blocks or offset % blocks:
                raise Unfit(f"the cache of {tensor.layers[0]} cannot be laid out block by block")
            layer_stride, offset = layer_stride // blocks, offset // blocks
        turned.append(
            dataclasses.replace(tensor, layer_stride=layer_stride, block_stride=size // blocks, offset=offset)
        )
        starts |= {name: offset + i * layer_stride for i, name in enumerate(tensor.layers)}
    layouts: list[GroupLayout | None] = []
    for layout in group_layouts(kv_cache_config):
        if layout is None:
            raise Unfit("a cache group that no prefix cache may have shares the tensors of the others")
        layouts.append(dataclasses.replace(layout, starts=tuple(starts[name] for name in layout.layers)))
        if layouts[-1].block_bytes > size // blocks:  # type: ignore[union-attr]
            raise Unfit("a block's layers do not fit its share of the cache")
    return size // blocks, turned, layouts


class Region:
    """(1 + blocks) rows of `stride` bytes: a private one, and the pool's payload, read-only until it is unlocked.

    Unmapped when the last tensor over it has gone.
    """

    def __init__(self, pool: kvpool.Pool, blocks: int, stride: int) -> None:
        self.stride, self.blocks = stride, blocks
        self.is_shared = True
        offset = int(pool.info["payload_offset"])
        length = blocks * stride
        head = -(-stride // HUGE) * HUGE
        self._whole = -(-(head + length) // HUGE) * HUGE + HUGE
        self._start = _map(None, self._whole, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        weakref.finalize(self, _libc.munmap, self._start, self._whole)
        # The same distance to a huge page as in the file, so that the kernel can map huge ones.
        self.payload = -(-(self._start + head) // HUGE) * HUGE + offset % HUGE
        self.is_protected = stride % mmap.PAGESIZE == 0 and offset % mmap.PAGESIZE == 0 and blocks <= PROTECTED_MOST
        scratch = (self.payload - stride) // mmap.PAGESIZE * mmap.PAGESIZE
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        _map(scratch, self.payload - scratch, READ | WRITE, private)
        fd = int(pool.core.lib.kvp_pool_fd(pool.handle))
        allowed = READ if self.is_protected else READ | WRITE
        _map(self.payload, length, allowed, mmap.MAP_SHARED | MAP_FIXED, fd, offset)

    def tensor(self) -> torch.Tensor:
        """All rows, as bytes."""
        length = (self.blocks + 1) * self.stride
        memory = (ctypes.c_char * length).from_address(self.payload - self.stride)
        memory.region = self  # type: ignore[attr-defined]  # kept by the tensor, and so the mapping is
        return torch.frombuffer(memory, dtype=torch.int8)

    def allow(self, numbers: Iterable[int], *, write: bool) -> None:
        """From now on blocks may be written, or only read: a stray write is a SIGSEGV here, not wrong bytes
        elsewhere."""
        if not self.is_protected:
            return
        start = end = -1
        for number in [*sorted(numbers), -1]:
            if number == end:
                end += 1
                continue
            if start >= 0 and _libc.mprotect(
                self.payload + start * self.stride, (end - start) * self.stride, READ | WRITE if write else READ
            ):
                raise SystemFailure(f"mprotect: error {ctypes.get_errno()} (vm.max_map_count?)")
            start, end = number, number + 1

    def detach(self, numbers: Iterable[int]) -> None:
        """Make all of it private memory with the bytes of these blocks, at the same addresses. No thread may write."""
        length = -(-self.blocks * self.stride // mmap.PAGESIZE) * mmap.PAGESIZE
        fresh = _map(None, length, READ | WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        for number in numbers:
            ctypes.memmove(fresh + number * self.stride, self.payload + number * self.stride, self.stride)
        got = _libc.mremap(fresh, length, length, REMAP_FIXED, self.payload)
        if got != self.payload:
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
