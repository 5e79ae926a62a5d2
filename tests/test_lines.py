"""What each operation costs in lines of pool memory, counted by the simulator: the budget of the design, exactly.

One process has two hosts open, and no lines move by themselves (?events=0). What a keeper does meanwhile is told apart
by counting again.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import payload
from hosts import holds

LINE, BLOCK = 64, 4096
PAYLOAD = BLOCK // LINE
TRIES, ENOUGH = 200, 20
COUNTED = ("loads", "stores", "lines_written", "lines_invalidated", "fences")


@pytest.fixture
def two(make_hosts):
    """Hosts 0 and 1 of a pool whose blocks 0 to 63 are published: by host 0, and known to host 1."""
    hosts = make_hosts(2, lease=60, events=0)
    data = np.stack([payload(key) for key in hosts.chain(1, 64)])
    assert hosts.ns(0).put(hosts.chain(1, 64), data) == 64
    assert holds(hosts.ns(1), hosts.chain(1, 64))
    return hosts


def cost(pool, action, prepare=lambda: None, undo=lambda result: None):
    """What an action costs when no tick of a keeper comes between, less what it says: the least of many times."""
    seen = []
    for _ in range(TRIES):
        prepare()
        before = pool.line_counts()
        result = action()
        after = pool.line_counts()
        undo(result)
        seen.append({name: after[name] - before[name] - (result or {}).get(name, 0) for name in COUNTED})
        if seen.count(seen[-1]) == ENOUGH:
            break
    return min(seen, key=lambda counted: sum(counted.values()))


def raw(pool, keys):
    """Keys as the C core takes them."""
    return pool.core.ffi.from_buffer(b"".join(keys)), len(keys)


def lines_of(refs, each):
    """Lines in which the words (8 each) or labels (4 each) of blocks lie."""
    return len({(int(ref) & 0x1FFFFFFF) // each for ref in refs})


def matcher(pool, keys):
    """kvp_match and its undoing, without what Python adds."""
    core, (data, n) = pool.core, raw(pool, keys)
    refs = core.ffi.new("uint64_t[]", n)

    def match():
        assert core.lib.kvp_match(pool.handle, 0, data, n, refs) == n

    return match, lambda _: core.check(core.lib.kvp_unpin_refs(pool.handle, refs, n))


@pytest.mark.parametrize("host", [0, 1])
def test_a_hit_lookup_touches_no_line(two, host):
    """Neither its own host's blocks nor another's: not a load, not a store, not a fence."""
    ns = two.ns(host)
    keys = two.chain(1, 64)
    assert cost(two.pools[host], lambda: ns.lookup(keys) is None) == dict.fromkeys(COUNTED, 0)
    assert cost(two.pools[host], lambda: ns.contains(keys) is None) == dict.fromkeys(COUNTED, 0)
    assert ns.lookup(keys).all()


@pytest.mark.parametrize("n", [1, 7, 8, 9, 16, 33, 64])
def test_a_pin_batch(two, n):
    """Of foreign blocks: one line of slots per 8, the words' lines and the payload refreshed, one pair of fences."""
    pool = two.pools[1]
    match, release = matcher(pool, two.chain(1, n))
    keep = two.ns(1).match(two.chain(1, 64)[-8:]) if n < 64 else None  # the high-water mark is up; a line of slots used
    counted = cost(pool, match, undo=release)
    del keep
    words = lines_of(two.ns(1).lookup(two.chain(1, n)), 8)
    assert counted == {
        "loads": n,  # the words
        "stores": n,  # the slots
        "lines_written": -(-n // 8),
        "lines_invalidated": n * PAYLOAD + words,
        "fences": 2,
    }


def test_unpinning_writes_its_slots_and_waits_for_nothing(two):
    pool = two.pools[1]
    match, release = matcher(pool, two.chain(1, 64))
    counted = cost(pool, lambda: release(None) and None, prepare=match)
    assert counted["fences"] == counted["lines_invalidated"] == 0
    assert counted["stores"] == 64


def test_pinning_ones_own_blocks_moves_no_line(two):
    pool = two.pools[0]
    match, release = matcher(pool, two.chain(1, 64))
    keep = two.ns(0).match(two.chain(1, 64)[-1:])
    counted = cost(pool, match, undo=release)
    del keep
    assert counted["lines_invalidated"] == counted["lines_written"] == 0
    assert counted["fences"] <= 2


def test_a_copy_out_writes_nothing(two):
    keys = two.chain(1, 32)
    out = np.zeros((32, BLOCK), np.uint8)
    for host in (0, 1):
        ns = two.ns(host)
        counted = cost(two.pools[host], lambda ns=ns: ns.get_into(keys, out) is None)
        assert counted["lines_written"] == counted["stores"] == 0
        assert counted["lines_invalidated"] == (0 if host == 0 else 32 * (PAYLOAD + 1))
        assert np.array_equal(out[3], payload(keys[3]))


@pytest.mark.parametrize("n", [1, 8, 20])
def test_a_publish_batch(two, n):
    """Two write fences; beyond the payload only the lines of labels, words and records."""
    pool = two.pools[1]
    core = pool.core
    data, _ = raw(pool, two.chain(7, n))
    numbers, refs = core.ffi.new("uint32_t[]", n), core.ffi.new("uint64_t[]", n)

    def reserve():
        core.check(core.lib.kvp_reserve(pool.handle, 0, n, numbers))

    def publish():
        assert core.lib.kvp_publish(pool.handle, 0, numbers, data, n, refs) == n
        return {"lines_written": n * PAYLOAD + lines_of(refs, 8) + lines_of(refs, 4)}

    counted = cost(pool, publish, prepare=reserve, undo=lambda _: core.lib.kvp_remove(pool.handle, 0, data, n))
    assert counted["fences"] == 2
    assert counted["lines_invalidated"] == 0
    assert -(-n // 2) <= counted["lines_written"] <= n // 2 + 1  # records, two a line
