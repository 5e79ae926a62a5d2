"""The Triton kernel over pool blocks, under the interpreter, against the reference in torch. Run by test_triton.py."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import pytest

import kvpool

torch = pytest.importorskip("torch", reason="torch is not installed")
assert os.environ.get("TRITON_INTERPRET") == "1", "triton asks for it when it is imported"
pytest.importorskip("triton", reason="triton is not installed")

from kvpool.bindings.door import pool_block_bytes  # noqa: E402
from kvpool.bindings.torch import KVLayout, PagedTensors, paged_attention  # noqa: E402
from kvpool.bindings.torch.kernel import paged_attention as kernel  # noqa: E402

MAP_NORESERVE = 0x4000


@pytest.fixture
def paged_of(make_pool):
    def paged(layout, blocks=64):
        made = PagedTensors(make_pool(block=pool_block_bytes(layout.block_bytes), blocks=blocks), layout)
        made.blocks.copy_(torch.randn(made.blocks.shape, generator=torch.Generator().manual_seed(0)))
        return made

    return paged


def case(paged, lengths, tokens, heads):
    torch.manual_seed(2)
    most = -(-max(lengths) // paged.layout.block_tokens)
    tables = torch.stack([torch.randperm(paged.blocks.shape[0])[:most] for _ in lengths]).int()
    query = torch.randn(len(lengths), tokens, heads, paged.layout.key_dim).to(paged.layout.dtype)
    return query, paged.keys(1), paged.values(1), tables, torch.tensor(lengths, dtype=torch.int32)


CASES = {
    "decode": (KVLayout(2, 2, 32, 32, 16, torch.float32), [100, 77], 1, 4, {}),
    "one query a head": (KVLayout(2, 3, 64, 64, 16, torch.float32), [33, 16, 17], 1, 3, {}),
    "a tail": (KVLayout(2, 1, 32, 32, 16, torch.float32), [60, 41], 20, 4, {}),
    "many rows": (KVLayout(2, 1, 16, 16, 16, torch.float32), [90], 70, 2, {}),
    "a window": (KVLayout(2, 2, 32, 32, 16, torch.float32), [100, 30], 5, 4, {"window": 24}),
    "odd sizes": (KVLayout(2, 2, 80, 48, 24, torch.float32), [50, 49], 3, 2, {"scale": 0.2}),
    "small blocks": (KVLayout(2, 2, 32, 32, 4, torch.float32), [21], 2, 4, {}),
    "bfloat16": (KVLayout(2, 2, 64, 64, 16, torch.bfloat16), [70, 5], 2, 4, {}),
    "float16": (KVLayout(2, 2, 64, 64, 16, torch.float16), [70], 1, 8, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_reference(paged_of, name):
    layout, lengths, tokens, heads, rules = CASES[name]
    given = case(paged_of(layout), lengths, tokens, heads)
    got, wanted = kernel(*given, **rules), paged_attention(*given, **rules)
    assert got.dtype == layout.dtype
    tolerance = 2e-6 if layout.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def test_only_the_sequence_with_the_block_sees_a_change(paged_of):
    """The negative control: the kernel reads the pool, and through the table."""
    paged = paged_of(KVLayout(2, 2, 32, 32, 16, torch.float32))
    query, keys, values, _, lengths = case(paged, [64, 64], 1, 4)
    tables = torch.tensor([[9, 4, 33, 2], [7, 60, 1, 8]], dtype=torch.int32)
    before = kernel(query, keys, values, tables, lengths)
    paged.blocks[33] = 0
    after = kernel(query, keys, values, tables, lengths)
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_a_pool_larger_than_32_bits_of_offsets(identity):
    """Elements beyond 2^31 of the tensor: the last blocks of 9 GiB that are mapped and never written, but for one."""
    layout = KVLayout(1, 1, 16, 16, 16, torch.float16)
    stride = 1 << 20
    memory = mmap.mmap(-1, 9000 * stride, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    rows = torch.frombuffer(memory, dtype=torch.float16).view(9000, stride // 2)[:, : layout.block_bytes // 2]
    keys, values = layout.split(rows.unflatten(1, layout.row_shape))
    keys[8999] = torch.randn(keys.shape[1:])
    values[8999] = torch.randn(values.shape[1:])
    given = (
        torch.randn(1, 1, 1, 16).half(),
        keys[:, 0],
        values[:, 0],
        torch.tensor([[8999]], dtype=torch.int32),
        torch.tensor([11], dtype=torch.int32),
    )
    torch.testing.assert_close(kernel(*given), paged_attention(*given), atol=1e-2, rtol=1e-2)
    assert kernel(*given).abs().max() > 0


def test_bad_input_is_refused(paged_of):
    query, keys, values, tables, lengths = case(paged_of(KVLayout(2, 2, 32, 32, 16, torch.float32)), [30], 1, 4)
    with pytest.raises(kvpool.OutOfRange):
        kernel(query, keys, values, tables + 1000, lengths)
    with pytest.raises(kvpool.InvalidArgument):
        kernel(query, keys, values, tables, lengths + 1000)
    with pytest.raises(kvpool.InvalidArgument, match="contiguous"):
        kernel(query, keys.transpose(2, 3).contiguous().transpose(2, 3), values, tables, lengths)
    assert kernel(query[:0], keys, values, tables[:0], lengths[:0]).shape == (0, 1, 4, 32)


def test_without_the_interpreter_it_says_so():
    program = (
        "import torch, kvpool\n"
        "from kvpool.bindings.torch.kernel import paged_attention\n"
        "z = torch.zeros(1, 1, 1, 16)\n"
        "kv = torch.zeros(1, 1, 16, 16)\n"
        "paged_attention(z, kv, kv, torch.zeros(1, 1).int(), torch.ones(1).int())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, env=environment, check=False
    )
    assert "TRITON_INTERPRET=1" in done.stderr
