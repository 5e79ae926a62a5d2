"""Where keys and values lie inside a block, and the tensors that show them over all blocks of a class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

import kvpool
from kvpool.bindings.door import class_for

__all__ = ["KVLayout", "PagedTensors", "pool_tensor"]


@dataclass(frozen=True)
class KVLayout:
    """One block: for each layer its keys [kv_heads, block_tokens, key_dim], then its values [.., value_dim].

    Contiguous in this order, so the tokens of one head lie together and a head of a block is a matrix without a copy.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_tokens: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "key_dim", "value_dim", "block_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise kvpool.InvalidArgument(f"KVLayout.{name} is a positive number, not {value!r}")

    @property
    def block_bytes(self) -> int:
        """Bytes of a block that are used."""
        return self.layers * self._layer_items * int(self.dtype.itemsize)

    @property
    def row_shape(self) -> tuple[int, int]:
        """A block as [layers, items]."""
        return self.layers, self._layer_items

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and the values of blocks [.., layers, items]: [.., layers, kv_heads, block_tokens, dim]."""
        items = self.kv_heads * self.block_tokens * self.key_dim
        keys = rows[..., :items].unflatten(-1, (self.kv_heads, self.block_tokens, self.key_dim))
        return keys, rows[..., items:].unflatten(-1, (self.kv_heads, self.block_tokens, self.value_dim))

    @property
    def _layer_items(self) -> int:
        return self.kv_heads * self.block_tokens * (self.key_dim + self.value_dim)

    @property
    def name(self) -> str:
        """For `Identity.layout`: says everything that this layout is, except the dtype."""
        return f"LKVHND/{self.layers}x{self.kv_heads}x{self.block_tokens}x{self.key_dim}+{self.value_dim}"

    @property
    def dtype_name(self) -> str:
        """For `Identity.dtype`."""
        return str(self.dtype).removeprefix("torch.")


def pool_tensor(
    pool: kvpool.Pool,
    block_class: int = 0,
    dtype: torch.dtype = torch.uint8,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """All blocks of a class as one tensor [blocks, *shape] over the pool's memory, by block number. No copy.

    `shape` defaults to one axis as long as a block holds; else it covers the beginning of each block. Also of dtypes
    that numpy does not have (bfloat16, float8). torch knows no read-only tensors: write only into blocks that you
    reserved. Keeps the mapping alive. Raises `InvalidArgument` if dtype and shape need more than a block, `OutOfRange`.
    """
    rows = torch.from_numpy(pool.writable(block_class, np.uint8))
    stride = rows.shape[1]
    wanted = (stride // dtype.itemsize,) if shape is None else tuple(shape)
    items = int(np.prod(wanted, dtype=np.int64))
    if items <= 0 or items * dtype.itemsize > stride or stride % dtype.itemsize:
        raise kvpool.InvalidArgument(
            f"{dtype} x {wanted} needs {items * dtype.itemsize} bytes in whole items; a block has {stride}"
        )
    return rows.view(dtype)[:, :items].unflatten(1, wanted)


class PagedTensors:
    """The blocks of one class, seen through a layout. Views only; thread-safe; keeps the mapping alive.

    `keys(layer)` is [blocks, kv_heads, block_tokens, key_dim], `values(layer)` the same with value_dim, over all blocks
    of the class; the first index is the block number that `Hit.blocks` and `Reservation.blocks` give.
    """

    def __init__(self, pool: kvpool.Pool, layout: KVLayout, block_class: int | None = None) -> None:
        """Raises `InvalidArgument` if no class (or not the given one) has blocks that are large enough."""
        if block_class is None:
            block_class = class_for(pool, layout.block_bytes, f"the layout {layout.name} in {layout.dtype_name}")
        self.pool, self.layout, self.block_class = pool, layout, block_class
        self.blocks = pool_tensor(pool, block_class, layout.dtype, layout.row_shape)
        self._keys, self._values = layout.split(self.blocks)

    def keys(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, block_tokens, key_dim] of a layer."""
        return self._keys[:, layer]

    def values(self, layer: int) -> torch.Tensor:
        """[blocks, kv_heads, block_tokens, value_dim] of a layer."""
        return self._values[:, layer]
