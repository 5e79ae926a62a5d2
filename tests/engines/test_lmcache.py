"""The client for LMCache's second level: by itself, and under LMCache's own adapter where that is installed."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from conftest import completion, eventually

import kvpool
from kvpool.bindings.lmcache import PoolClient

STATED = {"revision": "1", "dtype": "bfloat16", "chunk_tokens": 256}


@pytest.fixture
def client(pool, client_of):
    return client_of()


def put(client, keys, arrays):
    return completion(client, client.submit_batch_set(keys, arrays))


def get(client, keys, sizes):
    buffers = [np.zeros(size, np.uint8) for size in sizes]
    ok, error, each = completion(client, client.submit_batch_get(keys, buffers))
    return ok, error, each, buffers


def exists(client, keys):
    return completion(client, client.submit_batch_exists(keys))[2]


def delete(client, keys):
    return completion(client, client.submit_batch_delete(keys))[2]


def random(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


KEYS = [f"tiny@01000100@0@{i:064x}@u1" for i in range(6)]
SIZES = [1, 4031, 4032, 4033, 20000, 0]  # of blocks with 4032 bytes of an object each


def test_objects_of_any_length_come_back(client, pool):
    arrays = [random(size, i) for i, size in enumerate(SIZES)]
    assert exists(client, KEYS) == [False] * 6
    assert put(client, KEYS, arrays) == (True, "", [True] * 6)
    assert exists(client, KEYS) == [True] * 6
    assert pool.check().pins > 0  # what was found stays for a while
    ok, _, each, buffers = get(client, KEYS, SIZES)
    assert ok
    assert each == [True] * 6
    assert all(np.array_equal(a, b) for a, b in zip(arrays, buffers, strict=True))
    assert pool.check().pins == 0
    assert pool.check().blocks["live"] == 1 + 1 + 1 + 2 + 5 + 1
    assert put(client, KEYS, arrays)[0]  # again: nothing is stored twice
    assert pool.stats()["published"] == 11
    assert delete(client, [KEYS[4], "nobody"]) == [True, False]
    assert exists(client, KEYS) == [True, True, True, True, False, True]
    assert pool.check().blocks["live"] == 6


@pytest.mark.racks("sim-2")
def test_another_host_finds_what_one_has_stored(pool, client_of, rack):
    here, there = client_of(host=pool.host), client_of(host=rack.next_host())
    assert put(here, KEYS[:2], [random(20000), random(100)])[0]
    assert exists(there, KEYS[:3]) == [True, True, False]
    ok, _, _, buffers = get(there, KEYS[:2], [20000, 100])
    assert ok
    assert np.array_equal(buffers[0], random(20000))
    assert delete(there, KEYS[:1]) == [True]
    assert exists(there, KEYS[:2]) == [False, True]


def test_views_as_lmcache_hands_them_in(client):
    """Its buffers are views of ctypes arrays, whose format is '<B'."""
    source, target = (ctypes.c_ubyte * 5000)(*([7] * 5000)), (ctypes.c_ubyte * 5000)()
    assert memoryview(source).format == "<B"
    assert put(client, KEYS[:1], [memoryview(source)])[0]
    assert completion(client, client.submit_batch_get(KEYS[:1], [memoryview(target)]))[0]
    assert bytes(target) == bytes(source)


def test_another_length_is_a_miss_and_not_overwritten(client):
    assert put(client, KEYS[:1], [random(9000)])[0]
    ok, error, each, buffers = get(client, KEYS[:1], [8000])
    assert not ok
    assert "1 of 1" in error
    assert each == [False]
    assert not buffers[0].any()
    assert put(client, KEYS[:1], [random(8000)]) == (False, "1 of 1 not stored", [False])
    assert np.array_equal(get(client, KEYS[:1], [9000])[3][0], random(9000))


def test_a_part_that_is_missing_makes_the_object_a_miss(client, pool):
    assert put(client, KEYS[:1], [random(20000)])[0]
    namespace = pool.namespace(client.identity)
    assert namespace.remove(namespace.named([f"{KEYS[0]}\n20000\n{4032 * 3}"])) == 1
    assert exists(client, KEYS[:1]) == [False]
    assert get(client, KEYS[:1], [20000])[2] == [False]
    assert put(client, KEYS[:1], [random(20000)])[0]
    assert np.array_equal(get(client, KEYS[:1], [20000])[3][0], random(20000))


@pytest.mark.parametrize(
    "other",
    [{"revision": "2"}, {"dtype": "float16"}, {"chunk_tokens": 128}, {"tenant": "b"}, {"hash_algorithm": "x"}],
    ids=str,
)
def test_another_identity_is_a_miss(client, client_of, other):
    assert put(client, KEYS[:1], [random(100)])[0]
    assert exists(client_of(**other), KEYS[:1]) == [False]
    assert exists(client_of(), KEYS[:1]) == [True]


@pytest.mark.parametrize(
    "wrong", [{"revision": ""}, {"dtype": None}, {"chunk_tokens": 0}, {"chunk_tokens": "256"}, {"threads": 0}], ids=str
)
def test_what_is_not_stated_is_refused(pool, client_of, wrong):
    with pytest.raises(kvpool.InvalidArgument):
        client_of(**wrong)


def test_a_wrong_pool_is_refused_at_start(pool, client_of):
    with pytest.raises(kvpool.NotFound):
        PoolClient("shm:nobody-has-this", **STATED)
    with pytest.raises(kvpool.OutOfRange):
        client_of(block_class=3)
    with pytest.raises(TypeError):
        PoolClient(pool.uri)


def test_what_was_found_is_not_evicted_until_it_is_read(client, pool):
    assert put(client, KEYS[:2], [random(9000), random(9000, 1)])[0]
    assert exists(client, KEYS[:1]) == [True]
    pool.evict(64)
    assert exists(client, KEYS[:2]) == [True, False]
    assert np.array_equal(get(client, KEYS[:1], [9000])[3][0], random(9000))
    pool.evict(64)
    assert exists(client, KEYS[:1]) == [False]


def test_what_nobody_reads_is_let_go(client_of, pool):
    client = client_of(hold_seconds=0)
    assert put(client, KEYS[:1], [random(9000)])[0]
    assert exists(client, KEYS[:1]) == [True]
    client.drain_completions()
    assert eventually(lambda: pool.check().pins == 0)


def test_a_full_pool_is_told_and_misses_go_on(client, pool, identity):
    everything = pool.namespace(identity).reserve(pool.info["classes"][0]["blocks"] - 2)
    assert put(client, KEYS[:2], [random(4000), random(20000)]) == (False, "1 of 2 not stored", [True, False])
    assert client.door.misses == {"PoolFull": 1}
    everything.withdraw()
    assert put(client, KEYS[:2], [random(4000), random(20000)])[0]


def test_a_pool_that_is_made_anew_is_opened_again(client, pool, uri, make_pool, monkeypatch):
    monkeypatch.setattr("kvpool.bindings.door.REOPEN_S", 0)
    assert put(client, KEYS[:1], [random(9000)])[0]
    assert exists(client, KEYS[:1]) == [True]
    kvpool.remove(uri, force=True)
    assert exists(client, KEYS[:1]) == [False]
    assert put(client, KEYS[:1], [random(9000)])[0] is False
    pool.close()
    make_pool()
    assert exists(client, KEYS[:1]) == [False]
    assert put(client, KEYS[:1], [random(9000)])[0]
    assert np.array_equal(get(client, KEYS[:1], [9000])[3][0], random(9000))
    assert client.door.misses["Replaced"] == 1


def test_batches_that_cannot_be_are_completed_too(client):
    number = client.submit_batch_set(KEYS[:2], [random(10)])
    ok, error, each = completion(client, number)
    assert not ok
    assert "InvalidArgument" in error
    assert each == [False, False]
    with pytest.raises(kvpool.InvalidArgument, match="contiguous"):
        client.submit_batch_get(KEYS[:1], ["text"])


def test_many_batches_at_once(client):
    """Each is completed once, whatever the order."""
    arrays = {f"k{i}": random(5000, i) for i in range(8)}
    numbers = [client.submit_batch_set([key], [data]) for key, data in arrays.items()]
    numbers += [client.submit_batch_exists(list(arrays)) for _ in range(20)]
    done = []

    def drained():
        done.extend(client.drain_completions())
        return len(done) == len(numbers)

    assert eventually(drained, 20)
    assert sorted(each[0] for each in done) == numbers
    assert exists(client, list(arrays)) == [True] * 8


def test_close_ends_everything(client, pool):
    put(client, KEYS[:1], [random(9000)])
    exists(client, KEYS[:1])
    client.close()
    client.close()
    assert pool.check().pins == 0
    with pytest.raises(kvpool.Closed):
        client.submit_batch_exists(KEYS)


def test_a_writer_that_is_killed_leaves_whole_objects_or_none(pool, client_of, uri):
    program = """
        import sys, numpy as np, time
        from kvpool.bindings.lmcache import PoolClient
        client = PoolClient(sys.argv[1], revision="1", dtype="bfloat16", chunk_tokens=256)
        print(flush=True)
        for i in range(10**6):
            client.submit_batch_set([f"k{i % 12}"], [np.full(20000, i % 12, np.uint8)])
            client.submit_batch_delete([f"k{(i + 6) % 12}"])
            time.sleep(0.001)
    """
    for delay in (0.02, 0.11, 0.23):
        child = subprocess.Popen([sys.executable, "-P", "-c", textwrap.dedent(program), uri], stdout=subprocess.PIPE)
        child.stdout.readline()
        select.select([], [], [], delay)
        child.kill()
        child.wait()
        child.stdout.close()
        client = client_of()
        keys = [f"k{i}" for i in range(12)]
        _, _, each, buffers = get(client, keys, [20000] * 12)
        for i, (there, data) in enumerate(zip(each, buffers, strict=True)):
            assert (data == (i if there else 0)).all()
        assert eventually(lambda: pool.check().clean and pool.check().blocks["reserved"] == 0)


# ---- under LMCache ----


@pytest.fixture
def adapter(pool, uri, monkeypatch):
    """LMCache's own adapter around the client, made by its registry from its configuration."""
    monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    pytest.importorskip("lmcache", reason="lmcache is not installed")
    pytest.importorskip("lmcache.v1.memory_management", reason="lmcache cannot be imported here", exc_type=ImportError)
    from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
    from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry

    config = get_l2_adapter_config_class("native_plugin").from_dict(
        {
            "type": "native_plugin",
            "module_path": "kvpool.bindings.lmcache",
            "class_name": "PoolClient",
            "adapter_params": {"uri": uri, **STATED},
        }
    )
    made = create_l2_adapter_from_registry(config)
    yield made
    made.close()


def chunk_of(fill):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    shape = torch.Size([2, 2, 16, 64])
    raw = torch.full((shape.numel() * 2,), fill, dtype=torch.uint8)
    told = MemoryObjMetadata(
        shape, torch.bfloat16, 0, raw.numel(), 1, 0, MemoryFormat.KV_2LTD, None, [shape], [torch.bfloat16]
    )
    return TensorMemoryObj(raw, told, None), raw


def test_lmcaches_adapter_stores_looks_up_loads_and_deletes(adapter, pool):
    from lmcache.v1.distributed.api import ObjectKey

    def wait(descriptor):
        assert select.select([descriptor], [], [], 20)[0]
        os.eventfd_read(descriptor)

    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    keys = [ObjectKey(bytes([i]) * 32, "tiny", rank, object_group_id=0, cache_salt="u1") for i in range(3)]
    sources = [chunk_of(i + 1) for i in range(2)]  # which own the memory
    task = adapter.submit_store_task(keys[:2], [chunk for chunk, _ in sources])
    wait(adapter.get_store_event_fd())
    assert adapter.pop_completed_store_tasks()[task].is_successful()
    task = adapter.submit_lookup_and_lock_task(keys, {})
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert [found.test(i) for i in range(3)] == [True, True, False]
    assert pool.evict(64) == 0  # locked
    targets = [chunk_of(0) for _ in range(2)]
    task = adapter.submit_load_task(keys[:2], [chunk for chunk, _ in targets])
    wait(adapter.get_load_event_fd())
    loaded = adapter.query_load_result(task)
    assert [loaded.test(i) for i in range(2)] == [True, True]
    assert [raw.unique().tolist() for _, raw in targets] == [[1], [2]]
    adapter.submit_unlock(keys[:2])
    assert adapter.get_usage().total_bytes_used == 2 * 8192
    adapter.delete(keys[:1])
    assert adapter.get_usage().total_bytes_used == 8192
    task = adapter.submit_lookup_and_lock_task(keys, {})
    wait(adapter.get_lookup_and_lock_event_fd())
    found = adapter.query_lookup_and_lock_result(task)
    assert [found.test(i) for i in range(3)] == [False, True, False]
