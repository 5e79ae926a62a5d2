"""Cases of wrong calls: each gets one clear error, or does truly nothing; never a crash, a guess, or half of it."""

from __future__ import annotations

import logging
import os
import threading

import numpy as np
import pytest
from conftest import eventually, fill, payload, said

import kvpool
from kvpool.bindings.lmcache import PoolClient

STATED = {"model": "m", "revision": "1", "dtype": "float16", "layout": "plain/16"}


def counted(pool):
    """What must not move when nothing was done."""
    report = pool.check()
    return report, {name: pool.stats()[name] for name in ("published", "removed", "evicted", "pinned", "full", "hits")}


def calls(pool, ns, keys, new):
    out = np.zeros((len(keys), 4096), np.uint8)
    return {
        "match": lambda: ns.match(keys),
        "lookup": lambda: ns.lookup(keys),
        "contains": lambda: ns.contains(keys),
        "get_into": lambda: ns.get_into(keys, out),
        "put": lambda: ns.put(keys, out),
        "reserve": lambda: ns.reserve(keys),
        "touch": lambda: ns.touch(keys),
        "remove": lambda: ns.remove(keys),
        "publish": lambda: new.publish(),
        "pin": lambda: pool.pin([1]),
        "evict": lambda: pool.evict(1),
        "stats": lambda: pool.stats(),
        "check": lambda: pool.check(),
        "events": lambda: pool.events().poll(),
        "take": lambda: pool.stock().take(1),
    }


def test_A01_after_close_and_after_fork_each_call_says_so(uri, rack, identity, caplog):
    pool = rack.create_alone(uri, blocks=64)
    ns = pool.namespace(identity)
    keys = ns.keys(range(160))
    fill(ns, keys)
    new = ns.reserve(ns.keys(range(7, 39)))
    child = os.fork()
    if child == 0:
        wrong = []
        for name, call in calls(pool, ns, keys, new).items():
            try:
                call()
                wrong.append(name)
            except kvpool.Forked:
                pass
            except BaseException as error:
                wrong.append(f"{name}: {error!r}")
        os.write(2, " ".join(wrong).encode())
        os._exit(len(wrong))
    assert os.waitpid(child, 0)[1] == 0
    pool.close()
    for _ in range(100):
        for name, call in calls(pool, ns, keys, new).items():
            with pytest.raises(kvpool.Closed):
                call()
                pytest.fail(name)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_A01_before_there_is_a_pool(uri):
    with pytest.raises(kvpool.NotFound):
        kvpool.open(uri)
    with pytest.raises(kvpool.NotFound):
        kvpool.remove(uri)
    with pytest.raises(kvpool.NotFound):
        PoolClient(uri, revision="1", dtype="bfloat16", chunk_tokens=256)


def test_A01_closed_by_another_thread_in_the_middle(uri, rack, identity):
    for _ in range(20):
        pool = rack.create_alone(uri, blocks=64)
        ns, told = pool.namespace(identity), []

        def work(ns=ns, told=told):
            keys, data = ns.keys(range(160)), np.ones((10, 4096), np.uint8)
            try:
                while True:
                    ns.put(keys, data)
                    ns.get_into(keys, data)
                    ns.remove(keys)
            except kvpool.Error as error:
                told.append(type(error))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        pool.close()
        for thread in threads:
            thread.join(30)
        assert told == [kvpool.Closed] * 4
        kvpool.remove(uri, force=True)


def test_A02_a_second_value_of_a_key_is_told_not_stored(pool, ns, identity, rack, uri):
    key = ns.keys(range(16))
    old, new = np.full((1, 4096), 1, np.uint8), np.full((1, 4096), 2, np.uint8)
    assert ns.put(key, old) == 1
    assert ns.put(key, new) == 0  # told: it was there
    with ns.reserve(key) as second:
        second.views[0][:] = 2
        assert second.publish() == 0
        assert second.refs[0] == 0
    out = np.zeros((1, 4096), np.uint8)
    assert ns.get_into(key, out).all()
    assert (out == 1).all()
    with ns.match(key) as hit:
        assert ns.remove(key) == 1
        assert ns.put(key, new) == 1  # replaced, in two steps
        assert (hit.views[0] == 1).all()
    assert ns.get_into(key, out).all()
    assert (out == 2).all()


def test_A04_each_of_a_batch_has_its_own_answer(ns):
    keys = ns.keys(range(16 * 5))
    fill(ns, keys)
    ns.remove(keys[1:2])
    ns.remove(keys[3:4])
    out = np.full((5, 4096), 7, np.uint8)
    assert ns.get_into(keys, out).tolist() == [True, False, True, False, True]
    for i, key in enumerate(keys):
        assert np.array_equal(out[i], payload(key)) if i % 2 == 0 else (out[i] == 7).all()


@pytest.mark.parametrize("wrong", [[b"", b""], [b"x", b""], [b"x"], [b"x" * 4097] * 2, [b"x", None]], ids=repr)
def test_A04_buffers_of_no_or_of_unlike_length_are_refused_whole(pool, ns, wrong):
    keys = ns.keys(range(32))
    before = counted(pool)
    with pytest.raises(kvpool.InvalidArgument):
        ns.put(keys, wrong)
    with pytest.raises(kvpool.InvalidArgument):
        ns.get_into(keys, [bytearray(each) if each else each for each in wrong])
    assert counted(pool) == before


def test_A05_asking_protects_nothing_and_removing_twice_is_no_error(make_pool, identity):
    pool = make_pool(blocks=8)
    ns = pool.namespace(identity)
    keys = ns.keys(range(16))
    fill(ns, keys)
    for _ in range(1000):
        assert ns.contains(keys).all()
        assert ns.lookup(keys).all()
    assert pool.check().pins == 0
    hit = ns.match(keys)
    assert ns.remove(keys) == 1  # a reader does not keep it from going
    assert ns.remove(keys) == 0  # gone already: no error
    assert np.array_equal(hit.views[0], payload(keys[0]))  # and the reader is safe
    hit.release()
    fill(ns, keys)
    for _ in range(100):
        ns.lookup(keys)
    assert pool.evict(8) >= 1
    assert not ns.contains(keys).any()


NUMBERS = ["7", 1.5, float("nan"), None, b"7", [7]]
SIZES = ["10XB", "", "ten", 10.5, -1, 0, 1 << 63, float("nan"), None, True, b"10", [10]]


@pytest.mark.parametrize("size", SIZES, ids=repr)
def test_A06_sizes_that_are_none(uri, size):
    for call in (lambda: kvpool.parse_size(size), lambda: kvpool.create(uri, size)):
        with pytest.raises(kvpool.InvalidArgument):
            call()
    for option, values in {"workers": NUMBERS, "hosts": NUMBERS, "quota": NUMBERS, "blocks": NUMBERS[:4]}.items():
        for value in values:
            with pytest.raises(kvpool.InvalidArgument):
                kvpool.create(uri, None if option == "blocks" else "1MiB", **{option: value})
                pytest.fail(f"{option}={value!r}")


def test_A06_sizes_in_every_form():
    assert [kvpool.parse_size(each) for each in ("10", 10, "10B", "1KiB", "10GB", "1.5G")] == [
        10,
        10,
        10,
        1024,
        10**10,
        3 << 29,
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease": "3"},
        {"lease": float("nan")},
        {"lease": -1},
        {"lease": float("inf")},
        {"threads": "2"},
        {"threads": -1},
        {"threads": 0.5},
        {"progress": 5},
        {"block": None},
        {"block": 4096.0},
        {"policy": None},
        {"mode": "none"},
    ],
    ids=repr,
)
def test_A06_options_of_the_wrong_kind_name_themselves(uri, wrong):
    with pytest.raises(kvpool.InvalidArgument) as caught:
        kvpool.create(uri, **{"size": "1MiB", "block": "4KiB", **wrong})
    (value,) = wrong.values()
    assert str(value) in str(caught.value)
    with pytest.raises(TypeError, match="color"):
        kvpool.create(uri, "1MiB", color="red")


def test_A06_a_string_is_no_list_of_letters(pool, ns, uri):
    before = counted(pool)
    for wrong in (
        "abcd",
        b"abcd",
        bytearray(b"abcd"),
        memoryview(b"abcd"),
        5,
        None,
        [5],
        [None],
        [[b"a"]],
        [""],
        [b""],
    ):
        with pytest.raises(kvpool.InvalidArgument):
            ns.named(wrong)
    for wrong in ("x" * 16, ["x" * 16], [16], [None], 5, None, [b"x" * 15], True):
        for call in (ns.match, ns.lookup, ns.contains, ns.touch, ns.remove):
            with pytest.raises(kvpool.InvalidArgument):
                call(wrong)
                pytest.fail(f"{call.__name__}({wrong!r})")
    client = PoolClient(uri, revision="1", dtype="bfloat16", chunk_tokens=256)
    for call in (client.submit_batch_exists, client.submit_batch_delete):
        with pytest.raises(kvpool.InvalidArgument, match="one key"):
            call("model@1@0@hash")
    client.close()
    assert counted(pool)[0] == before[0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"adapter": 0},
        {"adapter": b"a"},
        {"isa": ["avx512"]},
        {"rank": 1},
        {"rank": (0.0, 1)},
        {"rank": (False, True)},
        {"rank": ("0", "1")},
        {"block_tokens": 16.0},
        {"block_tokens": "16"},
        {"block_tokens": True},
        {"extra": {"rope": "yarn"}},
        {"extra": "rope"},
        {"extra": [("rope", None)]},
        {"extra": [("rope", 1)]},
        {"extra": [("rope",)]},
    ],
    ids=repr,
)
def test_A06_an_identity_of_the_wrong_kind(wrong):
    with pytest.raises(kvpool.InvalidArgument, match=next(iter(wrong))):
        kvpool.Identity(**{**STATED, **wrong})


def test_A06_numbers_are_not_rounded(pool, ns):
    keys = ns.keys(range(32))
    fill(ns, keys)
    hit, stock = ns.match(keys), pool.stock()
    wrong = [
        lambda: pool.pin([float(hit.refs[0])]),
        lambda: pool.pin(hit.refs.astype(np.float64)),
        lambda: pool.pin("12"),
        lambda: pool.evict(1.5),
        lambda: pool.evict("1"),
        lambda: pool.namespace(ns.identity, "", "0"),
        lambda: pool.namespace(ns.identity, 5),
        lambda: pool.namespace("model"),
        lambda: ns.reserve(keys, timeout="1"),
        lambda: stock.take(1.5),
        lambda: stock.give([0.5]),
        lambda: stock.release("0"),
        lambda: kvpool.Parts([(1, 2, 3, 4.5)]),
        lambda: kvpool.Parts("parts"),
        lambda: ns.put_parts(keys, kvpool.Parts([(1, 2, 3, 4)]), [0.5, 1.5]),
        lambda: kvpool.open(pool.uri, host=0.5),
        lambda: ns.keys(range(16), after=keys.array),
    ]
    full = ns.reserve(ns.keys(range(7, 7 + 62 * 16)))
    for number, call in enumerate(wrong):
        with pytest.raises(kvpool.InvalidArgument):
            call()
            pytest.fail(str(number))
    full.withdraw()
    assert pool.check().pins == 2


BACKENDS = ["posix:x", "redis:x", "cuda:0", "SHM:x", "shm", "", "sim", "dax:0", "hugetlb:3MiB", "?", "x" * 5000, "é:é"]


@pytest.mark.parametrize("uri", BACKENDS)
def test_A07_a_kind_of_memory_that_there_is_not(uri):
    for call in (lambda: kvpool.create(uri, "1MiB"), lambda: kvpool.open(uri), lambda: kvpool.remove(uri)):
        with pytest.raises(kvpool.InvalidArgument):
            call()


def test_A07_the_kinds_are_named_in_the_refusal():
    with pytest.raises(kvpool.InvalidArgument, match=r"shm:.*file:.*memfd:.*hugetlb:.*dax:"):
        kvpool.open("redis:x")


def test_A08_empty_batches_do_nothing(pool, ns):
    before, events = counted(pool), pool.events()
    events.poll()
    for empty in ([], (), b"", ns.keys([]), ns.named([])):
        assert len(ns.match(empty)) == 0
        assert ns.lookup(empty).tolist() == ns.contains(empty).tolist() == []
        assert ns.touch(empty) == ns.remove(empty) == ns.put(empty, []) == 0
        assert ns.get_into(empty, []).tolist() == []
        with ns.reserve(empty) as new:
            assert new.publish() == 0
    assert len(pool.pin([])) == pool.evict(0) == 0
    assert counted(pool) == before
    assert events.poll() == []


def test_A08_more_blocks_than_numbers_reach_is_no_wait_and_no_memory(pool, ns):
    """A list of four thousand million blocks was made before anybody looked how many there are."""
    for many in (65, 1 << 20, 0xFFFFFFFF):
        with pytest.raises(kvpool.PoolFull, match=f"{many} blocks"):
            ns.reserve(many)
        with pytest.raises(kvpool.PoolFull):
            pool.stock().take(many)
    with pytest.raises(kvpool.InvalidArgument):
        ns.reserve(1 << 40)
    assert pool.check().blocks["free"] == 64


# ---- our own ----


def test_AX1_a_time_that_is_no_number_is_no_endless_wait(pool, ns):
    """NaN is neither over nor to come: a deadline of it never passes."""
    full = ns.reserve(64)
    for wrong in (float("nan"), "1", True, [1]):
        with pytest.raises(kvpool.InvalidArgument, match="timeout"):
            ns.reserve(ns.keys(range(16)), timeout=wrong)
    for none in (0, -1, -1e9):
        with pytest.raises(kvpool.PoolFull):
            ns.reserve(ns.keys(range(16)), timeout=none)
    full.withdraw()


def test_AX2_a_handle_is_not_sent_to_another_process_by_accident(pool, ns, uri, start):
    """What is bound to a process refuses to be pickled; what travels (uri, keys, references, identity) does."""
    import pickle

    keys = ns.keys(range(160))
    fill(ns, keys)
    with ns.match(keys) as hit:
        for bound in (pool, ns, hit, pool.stock()):
            with pytest.raises(TypeError):
                pickle.dumps(bound)
        sent = pickle.dumps((pool.uri, ns.identity, bytes(keys.array), hit.refs.tolist()))
        body = """
            import pickle
            uri, identity, keys, refs = pickle.loads(bytes.fromhex(sys.argv[1]))
            pool = kvpool.open(uri); ns = pool.namespace(identity)
            say(ns.lookup(keys).tolist() == refs, len(pool.pin(refs)))
        """
        assert said(start(body, sent.hex())).split() == ["True", "10"]
    assert eventually(lambda: pool.check().pins == 0)
