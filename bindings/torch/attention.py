"""Paged attention in plain torch: reads each block where it lies, merges blocks by an online softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpool.bindings.errors import InvalidArgument, OutOfRange

__all__ = ["attend", "check_paged", "paged_attention"]

# Below every score; finite, so that a row that has seen only masked tokens stays a number.
NONE = -1e30


def check_paged(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Raise `InvalidArgument` for shapes that do not fit, `OutOfRange` for a table that leads out of the pool."""
    if query.ndim != 4 or keys.ndim != 4 or values.ndim != 4 or tables.ndim != 2 or lengths.ndim != 1:
        raise InvalidArgument("query, keys and values have 4 axes, tables 2, lengths 1")
    sequences, tokens, heads, dim = query.shape
    blocks, kv_heads, block_tokens, key_dim = keys.shape
    if values.shape[:3] != keys.shape[:3] or dim != key_dim or heads % kv_heads:
        raise InvalidArgument(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}: heads must be a "
            "multiple of kv_heads, query and keys as wide as each other, keys and values of the same blocks"
        )
    if len(tables) != sequences or len(lengths) != sequences:
        raise InvalidArgument(f"{sequences} queries, {len(tables)} tables and {len(lengths)} lengths")
    if not sequences:
        return
    if int(lengths.min()) < tokens or int(lengths.max()) > tables.shape[1] * block_tokens:
        raise InvalidArgument(
            f"lengths are from {tokens} (new tokens count) to {tables.shape[1] * block_tokens} (what a table reaches)"
        )
    needed = (lengths.to(tables.device) + block_tokens - 1) // block_tokens
    used = torch.arange(tables.shape[1], device=tables.device)[None] < needed[:, None]
    if bool(((tables < 0) | (tables >= blocks))[used].any()):
        raise OutOfRange(f"a table names a block that is not one of {blocks}")


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of each sequence over blocks of a pool. Copies no more than a block at a
    time.

    `query` [sequences, tokens, heads, key_dim]: the last `tokens` tokens of each sequence, whose keys and values are in
    the blocks already. `keys` [blocks, kv_heads, block_tokens, key_dim] and `values` [.., value_dim]: one layer of a
    pool (`PagedTensors`), any strides. `tables` [sequences, n] integers: block numbers, in order. `lengths`
    [sequences]: tokens of each sequence, the new ones included. `scale` defaults to key_dim ** -0.5; `window`: each
    token sees so many tokens, itself included; `softcap` as in Gemma 2.

    Returns [sequences, tokens, heads, value_dim] in the dtype of the query; computes in float32 (float64 for float64).
    Raises `InvalidArgument`, `OutOfRange`. Thread-safe; the blocks must stay pinned meanwhile.
    """
    check_paged(query, keys, values, tables, lengths)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    out = query.new_empty((*query.shape[:3], values.shape[-1]))
    for sequence, length in enumerate(lengths.tolist()):
        table = tables[sequence].tolist()
        out[sequence] = attend(
            query[sequence], keys, values, table, length, scale=factor, window=window, softcap=softcap
        )
    return out


def attend(
    query: torch.Tensor,
    keys: torch.Tensor | Sequence[torch.Tensor],
    values: torch.Tensor | Sequence[torch.Tensor],
    table: Sequence[int],
    length: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """One sequence, as in `paged_attention` but unchecked: [tokens, heads, key_dim] to [tokens, heads, value_dim].

    `keys[table[i]]` and `values[table[i]]` are block i; so they may also be lists of single blocks.
    """
    tokens, heads, dim = query.shape
    kv_heads, block_tokens, value_dim = values[table[0]].shape
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    group = heads // kv_heads
    # Rows of one kv head: its query heads, and for each the tokens.
    rows = query.to(work).transpose(0, 1).reshape(kv_heads, group * tokens, dim) * scale
    at = torch.arange(length - tokens, length, device=query.device).repeat(group)[None, :, None]
    best = rows.new_full((kv_heads, group * tokens, 1), NONE)
    total, sums = torch.zeros_like(best), rows.new_zeros((kv_heads, group * tokens, value_dim))
    first = 0 if window is None else max(0, length - tokens - window + 1) // block_tokens
    for index in range(first, -(-length // block_tokens)):
        begin = index * block_tokens
        count = min(block_tokens, length - begin)
        scores = rows @ keys[table[index]][:, :count].to(work).transpose(1, 2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        where = torch.arange(begin, begin + count, device=query.device)[None, None]
        hidden = where > at
        if window is not None:
            hidden |= where <= at - window
        scores = scores.masked_fill(hidden, NONE)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        shares, keep = torch.exp(scores - higher).masked_fill(hidden, 0), torch.exp(best - higher)
        total = total * keep + shares.sum(-1, keepdim=True)
        sums = sums * keep + shares @ values[table[index]][:, :count].to(work)
        best = higher
    found = (sums / total).reshape(heads, tokens, -1).transpose(0, 1)
    return found.to(query.dtype)
