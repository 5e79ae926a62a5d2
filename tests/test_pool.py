"""The public API on one pool, in one process and over several."""

import gc
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from conftest import eventually, fill, payload

import kvpool

pytestmark = pytest.mark.racks("sim-1", "sim-2", "sim-4")


def test_publish_then_match_gives_the_bytes(ns):
    keys = ns.keys(range(160))
    assert not ns.match(keys)
    assert fill(ns, keys) == 10
    with ns.match(keys) as hit:
        assert len(hit) == 10
        assert all(np.array_equal(view, payload(key)) for key, view in zip(keys, hit.views, strict=True))


def test_match_is_the_longest_prefix(ns):
    keys = ns.keys(range(320))
    fill(ns, keys[:7])
    fill(ns, keys[9:])
    with ns.match(keys) as hit:
        assert len(hit) == 7
    assert ns.contains(keys).tolist() == [True] * 7 + [False] * 2 + [True] * 11


def test_waiting_ends_with_the_last_key_or_with_the_time(ns):
    keys = ns.keys(range(160))
    fill(ns, keys[:7])
    assert ns.wait(keys, 0) == ns.wait(keys, 0.02) == 7
    late = threading.Timer(0.1, fill, (ns, keys[7:]))
    late.start()
    assert ns.wait(keys, 60) == ns.wait(keys, 0) == 10
    late.join()
    assert ns.wait([], 0) == 0


def test_a_publication_of_another_process_wakes_who_waits(ns, identity, uri, rack, python):
    keys = ns.keys(range(160))
    program = """
        import sys, kvpool
        from kvpool import Identity
        with kvpool.open(sys.argv[1], host=int(sys.argv[3])) as pool:
            ns = pool.namespace(eval(sys.argv[2]))
            with ns.reserve(ns.keys(range(160))) as new:
                new.publish()
    """
    other = threading.Timer(0.05, python, (program, uri, repr(identity), rack.next_host()))
    other.start()
    assert ns.wait(keys, 60) == 10
    other.join()


def test_blocks_may_get_their_keys_at_the_end(ns):
    keys = ns.named(["some", "names"])
    with ns.reserve(2) as new:
        for key, view in zip(keys, new.views, strict=True):
            view[:] = payload(key)
        for wrong in (None, keys[:1], []):
            with pytest.raises(kvpool.InvalidArgument, match="one key per block"):
                new.publish(wrong)
        assert new.publish(keys) == 2
    with ns.match(keys) as hit:
        assert [bytes(view) for view in hit.views] == [bytes(payload(key)) for key in keys]
    with ns.reserve(0) as new:
        assert new.publish() == 0
    with pytest.raises(kvpool.InvalidArgument):
        ns.reserve(-1)


def test_what_is_published_pinned_stays(pool, ns, identity, rack, uri):
    keys = ns.keys(range(16 * 8))
    with ns.reserve(keys) as new:
        for key, view in zip(keys, new.views, strict=True):
            view[:] = payload(key)
        hit = new.publish_pinned()
    assert len(hit) == 8
    assert np.array_equal(hit.refs, ns.lookup(keys))
    with rack.open(uri) as other:
        assert other.evict(64) == 0
    assert pool.evict(64) == 0
    assert [bytes(view) for view in hit.views] == [bytes(payload(key)) for key in keys]
    hit.release()
    assert pool.evict(64) == 8
    assert rack.report().pins == 0


def test_a_block_that_lost_is_not_pinned(pool, ns, rack):
    keys = ns.keys(range(32))
    with ns.reserve(keys) as new:
        fill(ns, keys[:1])
        new.views[0][:] = 7
        hit = new.publish_pinned()
        assert new.is_open
        pool.evict(64)
        fill(ns, ns.keys(range(1000, 1000 + 16 * 62)))
        assert (pool.tensor()[new.blocks[0]] == 7).all()  # still ours
        with pytest.raises(kvpool.OutOfRange):
            new.publish()
    assert hit.refs[0] == 0
    assert hit.refs[1] != 0
    assert hit.blocks[0] == 0xFFFFFFFF
    with pytest.raises(IndexError, match="not pinned"):
        hit.views  # noqa: B018
    assert rack.report().pins == 1
    hit.release()


def test_no_pins_for_a_publication(make_pool, identity):
    pool = make_pool(blocks=4096)
    ns = pool.namespace(identity)
    slots = pool.info["pin_slots"]
    assert slots < 4096
    with ns.reserve(ns.keys(range(16 * (slots + 1)))) as new:
        with pytest.raises(kvpool.NoPins):
            new.publish_pinned()
        assert new.is_open
        assert not ns.contains(new.keys and ns.keys(range(16))).any()
        assert new.publish() == slots + 1
    assert pool.check().pins == 0


def test_nobody_evicts_what_is_being_published_pinned(make_pool, identity, uri):
    """Another process takes and scribbles over all it can, all the time; what is published pinned keeps its bytes."""
    pool = make_pool(blocks=32)
    ns = pool.namespace(identity)
    program = """
        import sys, kvpool
        with kvpool.open(sys.argv[1]) as pool:
            ns = pool.namespace(kvpool.Identity(model="x", revision="1", dtype="x", layout="x"))
            print(flush=True)
            while True:
                pool.evict(32)
                for count in (20, 4):
                    try:
                        with ns.reserve(count, timeout=0) as new:
                            for view in new.views:
                                view[:] = 255
                    except kvpool.PoolFull:
                        pass
    """
    child = subprocess.Popen([sys.executable, "-P", "-c", textwrap.dedent(program), uri], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        for turn in range(1000):
            keys = ns.named([f"{turn}/{i}" for i in range(4)])
            with ns.reserve(4) as new:
                for view in new.views_as(np.uint64):
                    view[:] = turn
                with new.publish_pinned(keys) as hit:
                    pool.check()  # takes a while
                    assert all((view == turn).all() for view in hit.views_as(np.uint64))
                    # while the other has one locked it is a miss
                    assert eventually(lambda keys=keys, hit=hit: np.array_equal(ns.lookup(keys), hit.refs))
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_nothing_is_visible_before_publish(ns):
    keys = ns.keys(range(160))
    with ns.reserve(keys) as new:
        new.views[0][:] = 1
        assert not ns.contains(keys).any()
        new.publish()
        assert ns.contains(keys).all()


def test_a_body_that_raises_withdraws(pool, ns):
    keys = ns.keys(range(160))
    with pytest.raises(ZeroDivisionError), ns.reserve(keys):
        1 / 0  # noqa: B018
    assert not ns.contains(keys).any()
    assert pool.check().blocks["reserved"] == 0


def test_a_body_that_forgets_withdraws(pool, ns):
    with ns.reserve(ns.keys(range(160))) as new:
        pass
    assert not new.is_open
    assert pool.check().blocks["reserved"] == 0


def test_the_first_whole_block_wins(ns):
    keys = ns.keys(range(160))
    with ns.reserve(keys) as mine, ns.reserve(keys[:4]) as other:
        for view in other.views:
            view[:] = 7
        assert other.publish() == 4
        assert mine.publish() == 6
        assert mine.refs[:4].tolist() == [0] * 4
    with ns.match(keys) as hit:
        assert [int(view[0]) for view in hit.views[:4]] == [7] * 4


def test_tensor_is_the_blocks(pool, ns, rack):
    keys = ns.keys(range(160))
    fill(ns, keys)
    rows = pool.tensor(0)
    assert rows.shape == (rack.whole(64), 4096)
    assert not rows.flags.writeable
    with ns.match(keys) as hit:
        assert np.array_equal(rows[hit.blocks[3]], payload(keys[3]))
        assert all(np.shares_memory(rows, view) for view in hit.views)
        floats = pool.tensor(0, np.float32, (4, 8, 32))
        assert floats.shape == (rack.whole(64), 4, 8, 32)
        assert floats[hit.blocks[3]].tobytes() == payload(keys[3]).tobytes()


def test_views_in_every_form(ns):
    keys = ns.keys(range(16))
    with ns.reserve(keys) as new:
        assert np.from_dlpack(new.views[0]).shape == (4096,)
        memoryview(new.views[0])[:4] = b"abcd"
        new.publish()
    with ns.match(keys) as hit:
        assert bytes(memoryview(hit.views[0])[:4]) == b"abcd"
        assert hit.views_as(np.uint32, (2, 3))[0].shape == (2, 3)


def test_torch_views_share_the_memory(pool, ns):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    keys = ns.keys(range(16))
    fill(ns, keys)
    with ns.match(keys) as hit:
        tensor = pool.torch(0)
        assert torch.equal(tensor[int(hit.blocks[0])], torch.from_numpy(payload(keys[0])))


def test_published_views_become_read_only(ns):
    with ns.reserve(ns.keys(range(16))) as new:
        view = new.views[0]
        new.publish()
    with pytest.raises(ValueError, match="read-only"):
        view[:] = 1
    with pytest.raises(kvpool.Closed, match="write-once"):
        _ = new.views


def test_put_and_get_into(ns):
    keys = ns.keys(range(160))
    data = np.stack([payload(key) for key in keys])
    assert ns.put(keys, data) == 10
    assert ns.put(keys, data) == 0
    out = np.zeros_like(data)
    assert ns.get_into(keys, out).all()
    assert np.array_equal(out, data)
    other = ns.keys(range(1, 161))
    before = out.copy()
    assert not ns.get_into(other, out).any()
    assert np.array_equal(out, before)


def test_put_and_get_parts_of_a_block(ns):
    keys = ns.keys(range(32))
    assert ns.put(keys, [b"x" * 100, b"y" * 100]) == 2
    out = [bytearray(10), bytearray(10)]
    assert ns.get_into(keys, out).all()
    assert out == [b"x" * 10, b"y" * 10]


def test_blocks_of_many_parts(make_pool, identity):
    """As an engine has them: two layers, blocks 3 rows apart in one and padded in the other."""
    ns = make_pool(block="8KiB", blocks=100).namespace(identity)
    keys = ns.keys(range(100 * 16))
    first, second = np.arange(300 * 512, dtype=np.uint16).reshape(300, 512), np.zeros((100, 5000), np.uint8)
    second[:] = np.arange(100, dtype=np.uint8)[:, None]
    where = [(first.ctypes.data, 3 * 1024, 1024, 64), (second.ctypes.data + 8, 5000, 4100, 1088)]
    rows = np.arange(100)[::-1]
    assert ns.put_parts(keys, kvpool.Parts(where), rows) == 100
    assert ns.put_parts(keys, kvpool.Parts(where), rows) == 0
    block = np.zeros(5188, np.uint8)
    assert ns.get_into(keys[:1], [block]).all()
    assert np.array_equal(block[64:1088].view(np.uint16), first[99 * 3])
    assert (block[1088:] == 99).all()
    to, into = np.zeros_like(first), np.zeros_like(second)
    where = [(to.ctypes.data, 3 * 1024, 1024, 64), (into.ctypes.data + 8, 5000, 4100, 1088)]
    assert ns.get_into_parts(keys, kvpool.Parts(where), rows).all()
    assert np.array_equal(to[::3], first[::3])
    assert not to[1::3].any()
    assert np.array_equal(into[:, 8:4108], second[:, 8:4108])
    assert not into[:, 4108:].any()
    assert not ns.get_into_parts(ns.keys(range(5, 21)), kvpool.Parts(where), [3]).any()


@pytest.mark.parametrize(
    ("where", "reason"),
    [([], "parts are"), ([(0, 0, 0, 0)], "at least one byte"), ([(-1, 0, 8, 0)], "none negative")],
)
def test_parts_that_are_none(where, reason):
    with pytest.raises(kvpool.InvalidArgument, match=reason):
        kvpool.Parts(where)


def test_parts_that_do_not_fit(ns):
    keys, buffer = ns.keys(range(16)), bytearray(8192)
    address = np.frombuffer(buffer, np.uint8).ctypes.data
    size = ns.pool.block_bytes[0]
    for at, length in ((size - 63, 64), (2**64 - 64, 64)):
        with pytest.raises(kvpool.InvalidArgument, match=r"do not fit|beyond any"):
            ns.put_parts(keys, kvpool.Parts([(address, 0, length, at)]), [0])
        with pytest.raises(kvpool.InvalidArgument, match=r"do not fit|beyond any"):
            ns.get_into_parts(keys, kvpool.Parts([(address, 0, length, at)]), [0])
    with pytest.raises(kvpool.InvalidArgument, match="one row per key"):
        ns.put_parts(keys, kvpool.Parts([(address, 0, 64, 0)]), [0, 1])
    with pytest.raises(kvpool.InvalidArgument, match="rows are numbers"):
        ns.put_parts(keys, kvpool.Parts([(address, 0, 64, 0)]), [-1])
    assert not ns.contains(keys).any()


def test_a_full_pool_evicts_the_oldest(make_pool, identity):
    ns = make_pool(policy="lru").namespace(identity)
    chains = [ns.keys(range(start, start + 160)) for start in range(0, 70000, 1000)]
    for keys in chains:
        fill(ns, keys)
    present = [bool(ns.contains(keys).all()) for keys in chains]
    assert present == [False] * 64 + [True] * 6


def test_leaf_evicts_the_tail_first(make_pool, identity):
    pool = make_pool(policy="leaf", blocks=10)
    ns = pool.namespace(identity)
    keys = ns.keys(range(160))
    fill(ns, keys)
    pool.evict(3)
    assert ns.contains(keys).tolist() == [True] * 7 + [False] * 3


@pytest.mark.parametrize("verb", ["put", "touch", "get_into", "match", "reserve"])
def test_the_tail_is_the_oldest_however_long_the_chain(make_pool, identity, verb):
    """Calls work in batches inside; the order of a chain must not show them."""
    pool = make_pool(policy="leaf", blocks=200)
    ns = pool.namespace(identity)
    keys = ns.keys(range(16 * 150))
    data = np.zeros((150, 4096), np.uint8)
    if verb == "reserve":
        fill(ns, keys)
    else:
        ns.put(keys, data)
    {"touch": ns.touch, "get_into": lambda k: ns.get_into(k, data), "match": lambda k: ns.match(k).release()}.get(
        verb, lambda k: None
    )(keys)
    pool.evict(40)
    assert ns.contains(keys).tolist() == [True] * 110 + [False] * 40


def test_pinned_blocks_stay(pool, ns):
    keys = ns.keys(range(160))
    fill(ns, keys)
    with ns.match(keys) as hit:
        assert pool.evict(64) == 0
        fill(ns, ns.keys(range(10000, 10000 + 16 * 54)))
        assert all(np.array_equal(view, payload(key)) for key, view in zip(keys, hit.views, strict=True))
    assert pool.evict(64) == 64


def test_full_of_pins_is_pool_full(pool, ns):
    keys = ns.keys(range(16 * 64))
    fill(ns, keys)
    more = ns.keys(range(5, 5 + 16))
    with ns.match(keys):
        with pytest.raises(kvpool.PoolFull, match="pinned or reserved"):
            ns.reserve(more, timeout=0.05)
        with pytest.raises(kvpool.PoolFull):
            ns.put(more, [bytes(4096)], timeout=0)
    assert fill(ns, more) == 1


def test_a_wait_for_room_ends_when_there_is_room(ns):
    keys = ns.keys(range(16 * 64))
    fill(ns, keys)
    hit = ns.match(keys)
    threading.Timer(0.1, hit.release).start()
    with ns.reserve(ns.keys(range(5, 5 + 16)), timeout=10) as new:
        assert len(new) == 1


def test_more_than_the_pool_has(ns):
    with pytest.raises(kvpool.PoolFull, match="65 blocks"):
        ns.reserve(ns.keys(range(16 * 65)), timeout=0)


def test_remove_frees_at_once_or_with_the_last_pin(pool, ns):
    keys = ns.keys(range(160))
    fill(ns, keys)
    with ns.match(keys[:5]) as hit:
        assert ns.remove(keys) == 10
        assert not ns.contains(keys).any()
        assert all(np.array_equal(view, payload(key)) for key, view in zip(keys, hit.views, strict=False))
        report = pool.check()
        assert report.clean, report.problems
        assert report.unlinked == 5
    fill(ns, ns.keys(range(3, 3 + 16 * 64)))
    assert pool.check().unlinked == 0


def test_tokens_to_pins_in_one_call(ns):
    fill(ns, ns.keys(range(100)))
    tokens = np.arange(160, dtype=np.uint32)
    keys, hit = ns.match_tokens(tokens)
    with hit:
        assert keys == ns.keys(tokens)
        assert len(hit) == 6
        assert np.array_equal(hit.views[5], payload(keys[5]))
    more, rest = ns.match_tokens(np.arange(160, 320), after=keys)
    assert more == ns.keys(np.arange(160, 320), after=keys)
    assert not rest


def test_a_released_hit_says_what_it_was_and_never_what_came_after(pool, ns):
    keys = ns.keys(range(160))
    fill(ns, keys)
    first = ns.match(keys[:2])
    refs = ns.lookup(keys)
    first.release()
    with ns.match(ns.keys(range(160))[:3]) as second:  # takes the first one's place in memory, or not
        first.release()
        assert pool.check().pins == 3
        assert np.array_equal(first.refs, refs[:2])
        assert np.array_equal(first.blocks, refs[:2] & np.uint64((1 << 29) - 1))
        assert len(first.views) == 2
        assert np.array_equal(second.refs, refs[:3])
    assert pool.check().pins == 0


def test_references_travel_and_go_stale(pool, ns, rack, uri):
    keys = ns.keys(range(160))
    fill(ns, keys)
    refs = ns.lookup(keys)
    with rack.open(uri) as other:
        with other.pin(refs) as hit:
            assert np.array_equal(hit.views[2], payload(keys[2]))
            assert pool.evict(64) == 0
        ns.remove(keys)
        with pytest.raises(kvpool.Stale):
            other.pin(refs)
        fill(ns, ns.keys(range(7, 7 + 16 * 64)))
        with pytest.raises(kvpool.Stale):
            other.pin(refs)
    assert pool.check().pins == 0


def test_pin_is_all_or_nothing(pool, ns):
    keys = ns.keys(range(160))
    fill(ns, keys)
    refs = ns.lookup(keys)
    ns.remove(keys[5:6])
    with pytest.raises(kvpool.Stale):
        pool.pin(refs)
    assert pool.check().pins == 0


def test_pins_nest_in_one_process(pool, ns):
    keys = ns.keys(range(160))
    fill(ns, keys)
    first, second = ns.match(keys), ns.match(keys)
    first.release()
    first.release()
    assert pool.evict(64) == 0
    second.release()
    assert pool.check().pins == 0
    assert pool.evict(64) == 10


def test_hits_go_with_their_objects(pool, ns):
    keys = ns.keys(range(160))
    fill(ns, keys)
    hit = ns.match(keys)
    assert pool.check().pins == 10
    del hit
    gc.collect()
    assert pool.check().pins == 0


def test_two_handles_of_one_process(pool, ns, identity, rack, uri):
    keys = ns.keys(range(160))
    fill(ns, keys)
    other = rack.open(uri)
    with other.namespace(identity).match(keys) as hit:
        assert len(hit) == 10
        assert pool.evict(64) == 0
    other.close()
    assert ns.contains(keys).all()


def test_what_is_published_outlives_its_writer(make_pool, identity, rack, uri, python):
    keys = make_pool().namespace(identity).keys(range(160))
    python(
        """
        import sys, kvpool, numpy as np
        with kvpool.open(sys.argv[1]) as pool:
            i = kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16")
            ns = pool.namespace(i)
            ns.put(ns.keys(range(160)), [bytes([n]) * 4096 for n in range(10)])
    """,
        uri,
    )
    with rack.open(uri) as pool, pool.namespace(identity).match(keys) as hit:
        assert [int(view[9]) for view in hit.views] == list(range(10))


def test_classes_share_the_memory_by_demand(make_pool, identity, rack):
    pool = make_pool(size="16MiB", block=["4KiB", "64KiB"])
    small, large = pool.namespace(identity, block_class=0), pool.namespace(identity, block_class=1)
    capacity = pool.info["classes"][1]["blocks"] // rack.hosts
    fill(small, small.keys(range(16 * 3000)))
    assert fill(large, large.keys(range(16 * (capacity // 2)))) == capacity // 2
    for start in range(0, 1 << 24, 1 << 20):
        fill(large, large.keys(range(start, start + 16 * 100)))
    held = {part["block_bytes"]: part["segments"] for part in pool.stats()["classes"]}
    report = pool.check()
    assert report.clean, report.problems
    assert held[65536] > held[4096]
    assert pool.stats()["segments_moved"] > 0
    fill(small, small.keys(range(5, 5 + 16 * 3000)))
    assert pool.check().clean


def test_namespaces_do_not_touch_each_other(pool, identity):
    a, b = pool.namespace(identity, "a"), pool.namespace(identity, "b")
    keys = a.keys(range(160))
    fill(a, keys)
    assert not b.match(b.keys(range(160)))
    b.remove(b.keys(range(160)))
    assert a.contains(keys).all()


def test_events_tell_the_story(pool, ns):
    stream = pool.events()
    keys = ns.keys(range(32))
    fill(ns, keys)
    pool.evict(1)
    ns.remove(keys)
    told = [(event.kind, event.key) for event in stream.poll() if event.kind != "started"]  # hosts say so
    assert told == [("published", keys[1]), ("published", keys[0]), ("evicted", keys[1]), ("removed", keys[0])]
    assert stream.poll() == []
    for start in range(0, 4000, 10):
        fill(ns, ns.keys(range(start, start + 16)))
    assert stream.poll()
    assert stream.lost > 0


def test_stats_add_up(pool, ns, rack):
    keys = ns.keys(range(160))
    fill(ns, keys)
    ns.match(keys).release()
    ns.contains(ns.keys(range(1, 161)))
    stats = pool.stats()
    assert (stats["lookups"], stats["hits"], stats["published"], stats["pinned"]) == (20, 10, 10, 10)
    part = stats["classes"][0]
    assert part["live"] == 10
    assert sum(part[state] for state in ("absent", "free", "cached", "reserved", "live", "evicting")) == rack.whole(64)


def test_threads_share_a_handle(pool, ns):
    errors = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                start = int(rng.integers(0, 40)) * 16
                keys = ns.keys(range(start, start + 16 * 6))
                with ns.match(keys) as hit:
                    for key, view in zip(keys, hit.views, strict=False):
                        assert np.array_equal(view, payload(key))
                    missing = keys[len(hit) :]
                with ns.reserve(missing, timeout=5) as new:
                    for key, view in zip(missing, new.views, strict=True):
                        view[:] = payload(key)
                    new.publish()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    report = eventually(lambda: (r := pool.check()).clean and r)
    assert report
    assert report.pins == report.blocks["reserved"] == 0
