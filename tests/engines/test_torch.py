"""Tensors over a pool, and attention through a block table, against scaled_dot_product_attention."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

import kvpool

torch = pytest.importorskip("torch", reason="torch is not installed")

from kvpool.bindings.torch import KVLayout, PagedTensors, paged_attention, pool_tensor  # noqa: E402

LAYOUT = KVLayout(layers=3, kv_heads=2, key_dim=32, value_dim=32, block_tokens=16, dtype=torch.float32)


@pytest.fixture
def paged(make_pool):
    return PagedTensors(make_pool(block=LAYOUT.block_bytes, blocks=32), LAYOUT)


def scattered(paged, ns, lengths):
    """Random keys and values of some sequences in blocks in no order: tables, and the same as dense tensors."""
    layout = paged.layout
    most = -(-max(lengths) // layout.block_tokens)
    new = ns.reserve(len(lengths) * most)
    order = torch.from_numpy(new.blocks.astype(np.int64))[torch.randperm(len(new))]
    tables = order.reshape(len(lengths), most).to(torch.int32)
    dense = []
    for layer in range(layout.layers):
        shape = (len(lengths), most, layout.kv_heads, layout.block_tokens)
        k = torch.randn(*shape, layout.key_dim).to(layout.dtype)
        v = torch.randn(*shape, layout.value_dim).to(layout.dtype)
        paged.keys(layer)[tables.long()] = k
        paged.values(layer)[tables.long()] = v
        dense.append(tuple(x.transpose(1, 2).flatten(2, 3) for x in (k, v)))  # [sequences, heads, tokens, dim]
    return new, tables, dense


def expected(query, k, v, length, **rules):
    """torch's own attention of one sequence: query [tokens, heads, dim], k and v [kv_heads, tokens, dim]."""
    tokens = query.shape[0]
    at = torch.arange(length - tokens, length)[:, None]
    where = torch.arange(length)[None]
    mask = where <= at
    if rules.get("window"):
        mask &= where > at - rules["window"]
    return torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None].float(),
        k[None, :, :length].float(),
        v[None, :, :length].float(),
        attn_mask=mask,
        scale=rules.get("scale"),
        enable_gqa=True,
    )[0].transpose(0, 1)


@pytest.fixture
def blocks_of(identity):
    return lambda paged: paged.pool.namespace(identity, block_class=paged.block_class)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("rules", [{}, {"window": 20}, {"scale": 0.3}], ids=str)
def test_attention_is_that_of_torch(paged, blocks_of, tokens, rules):
    torch.manual_seed(1)
    lengths = [100, 77, 48]
    _new, tables, dense = scattered(paged, blocks_of(paged), lengths)
    query = torch.randn(3, tokens, 6, 32)
    for layer, (k, v) in enumerate(dense):
        got = paged_attention(query, paged.keys(layer), paged.values(layer), tables, torch.tensor(lengths), **rules)
        for i, length in enumerate(lengths):
            torch.testing.assert_close(got[i], expected(query[i], k[i], v[i], length, **rules), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_attention_in_other_dtypes(make_pool, blocks_of, dtype):
    layout = KVLayout(2, 2, 48, 24, 16, dtype)  # values narrower than keys, as in MLA
    paged = PagedTensors(make_pool(block=kvpool.bindings.door.pool_block_bytes(layout.block_bytes)), layout)
    _new, tables, dense = scattered(paged, blocks_of(paged), [33])
    query = torch.randn(1, 3, 4, 48).to(dtype)
    got = paged_attention(query, paged.keys(1), paged.values(1), tables, torch.tensor([33]))
    assert got.dtype == dtype
    assert got.shape == (1, 3, 4, 24)
    wanted = expected(query[0], dense[1][0][0], dense[1][1][0], 33)
    torch.testing.assert_close(got[0].float(), wanted, atol=1e-2, rtol=1e-2)


def test_soft_caps(paged, blocks_of):
    _new, tables, dense = scattered(paged, blocks_of(paged), [20])
    query = torch.randn(1, 1, 2, 32) * 10
    got = paged_attention(query, paged.keys(0), paged.values(0), tables, torch.tensor([20]), softcap=5.0)
    k, v = (x[0, :, :20] for x in dense[0])
    scores = 5.0 * torch.tanh(torch.einsum("hd,htd->ht", query[0, 0], k) * 32**-0.5 / 5.0)
    torch.testing.assert_close(got[0, 0], torch.einsum("ht,htd->hd", scores.softmax(-1), v), atol=1e-5, rtol=1e-4)


def test_tensors_are_the_pool_and_not_a_copy(paged, blocks_of):
    pool = paged.pool
    raw = pool.writable(0)
    assert paged.keys(0).data_ptr() == raw.ctypes.data
    assert paged.values(2).shape == (32, 2, 16, 32)
    whole = pool_tensor(pool)
    assert whole.shape == (pool.info["classes"][0]["blocks"], pool.block_bytes[0])
    with blocks_of(paged).reserve(1) as new:
        number = int(new.blocks[0])
        paged.values(1)[number] = 7
        # the values of layer 1 lie after one whole layer and the keys of its own
        at = (LAYOUT.block_bytes // 3 * 3 // 2) // 4
        assert raw[number].view(np.float32)[at : at + 2 * 16 * 32].tolist() == [7.0] * (2 * 16 * 32)
        assert raw[number].view(np.float32)[at - 1] == 0
    assert pool_tensor(pool, 0, torch.bfloat16).dtype == torch.bfloat16


def test_another_process_attends_to_what_this_one_wrote(paged, blocks_of, identity, uri):
    ns = blocks_of(paged)
    torch.manual_seed(3)
    new, tables, dense = scattered(paged, ns, [48])
    keys = ns.keys(np.arange(48))
    order = {int(number): i for i, number in enumerate(tables[0].tolist())}
    new.publish([keys[order[int(number)]] for number in new.blocks])
    query = torch.randn(1, 1, 4, 32)
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(OTHER), uri, str(query.flatten().tolist())],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = torch.tensor(eval(done.stdout)).reshape(1, 4, 32)
    torch.testing.assert_close(got, expected(query[0], dense[1][0][0], dense[1][1][0], 48), atol=2e-6, rtol=1e-5)


OTHER = """
    import sys, numpy as np, torch, kvpool
    from kvpool.bindings.torch import KVLayout, PagedTensors, paged_attention
    pool = kvpool.open(sys.argv[1])
    paged = PagedTensors(pool, KVLayout(3, 2, 32, 32, 16, torch.float32))
    ns = pool.namespace(kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16"))
    with ns.match(ns.keys(np.arange(48))) as hit:
        assert len(hit) == 3
        table = torch.from_numpy(hit.blocks.astype(np.int32))[None]
        query = torch.tensor(eval(sys.argv[2])).reshape(1, 1, 4, 32)
        print(paged_attention(query, paged.keys(1), paged.values(1), table, torch.tensor([48])).flatten().tolist())
"""


def test_what_does_not_fit_is_refused(paged, make_pool):
    with pytest.raises(kvpool.InvalidArgument, match="--block 1572864"):
        PagedTensors(paged.pool, KVLayout(48, 8, 128, 128, 8, torch.bfloat16))
    with pytest.raises(kvpool.InvalidArgument, match="positive"):
        KVLayout(0, 1, 1, 1, 1, torch.float32)
    with pytest.raises(kvpool.InvalidArgument):
        pool_tensor(paged.pool, 0, torch.float32, (1 << 20,))
    with pytest.raises(kvpool.OutOfRange):
        pool_tensor(paged.pool, 5)
    k, v = paged.keys(0), paged.values(0)
    query, tables = torch.randn(1, 1, 4, 32), torch.tensor([[0, 1]])
    for wrong in (
        (query[0], k, v, tables, torch.tensor([20])),
        (torch.randn(1, 1, 3, 32), k, v, tables, torch.tensor([20])),
        (torch.randn(1, 1, 4, 16), k, v, tables, torch.tensor([20])),
        (query, k, v, tables, torch.tensor([33])),
        (query, k, v, tables, torch.tensor([0])),
        (query, k, v, tables, torch.tensor([20, 20])),
    ):
        with pytest.raises(kvpool.InvalidArgument):
            paged_attention(*wrong)
    with pytest.raises(kvpool.OutOfRange):
        paged_attention(query, k, v, torch.tensor([[0, 32]]), torch.tensor([20]))
    # what the table says behind the end of a sequence is nobody's business
    paged_attention(query, k, v, torch.tensor([[0, -1]]), torch.tensor([16]))


def test_the_folder_is_never_taken_for_torch(tmp_path):
    source = f"import sys; sys.path.insert(0, {str(next(iter(kvpool.bindings.__path__)))!r}); import torch"
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "not torch" in done.stderr


def test_importing_the_package_imports_no_engine():
    source = "import sys, kvpool; print(sorted({'torch', 'transformers', 'triton', 'lmcache'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
