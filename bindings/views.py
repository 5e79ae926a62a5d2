"""Views of pool memory: numpy, memoryview, DLPack and torch, without a copy.

Every view keeps the mapping alive, so a view that outlives its pool is readable, never a crash; what it shows is
protected only while the hit or reservation that it came from is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvpool.bindings import Core
from kvpool.bindings.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = ["class_array", "class_torch", "mapping_array"]


class _Mapping:
    """Tells numpy where a mapping lies, and keeps it mapped for as long as an array refers to it.

    Its destructor is a C function: one in Python could swallow a KeyboardInterrupt that arrives while it runs.
    """

    def __init__(self, core: Core, handle: Any, size: int) -> None:
        self._hold = core.ffi.gc(core.lib.kvp_hold_new(handle, 0, 0), core.lib.kvp_hold_end)
        address = int(core.ffi.cast("uintptr_t", core.lib.kvp_pool_base(handle)))
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (size,), "typestr": "|u1"}


def mapping_array(core: Core, handle: Any, size: int) -> NDArray[np.uint8]:
    """The whole mapping of a pool handle (cdata) as writable bytes."""
    return np.asarray(_Mapping(core, handle, size))


def class_array(
    memory: NDArray[np.uint8], offset: int, stride: int, blocks: int, dtype: DTypeLike, shape: tuple[int, ...] | None
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
    return np.ndarray((blocks, *shape), dtype=kind, buffer=memory, offset=offset, strides=(stride, *inner))


def class_torch(array: NDArray[Any]) -> Any:
    """The same memory as a torch tensor. Raises ImportError where torch is not installed.

    torch knows no read-only tensors: treat blocks that you did not reserve as read-only.
    """
    import torch

    return torch.from_numpy(array)
