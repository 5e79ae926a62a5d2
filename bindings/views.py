"""Views of pool memory: numpy, memoryview, DLPack and torch, without a copy.

Every view keeps the mapping alive, so a view that outlives its pool is readable, never a crash; what it shows is
protected only while the hit or reservation that it came from is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.bindings import ffi, lib
from kvpool.bindings.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = ["class_array", "class_torch", "mapping_buffer"]


def mapping_buffer(handle: Any, size: int) -> Any:
    """A writable buffer over the whole mapping that keeps `handle` (the owning cdata) alive."""
    # The destructor does nothing: as a closure it holds the handle for as long as a view holds the buffer.
    base = ffi.gc(lib.kvp_pool_base(handle), lambda _, owner=handle: None)
    return ffi.buffer(base, size)


def class_array(
    buffer: Any, offset: int, stride: int, blocks: int, dtype: DTypeLike, shape: tuple[int, ...] | None
) -> NDArray[Any]:
    """All blocks of a class as one writable array [blocks, *shape], strided by the block size.

    `shape` defaults to one axis as long as a block holds. Raises `InvalidArgument` if dtype and shape need more bytes
    than a block has, or the stride is no multiple of the item size.
    """
    kind = np.dtype(dtype)
    if shape is None:
        shape = (stride // kind.itemsize,)
    needed = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if needed > stride or needed <= 0 or stride % kind.itemsize:
        raise InvalidArgument(f"{kind} x {shape} needs {needed} bytes; a block has {stride}")
    inner = np.empty(0, kind).strides[:0]
    step = kind.itemsize
    for extent in reversed(shape):
        inner = (step, *inner)
        step *= extent
    return np.ndarray((blocks, *shape), dtype=kind, buffer=buffer, offset=offset, strides=(stride, *inner))


def class_torch(array: NDArray[Any]) -> Any:
    """The same memory as a torch tensor. Raises ImportError where torch is not installed.

    torch knows no read-only tensors: treat blocks that you did not reserve as read-only.
    """
    import torch

    return torch.from_numpy(array)
