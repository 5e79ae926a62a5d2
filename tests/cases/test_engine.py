"""Cases of what an engine expects of a connector, with LMCache's client and the door: no engine is needed."""

from __future__ import annotations

import contextlib
import signal

import numpy as np
import pytest
from conftest import completion, eventually, fill

import kvpool
from kvpool.bindings.door import Door
from kvpool.bindings.lmcache import PoolClient

STATED = {"revision": "1", "dtype": "bfloat16", "chunk_tokens": 256}


def ask(client, verb, *arguments):
    """One batch: whether all went well, and what became of each of it."""
    ok, _, each = completion(client, getattr(client, f"submit_batch_{verb}")(*arguments))
    return ok, each


def test_E04_what_could_not_be_loaded_is_listed_and_the_rest_is_kept(client_of, pool):
    """First, in the middle, last, all: no later than the completion, and the good ones are good."""
    client = client_of()
    keys, data = [f"k{i}" for i in range(5)], [np.full(9000, i + 1, np.uint8) for i in range(5)]
    for gone in ((), (0,), (2,), (4,), (1, 3), range(5)):
        assert ask(client, "set", keys, data) == (True, [True] * 5)
        ask(client, "delete", [keys[i] for i in gone])
        out = [np.zeros(9000, np.uint8) for _ in keys]
        ok, got = ask(client, "get", keys, out)
        assert got == [i not in gone for i in range(5)]
        assert ok == (not gone)
        assert all(np.array_equal(o, d) if g else not o.any() for o, d, g in zip(out, data, got, strict=True))
    assert pool.check().pins == 0


@pytest.mark.parametrize("end", ["is rejected", "dies", "forgets"])
def test_E05_what_is_held_for_a_reader_goes_when_it_does(pool, uri, rack, start, end):
    """A consumer that was told of blocks is rejected, killed, or never heard of again."""
    body = f"""
        from kvpool.bindings.lmcache import PoolClient
        client = PoolClient(sys.argv[1], **{STATED!r}, hold_seconds=0.3 if {end!r} == "forgets" else 1000)
        client.submit_batch_set(["k"], [b"x" * 9000])
        while not client.drain_completions(): time.sleep(0.001)
        client.submit_batch_exists(["k"])
        while not client.drain_completions(): time.sleep(0.001)
        say("told"); sys.stdin.readline()
        if {end!r} == "is rejected": client.close(); say("gone"); sys.stdin.readline()
        if {end!r} == "dies": die()
        client.drain_completions(); say("gone"); sys.stdin.readline()
    """
    consumer = start(body, uri)
    assert consumer.stdout.readline() == "told\n"
    if end == "forgets":
        eventually(lambda: False, 0.4)
    else:
        assert pool.check().pins == 3
    consumer.stdin.write("\n")
    consumer.stdin.flush()
    assert end == "dies" or consumer.stdout.readline() == "gone\n"
    assert eventually(lambda: pool.check().pins == 0, 20)
    assert pool.evict(100) == 3


def test_E06_who_comes_too_late_is_told_so(pool, ns):
    """References carry the life of their block: after it was reused they are of no use."""
    fill(ns, ns.keys(range(160)))
    told = ns.lookup(ns.keys(range(160))).tolist()  # sent to a consumer, without a pin
    for i in range(10):
        fill(ns, ns.keys(range(10000 * (i + 1), 10000 * (i + 1) + 16 * 60)))
    with pytest.raises(kvpool.Stale):
        pool.pin(told)
    assert not ns.get_into(ns.keys(range(160)), np.zeros((10, 4096), np.uint8)).any()


@pytest.mark.parametrize("version", [2, 99])
def test_E09_versions_that_do_not_fit_are_named_and_the_engine_goes_on(tmp_path, version):
    path = tmp_path / "pool"
    with kvpool.create(f"file:{path}", blocks=16, block="4KiB"):
        door = Door(f"file:{path}", pause=0)
        client = PoolClient(f"file:{path}", **STATED)
    kvpool.remove(f"file:{path}", force=True)
    kvpool.create(f"file:{path}", blocks=16, block="4KiB").close()
    with path.open("r+b") as file:
        file.seek(8)
        file.write(version.to_bytes(8, "little"))
    with pytest.raises(kvpool.VersionMismatch, match=rf"format {version}, this build reads \d+"):
        PoolClient(f"file:{path}", **STATED)
    for _ in range(3):
        assert door.run(lambda pool: pool.evict(1), "miss") == "miss"
        assert ask(client, "exists", ["k"]) == (True, [False])
    assert door.misses["VersionMismatch"] >= 1
    door.close()
    client.close()


@pytest.mark.parametrize("blocks", range(6))
def test_E10_a_part_of_a_chain_is_never_taken_for_the_whole(pool, ns, start, uri, rack, blocks):
    """The producer is aborted after some of its blocks: who waits finds so many, and no more."""
    body = """
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); keys = ns.keys(range(96))
        fill(ns, keys[:int(sys.argv[2])])
        new = ns.reserve(keys[int(sys.argv[2]):]); new.views[0][:] = 1; die()
    """
    assert start(body, uri, blocks).wait(60) == -signal.SIGKILL
    keys = ns.keys(range(96))
    assert len(ns.match(keys)) == blocks
    assert ns.contains(keys).tolist() == [True] * blocks + [False] * (6 - blocks)
    assert rack.recovered().blocks["reserved"] == 0
    assert fill(ns, keys[blocks:]) == 6 - blocks
    assert len(ns.match(keys)) == 6


def test_E12_what_is_told_to_be_there_is_what_the_pool_has(client_of, pool, uri):
    """No index of its own: evicted, removed by another, or lost with its pool, it is not told any more."""
    client, other = client_of(hold_seconds=0), client_of(hold_seconds=0)
    keys = [f"k{i}" for i in range(8)]
    for end in ("evicted", "removed by another", "with its pool"):
        ask(client, "set", keys, [np.ones(100, np.uint8)] * 8)
        assert ask(client, "exists", keys)[1] == [True] * 8
        ask(client, "exists", [])  # and lets go
        if end == "evicted":
            assert eventually(lambda: pool.evict(100) or pool.check().blocks["live"] == 0)
            assert eventually(lambda: pool.evict(100) == 0 and pool.check().blocks["live"] == 0)
        elif end == "removed by another":
            ask(other, "delete", keys)
        else:
            kvpool.remove(uri, force=True)
        assert ask(client, "exists", keys)[1] == [False] * 8
        assert ask(client, "get", keys, [np.zeros(100, np.uint8)] * 8)[1] == [False] * 8


# ---- our own ----


def test_EX1_a_batch_that_raises_is_answered_too(client_of, pool):
    """An engine waits for each completion: one that cannot be is told as failed, and the next goes on."""
    client = client_of()
    for wrong in ([np.zeros(5, np.uint8)], [object()] * 2, ["text"] * 2, [np.zeros((8, 8))[:, ::2]] * 2):
        with contextlib.suppress(kvpool.InvalidArgument):  # refused before it was taken on
            assert ask(client, "get", ["a", "b"], wrong) == (False, [False, False])
    assert ask(client, "set", ["a"], [np.ones(100, np.uint8)]) == (True, [True])


def test_EX2_an_engine_outlives_every_way_that_its_pool_can_go(pool, uri, make_pool):
    """Removed, cut short, made anew with another size, closed under it: misses, and then hits again."""
    door = Door(uri, pause=0)

    def use(each):
        ns = each.namespace(kvpool.Identity("m", "1", "f", "l"))
        ns.put([b"k" * 16], [bytes(64)])
        return bool(ns.contains([b"k" * 16]).all())

    for way in ("removed", "made anew", "closed"):
        assert door.run(use, False)
        if way == "closed":
            door.pool.close()
        else:
            kvpool.remove(uri, force=True)
        if way == "made anew":
            kvpool.create(uri, blocks=8, block="8KiB").close()
        assert door.run(use, "miss") in ("miss", True)
        if way == "removed":
            assert door.run(use, "miss") == "miss"
            kvpool.create(uri, blocks=8, block="4KiB").close()
        assert eventually(lambda: door.run(use, False) is True)
    assert set(door.misses) <= {"Replaced", "NotFound", "Closed"}
    door.close()
