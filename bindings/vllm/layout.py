"""Where the pages of a vLLM engine lie, and how many bytes of a pool's block each group needs.

A pool's block holds one block of one cache group of one rank: the pages of its layers one after the other, each from a
multiple of 64 bytes on, without the padding that vLLM may have between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvpool.bindings.errors import InvalidArgument
from kvpool.namespace import Parts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LINE", "GroupLayout", "group_layouts", "padded", "parts_of"]

LINE = 64


def padded(size: int) -> int:
    """Bytes up to the next multiple of a line."""
    return -(-size // LINE) * LINE


@dataclasses.dataclass(frozen=True)
class GroupLayout:
    """One cache group: its layers, where each starts in a pool's block, and how many bytes it has."""

    group: int
    block_tokens: int
    layers: tuple[str, ...]
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """What a pool's block must have."""
        return padded(self.starts[-1] + self.sizes[-1])


def _page_bytes(spec: Any) -> int:
    """Bytes of a page that mean something."""
    if getattr(spec, "page_size_padded", None) is not None:
        spec = dataclasses.replace(spec, page_size_padded=None)
    return int(spec.page_size_bytes)


def group_layouts(kv_cache_config: Any) -> list[GroupLayout | None]:
    """The layout of each group, None for those that vLLM does not let a prefix cache have."""
    layouts: list[GroupLayout | None] = []
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        if number not in kv_cache_config.prefix_cacheable_group_ids or not group.layer_names:
            layouts.append(None)
            continue
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        sizes = [_page_bytes(specs[name] if specs else group.kv_cache_spec) for name in group.layer_names]
        starts, at = [], 0
        for size in sizes:
            starts.append(at)
            at += padded(size)
        layouts.append(
            GroupLayout(number, group.kv_cache_spec.block_size, tuple(group.layer_names), tuple(starts), tuple(sizes))
        )
    return layouts


def _runs(tensor: Tensor, at: int) -> list[tuple[int, int, int]]:
    """(byte offset, bytes, byte in the block) of each contiguous run of one block's page, in the order of its axes."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    item = tensor.element_size()
    if extent == tensor.numel() or tensor.dim() == 0:
        return [(int(tensor.storage_offset()) * item, extent * item, at)]
    axis = max(range(tensor.dim()), key=lambda each: tensor.stride(each) if tensor.shape[each] > 1 else -1)
    runs: list[tuple[int, int, int]] = []
    for index in range(tensor.shape[axis]):
        part = tensor.select(axis, index)
        runs += _runs(part, at)
        at += part.numel() * item
    return runs


def _layer_parts(name: str, tensor: Tensor, blocks: int, size: int, start: int) -> list[tuple[int, int, int, int]]:
    """The parts of one layer: the same for each block, `stride` bytes apart."""
    ratio, rest = divmod(tensor.shape[0], blocks)
    if rest or not ratio:
        raise InvalidArgument(f"{name} has {tensor.shape[0]} pages for {blocks} blocks: a layout that is not known")
    step = tensor.stride(0)
    # Where the kernel's pages are smaller than a block, `ratio` of them make one.
    block = tensor.as_strided((ratio, *tensor.shape[1:]), (step, *tensor.stride()[1:]), tensor.storage_offset())
    runs = _runs(block, start)
    length = sum(run[1] for run in runs)
    if length != size:
        raise InvalidArgument(f"{name} has {length} bytes a block, its specification says {size}")
    base = tensor.untyped_storage().data_ptr()
    stride = ratio * step * tensor.element_size()
    return [(base + offset, stride, many, at) for offset, many, at in runs]


def parts_of(layout: GroupLayout, tensors: Mapping[str, Tensor], blocks: int) -> Parts:
    """Where the blocks of a group lie in the engine's tensors. Raises `InvalidArgument` for tensors not in this
    memory."""
    parts: list[tuple[int, int, int, int]] = []
    for name, start, size in zip(layout.layers, layout.starts, layout.sizes, strict=True):
        if name not in tensors:
            raise InvalidArgument(f"vLLM has registered no cache of layer {name}")
        tensor = tensors[name]
        if tensor.device.type != "cpu":
            raise InvalidArgument(
                f"the cache of {name} is on {tensor.device}: this connector copies between memory of the host; for an "
                "accelerator use the PoolOffloadingConnector of kvpool.bindings.vllm.tier"
            )
        parts += _layer_parts(name, tensor, blocks, size, start)
    return Parts(parts)
