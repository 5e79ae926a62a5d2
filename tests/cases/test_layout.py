"""Cases of layouts and dtypes: what is read is what was written, in its own form, or it is refused or missed whole."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest
from conftest import completion, eventually, fill, payload

import kvpool
from kvpool.bindings.door import Door, class_for
from kvpool.bindings.lmcache import PoolClient

FACTS = {
    "tokens of a block": {"block_tokens": 32},
    "order of heads": {"layout": "plain/16+HND"},
    "order of layers": {"layout": "plain/16+page_first"},
    "keys and values apart": {"layout": "plain/16+split"},
    "dtype": {"dtype": "bfloat16"},
    "scales": {"extra": (("scales", "per block"),)},
    "number of ranks": {"rank": (0, 2)},
    "number of groups": {"extra": (("groups", "3"),)},
    "instruction set": {"isa": "avx512"},
}


@pytest.mark.parametrize("fact", FACTS)
def test_Y01_peers_that_differ_in_one_fact_share_nothing(pool, ns, identity, fact):
    fill(ns, ns.keys(range(320)))
    other = pool.namespace(dataclasses.replace(identity, **FACTS[fact]))
    keys = other.keys(range(320))
    assert len(other.match(keys)) == 0
    assert not other.get_into(keys, np.zeros((len(keys), 4096), np.uint8)).any()


def test_Y01_another_page_size_is_refused_when_the_pool_is_opened(pool, uri):
    with pytest.raises(kvpool.InvalidArgument, match=r"blocks of 9000 bytes; the pool .* has blocks of 4096"):
        Door(uri, opened=lambda each: class_for(each, 9000, "a page"))


SHAPES = [(4096,), (2, 2048), (2, 3, 5), (1, 7, 11, 3), (2, 2, 2, 2, 8), (1, 2, 3, 1, 5, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.int64, np.complex64])
def test_Y02_arrays_of_any_shape_come_back_as_they_were(pool, ns, shape, dtype):
    keys = ns.keys(range(48))
    made = np.arange(3 * np.prod(shape)).astype(dtype).reshape(3, *shape)
    if made[0].nbytes > 4096:
        with pytest.raises(kvpool.InvalidArgument, match="do not fit"):
            ns.put(keys, made)
        return
    assert ns.put(keys, made) == 3
    out = np.zeros_like(made)
    assert ns.get_into(keys, out).all()
    assert np.array_equal(out, made)
    with ns.match(keys) as hit:
        views = hit.views_as(dtype, shape)
    assert [(view.shape, view.dtype) for view in views] == [(shape, np.dtype(dtype))] * 3
    assert all(np.array_equal(view, each) for view, each in zip(views, made, strict=True))


def test_Y02_what_is_not_contiguous_or_too_large_is_refused(pool, ns):
    keys = ns.keys(range(32))
    wide = np.zeros((2, 64, 128), np.uint8)
    for wrong in (wide[:, :, ::2], wide.transpose(0, 2, 1), [wide[0].T, wide[1].T], np.zeros((2, 8192), np.uint8)):
        with pytest.raises(kvpool.InvalidArgument):
            ns.put(keys, wrong)
        with pytest.raises(kvpool.InvalidArgument):
            ns.get_into(keys, wrong)
    with pytest.raises(kvpool.InvalidArgument):
        pool.tensor(0, np.float32, (1025,))
    assert pool.check().blocks["live"] == 0


def test_Y03_groups_of_unlike_pages_keep_to_their_own(make_pool, identity):
    pool = make_pool(size="8MiB", block=["4KiB", "12KiB", "64KiB"])
    groups = [pool.namespace(identity, block_class=number) for number in range(3)]
    keys = groups[0].keys(range(64))
    data = [np.full((4, size), number + 1, np.uint8) for number, size in enumerate(pool.block_bytes)]
    for group, each in zip(groups[:2], data[:2], strict=True):
        assert group.put(keys, each) == 4
    assert not groups[2].contains(keys).any()  # each group has its own keys, although they are the same bytes
    assert groups[2].put(keys[:2], data[2][:2]) == 2  # a window: its last blocks only
    for group, each, count in zip(groups, data, (4, 4, 2), strict=True):
        out = np.zeros_like(each)
        assert group.get_into(keys, out).sum() == len(group.match(keys)) == count
        assert np.array_equal(out[:count], each[:count])
    before = pool.check().blocks
    with pytest.raises(kvpool.InvalidArgument, match="do not fit"):
        groups[0].put(groups[0].keys(range(7, 71)), data[1])
    assert pool.check().blocks == before
    with pytest.raises(kvpool.InvalidArgument, match="one block class"):
        pool.pin([groups[0].lookup(keys)[0], groups[1].lookup(keys)[0]])


WRONG = {
    "an older version": (8, (1).to_bytes(8, "little"), kvpool.VersionMismatch),
    "a newer version": (8, (99).to_bytes(8, "little"), kvpool.VersionMismatch),
    "another byte order": (16, None, kvpool.Corrupt),
    "nothing but zeros": (0, bytes(1 << 16), (kvpool.Foreign, kvpool.NotReady)),
    "noise": (0, np.random.default_rng(0).bytes(1 << 16), kvpool.Foreign),
    "a byte cut off": (-1, None, kvpool.Truncated),
    "a page cut off": (-4096, None, kvpool.Truncated),
    "all but a page cut off": (4096, b"", kvpool.Truncated),
}


@pytest.mark.parametrize("what", WRONG)
def test_Y04_an_image_of_another_kind_is_refused_and_not_touched(tmp_path, identity, what):
    path = tmp_path / "image"
    with kvpool.create(f"file:{path}", blocks=64, block="4KiB") as pool:
        fill(pool.namespace(identity), pool.namespace(identity).keys(range(160)))
    at, data, error = WRONG[what]
    image = bytearray(path.read_bytes())
    if "cut off" in what:
        del image[at:]
    else:
        data = image[at : at + 8][::-1] if data is None else data
        image[at : at + len(data)] = data
    path.write_bytes(image)
    before = hashlib.sha256(path.read_bytes()).digest()
    for _ in range(2):
        with pytest.raises(error):
            kvpool.open(f"file:{path}")
    assert hashlib.sha256(path.read_bytes()).digest() == before


@pytest.fixture
def ask(pool, uri):
    """One batch of LMCache's client, and what became of each of it."""
    client = PoolClient(uri, revision="1", dtype="bfloat16", chunk_tokens=256, hold_seconds=0)

    def batch(verb, *arguments):
        return completion(client, getattr(client, f"submit_batch_{verb}")(*arguments))[2]

    yield batch
    client.close()


def test_Y06_an_object_with_a_part_missing_is_missing(pool, ask):
    data, out = np.random.default_rng(6).integers(0, 256, 20000, np.uint8), np.zeros(20000, np.uint8)
    assert ask("set", ["k"], [data]) == [True]
    assert ask("get", ["k"], [out]) == [True]
    assert np.array_equal(out, data)
    out[:] = 0
    assert eventually(lambda: ask("exists", []) == [] and pool.check().pins == 0)
    assert pool.evict(1) == 1  # of five
    assert pool.check().blocks["live"] == 4
    assert ask("exists", ["k"]) == [False]
    assert ask("get", ["k"], [out]) == [False]
    assert not out.any()
    assert ask("set", ["k"], [data]) == [True]
    assert ask("get", ["k"], [out]) == [True]
    assert np.array_equal(out, data)


def test_Y06_parts_of_a_block_travel_together(pool, ns):
    """Keys and values, an index, scales, a state: rows of four arrays are one block, byte for byte."""
    rng = np.random.default_rng(6)
    sizes = {"kv": 2048, "index": 96, "scale": 7, "state": 1001}

    def memory():
        return {name: rng.integers(0, 256, (8, size), np.uint8) for name, size in sizes.items()}

    def parts(arrays):
        at, made = 0, []
        for array in arrays.values():
            made.append((array.ctypes.data, array.strides[0], array.shape[1], at))
            at += array.shape[1]
        return kvpool.Parts(made)

    one, two = memory(), memory()
    keys = ns.keys(range(64))
    assert ns.put_parts(keys, parts(one), [7, 0, 3, 2]) == 4
    ns.remove(keys[2:3])
    before = {name: array.copy() for name, array in two.items()}
    assert ns.get_into_parts(keys, parts(two), [1, 4, 5, 6]).tolist() == [True, True, False, True]
    for name in sizes:
        for row, source in ((1, 7), (4, 0), (6, 2)):
            assert np.array_equal(two[name][row], one[name][source])
        for row in (0, 2, 3, 5, 7):
            assert np.array_equal(two[name][row], before[name][row])


# ---- our own ----


@pytest.mark.parametrize("size", [1, 4031, 4032, 4033, 8064, 8065])
def test_YX1_an_object_of_another_length_is_not_taken_for_it(ask, size):
    """A loader with another idea of the length gets a miss, one byte off or many, and its buffer stays."""
    assert ask("set", ["k"], [np.full(size, 7, np.uint8)]) == [True]
    for other in {size - 1, size + 1, size + 4032} - {0}:
        out = np.full(other, 9, np.uint8)
        assert ask("get", ["k"], [out]) == [False]
        assert (out == 9).all()


def test_YX2_the_first_and_last_byte_of_every_block_are_its_own(make_pool, identity):
    """Odd block sizes lie side by side without sharing a byte, to the end of the pool."""
    pool = make_pool(blocks=None, size="2MiB", block=[4160, 6400, 16384 - 64])
    for number, size in enumerate(pool.block_bytes):
        ns, count = pool.namespace(identity, block_class=number), 24
        keys = ns.named([f"{number}/{i}" for i in range(count)])
        ns.put(keys, [np.full(size, i + 1, np.uint8) for i in range(count)])
        with ns.match(keys) as hit:
            assert len(hit) == count
            for i, view in enumerate(hit.views):
                assert view.nbytes == size
                assert (view == i + 1).all()
            numbers = np.concatenate([[view.ctypes.data, view.ctypes.data + size] for view in hit.views])
            spans = sorted(zip(numbers[::2], numbers[1::2], strict=True))
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    assert payload(b"k" * 16).size == 4096
