"""Cases of numbers and events: what is told is what happened, in all its directions, and a gap can be seen."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner
from conftest import eventually, fill, said

import kvpool
from kvpool.reports import COUNTERS
from kvpool.tools.main import main


def moved(pool, work):
    """By how much each counter changes during it."""
    before = pool.stats()
    work()
    after = pool.stats()
    return {name: after[name] - before[name] for name in COUNTERS if after[name] != before[name]}


def test_O01_counters_of_a_trace_are_those_counted_by_hand(pool, ns):
    a, b, never = ns.keys(range(160)), ns.keys(range(1000, 1160)), ns.keys(range(5000, 5160))
    out = np.zeros((10, 4096), np.uint8)

    def trace():
        ns.put(a, out)  # 10 stored
        ns.put(a, out)  # 10 there already
        with ns.match(a):  # 10 looked up, found, pinned
            pass
        ns.match(never).release()  # 10 looked up, none
        ns.get_into(b, out)  # 10 looked up, none
        fill(ns, b[:4])
        ns.get_into(b, out)  # 10 looked up, 4 found and copied
        ns.remove(a[:3])
        pool.evict(2)

    assert moved(pool, trace) == {
        "lookups": 10 + 10 + 10 + 10,
        "hits": 10 + 4,
        "published": 10 + 4,
        "duplicates": 10,
        "evicted": 2,
        "removed": 3,
        "bytes_in": 10 * 4096,
        "bytes_out": 4 * 4096,
        "pinned": 10,
    }
    stats = pool.stats()
    assert stats["lookups"] >= stats["hits"] >= stats["pinned"]
    assert stats["hit_ratio"] == stats["hits"] / stats["lookups"]


KEYS = b"".join(bytes([i]) * 16 for i in range(1, 5))
TABLE = {
    "put": (lambda pool, ns, out: ns.put(KEYS, out), {"published", "bytes_in"}),
    "put again": (lambda pool, ns, out: ns.put(KEYS, out), {"duplicates"}),
    "match": (lambda pool, ns, out: ns.match(KEYS).release(), {"lookups", "hits", "pinned"}),
    "match nothing": (lambda pool, ns, out: ns.match(b"n" * 16), {"lookups"}),
    "lookup": (lambda pool, ns, out: ns.lookup(KEYS), {"lookups", "hits"}),
    "contains": (lambda pool, ns, out: ns.contains(KEYS), {"lookups", "hits"}),
    "get_into": (lambda pool, ns, out: ns.get_into(KEYS, out), {"lookups", "hits", "bytes_out"}),
    "get nothing": (lambda pool, ns, out: ns.get_into(b"n" * 16, out[:1]), {"lookups"}),
    "pin": (lambda pool, ns, out: pool.pin(ns.lookup(KEYS)).release(), {"lookups", "hits", "pinned"}),
    "touch": (lambda pool, ns, out: ns.touch(KEYS), set()),
    "fill": (lambda pool, ns, out: filled(ns), {"bytes_in"}),
    "reserve and withdraw": (lambda pool, ns, out: ns.reserve(3).withdraw(), set()),
    "publish": (lambda pool, ns, out: published(ns), {"published"}),
    "publish pinned": (lambda pool, ns, out: published(ns, b"q" * 16, True), {"published", "pinned"}),
    "publish what is there": (lambda pool, ns, out: published(ns, KEYS[:16]), {"duplicates"}),
    "refused": (lambda pool, ns, out: refused(ns), {"full"}),
    "evict": (lambda pool, ns, out: pool.evict(1), {"evicted"}),
    "remove": (lambda pool, ns, out: ns.remove(KEYS), {"removed"}),
    "remove nothing": (lambda pool, ns, out: ns.remove(KEYS), set()),
    "looking": (lambda pool, ns, out: (pool.stats(), pool.check(), pool.events().poll()), set()),
}
# What one process on one host does not come by: deaths, other hosts, races, a full directory, segments that move.
ELSEWHERE = {
    "recoveries",
    "recovered",
    "recovery_ns",
    "replayed",
    "rescans",
    "doubted",
    "segments_handed_over",
    "segments_moved",
    "stale",
    "spared",
    "unindexed",
}


def filled(ns):
    with ns.reserve(1) as new:
        new.fill(0, b"x")


def published(ns, key=b"p" * 16, pinned=False):
    with ns.reserve(1) as new:
        new.publish_pinned(key).release() if pinned else new.publish(key)


def refused(ns):
    blocks = ns.pool.check().blocks
    held, everything = ns.reserve(blocks["free"] + blocks["cached"]), blocks["live"] + 1
    with pytest.raises(kvpool.PoolFull):
        ns.reserve(everything, timeout=0)
    held.withdraw()


def test_O02_each_operation_moves_its_own_counters_and_no_other(make_pool, identity):
    pool = make_pool(blocks=32)
    ns, out = pool.namespace(identity), np.zeros((4, 4096), np.uint8)
    seen = set()
    for what, (work, expected) in TABLE.items():
        counted = set(moved(pool, lambda work=work: work(pool, ns, out)))
        assert counted == expected, what
        seen |= counted
    assert seen | ELSEWHERE == set(COUNTERS), "an operation, or a counter, has no row here"


def test_O02_what_a_death_moves(pool, uri, rack, start):
    before = rack.count("recoveries")
    said_it = start("pool = kvpool.open(sys.argv[1]); new = pool.namespace(identity).reserve(3); say('in'); die()", uri)
    assert said_it.stdout.readline() == "in\n"
    assert eventually(lambda: rack.count("recoveries") == before + 1, 20)
    assert rack.recovered()
    assert rack.count("recovered") >= 3
    assert rack.count("recovery_ns") > 0


def test_O04_events_rebuild_the_index_and_gaps_are_seen(make_pool, identity):
    pool = make_pool(blocks=32)
    ns, stream, index, ever = pool.namespace(identity), pool.events(), {}, []
    last = {}

    def follow(stream):
        for event in stream.poll(1 << 16):
            assert event.sequence > last.get((id(stream), event.worker), 0)
            last[id(stream), event.worker] = event.sequence
            if event.kind == "published":
                index[event.key] = event.ref
            elif event.kind in ("evicted", "removed"):
                index.pop(event.key, None)

    for i in range(60):
        keys = ns.named([f"{i}/{j}" for j in range(3)])
        ever += list(keys)
        fill(ns, keys)
        if i % 7 == 0:
            ns.remove(keys[1:2])
        follow(stream)
    assert stream.lost == 0
    assert index == {key: int(ref) for key, ref in zip(ever, ns.lookup(ever), strict=True) if ref}
    pool.evict(1000)
    follow(stream)
    assert index == {}
    slow = pool.events()
    slow.poll()
    for i in range(pool.info["log_records"]):
        ns.put(ns.named([f"gap/{i}"]), [bytes(64)])
    slow.poll(1 << 16)
    assert slow.lost > 0  # from here on it rebuilds from lookups


def test_O04_a_publisher_that_starts_again_goes_on_counting(pool, uri, rack, start):
    stream, sequences = pool.events(), []
    for _ in range(3):
        body = """
            pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity)
            say(pool.worker, fill(ns, ns.named([str(time.time())])))
        """
        worker = said(start(body, uri)).split()[0]
        sequences += [event.sequence for event in stream.poll() if event.worker == int(worker)]
    assert sequences == sorted(set(sequences))
    assert len(sequences) >= 3
    assert stream.lost == 0


def test_O06_every_event_says_which_key_and_which_block(pool, ns):
    keys = ns.keys(range(160))
    fill(ns, keys)
    refs = dict(zip(keys, ns.lookup(keys).tolist(), strict=True))
    ns.remove(keys)
    events = pool.events().poll()
    assert [event.kind for event in events] == ["published"] * 10 + ["removed"] * 10
    for event in events:
        assert event.key in refs
        assert event.ref == refs[event.key]
        assert event.sequence > 0
        assert event.worker == pool.worker


# ---- our own ----


def test_OX1_the_command_line_says_what_the_library_says(pool, ns, uri):
    """Two ways to look at one pool: the same numbers, in JSON that other programs can read."""
    fill(ns, ns.keys(range(160)))
    hit = ns.match(ns.keys(range(64)))
    told = CliRunner().invoke(main, ["stat", uri, "--json"])
    assert told.exit_code == 0, told.output
    stat, stats = json.loads(told.output), pool.stats()
    text = json.dumps(stat)
    assert stats["uuid"] in text
    assert stat["published"] == stats["published"] == 10
    assert stat["classes"][0]["live"] == stats["classes"][0]["live"] == 10
    checked = CliRunner().invoke(main, ["check", uri, "--json"])
    assert json.loads(checked.output)["clean"] is True
    assert len(hit) == 4


def test_OX2_counters_outlive_the_workers_that_made_them(pool, ns, uri, rack, start):
    """Sums over the life of the pool: neither a polite end nor a death sets them back."""
    body = "pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); fill(ns, ns.named([sys.argv[2]])); "
    for number, end in enumerate(("pool.close()", "die()", "os._exit(0)", "pool.close()")):
        start(body + end, uri, number).wait(60)
        assert eventually(lambda: all(worker["state"] != "dead" for worker in rack.workers()), 20)
        assert rack.count("published") == number + 1
    assert all(value >= 0 for value in pool.stats().values() if isinstance(value, int))
