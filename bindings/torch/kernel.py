"""Paged attention as a Triton kernel: reads the blocks of a pool through a block table, where they lie.

For GPUs, over memory of the GPU or over a pool registered with it (`kvpool.bindings.cuda.Registration.device_array`).
On a CPU under Triton's interpreter, which TRITON_INTERPRET=1 chooses, before triton is first imported: slow, for tests.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

from kvpool.bindings.errors import InvalidArgument
from kvpool.bindings.torch.attention import check_paged

__all__ = ["paged_attention"]

TILE_MIN, ROWS_MAX = 16, 64  # of a matrix product
NONE = tl.constexpr(-1e30)  # below every score, and finite


@triton.jit
def _rows(base, offsets, is_there, DIM: tl.constexpr, TILE: tl.constexpr):
    """Rows of DIM numbers at these offsets, filled up with zeros to a tile."""
    at = tl.arange(0, TILE)
    return tl.load(base + offsets[:, None] + at[None, :], mask=is_there[:, None] & (at[None, :] < DIM), other=0.0)


@triton.jit
def _attend(
    query,
    keys,
    values,
    tables,
    lengths,
    out,
    scale,
    window,
    tokens,
    query_step,
    key_step,
    value_step,
    table_step,
    out_step,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One sequence, one head of the keys, and as many rows as fit: a row is a token and one of the head's queries.

    Steps are strides: of queries and results by sequence, token, head; of keys and values by block, head, token.
    """
    sequence, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    row = tile * ROWS + tl.arange(0, ROWS)
    token, member = row // GROUP, row % GROUP
    is_row = token < tokens
    place = length - tokens + token  # of each row in its sequence
    column = tl.arange(0, COLUMNS)
    query_at = sequence * query_step[0] + token * query_step[1] + (head * GROUP + member) * query_step[2]
    asked = _rows(query, query_at, is_row, KEY_DIM, KEY_TILE)
    if WIDEN:
        asked = asked.to(tl.float32)
    best = tl.full((ROWS,), NONE, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_TILE), tl.float32)
    first_token = length - tokens + tile * ROWS // GROUP
    last_token = tl.minimum(length - tokens + (tile * ROWS + ROWS - 1) // GROUP, length - 1)
    for index in range(tl.maximum(first_token - window + 1, 0) // BLOCK_TOKENS, last_token // BLOCK_TOKENS + 1):
        # 64 bits: a pool is larger than what 32 bits of offsets reach.
        block = tl.load(tables + sequence * table_step + index).to(tl.int64)
        where = index * BLOCK_TOKENS + column
        is_there = (column < BLOCK_TOKENS) & (where < length)
        key_at = block * key_step[0] + head * key_step[1] + column * key_step[2]
        key = _rows(keys, key_at, is_there, KEY_DIM, KEY_TILE)
        scores = tl.dot(asked, tl.trans(key).to(asked.dtype), input_precision="ieee") * scale
        far = place[:, None] - where[None, :]
        is_seen = is_there[None, :] & (far >= 0) & (far < window)
        scores = tl.where(is_seen, scores, NONE)
        higher = tl.maximum(best, tl.max(scores, 1))
        shares = tl.where(is_seen, tl.exp(scores - higher[:, None]), 0.0)
        keep = tl.exp(best - higher)
        value_at = block * value_step[0] + head * value_step[1] + column * value_step[2]
        value = _rows(values, value_at, is_there, VALUE_DIM, VALUE_TILE)
        if WIDEN:
            value = value.to(tl.float32)
        total = total * keep + tl.sum(shares, 1)
        sums = sums * keep[:, None] + tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        best = higher
    found = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = sequence * out_step[0] + token * out_step[1] + (head * GROUP + member) * out_step[2]
    at = tl.arange(0, VALUE_TILE)
    tl.store(out + out_at[:, None] + at[None, :], found, mask=is_row[:, None] & (at[None, :] < VALUE_DIM))


def _tile(size: int) -> int:
    return max(TILE_MIN, triton.next_power_of_2(size))  # type: ignore[no-any-return]


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    is_checked: bool = False,
) -> torch.Tensor:
    """As `kvpool.bindings.torch.paged_attention`, without `softcap`; all tensors on one device.

    The last axis of `query`, `keys` and `values` is contiguous, the others have any strides; the numbers are float32,
    float16 or bfloat16. Sums are float32. `is_checked` says that lengths and tables are known to be right, which saves
    the wait for the GPU that looking at them costs. Runs on torch's present stream. Raises `InvalidArgument`,
    `OutOfRange`.
    """
    if not is_checked:
        check_paged(query, keys, values, tables, lengths)
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InvalidArgument(
            "tensors on the CPU: set TRITON_INTERPRET=1 before triton is imported, or use the reference"
        )
    if any(each.stride(-1) != 1 for each in (query, keys, values)):
        raise InvalidArgument("the last axis of query, keys and values must be contiguous")
    sequences, tokens, heads, key_dim = query.shape
    kv_heads, block_tokens, value_dim = values.shape[1:]
    group = heads // kv_heads
    rows = min(_tile(tokens * group), ROWS_MAX)
    out = query.new_empty((sequences, tokens, heads, value_dim))
    if not out.numel():
        return out
    tables, lengths = tables.to(torch.int32).contiguous(), lengths.to(torch.int32)
    _attend[(sequences, kv_heads, triton.cdiv(tokens * group, rows))](
        query,
        keys,
        values,
        tables,
        lengths,
        out,
        key_dim**-0.5 if scale is None else scale,
        1 << 30 if window is None else window,
        tokens,
        query.stride()[:3],
        keys.stride()[:3],
        values.stride()[:3],
        tables.stride(0),
        out.stride()[:3],
        GROUP=group,
        BLOCK_TOKENS=block_tokens,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        ROWS=rows,
        COLUMNS=_tile(block_tokens),
        KEY_TILE=_tile(key_dim),
        VALUE_TILE=_tile(value_dim),
        WIDEN=query.device.type == "cpu",  # the interpreter multiplies matrices of bfloat16 wrongly
    )
    return out
