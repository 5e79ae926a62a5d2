"""What hosts do to each other: publish, pin, remove, hand over, die, come back, and claim to be who they are not."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from conftest import eventually, fill, payload
from hosts import holds

import kvpool

modes = pytest.mark.parametrize("mode", ["sim", "noncoherent"])


# ---- blocks -------------------------------------------------------------------------------------------------------


@modes
def test_what_one_publishes_all_read(make_hosts, mode):
    hosts = make_hosts(4, mode)
    for writer in range(4):
        assert fill(hosts.ns(writer), hosts.chain(writer)) == 8
        assert all(holds(hosts.ns(reader), hosts.chain(writer)) for reader in range(4))
    refs = [hosts.ns(reader).lookup(hosts.chain(2)).tolist() for reader in range(4)]
    assert refs == [refs[0]] * 4
    with hosts.pools[3].pin(refs[0]) as hit:
        assert np.array_equal(hit.views[5], payload(hosts.chain(2)[5]))
    assert hosts.checks()


@modes
def test_put_and_views_written_in_place_reach_the_others(make_hosts, mode):
    hosts = make_hosts(2, mode)
    a, b = hosts.ns(0), hosts.ns(1)
    keys = hosts.chain(1, 70)[:60]
    assert a.put(keys, np.stack([payload(key) for key in keys])) == 60
    assert holds(b, keys)
    assert b.put(keys, np.zeros((60, 4096), np.uint8)) == 0
    assert holds(a, keys)


@modes
def test_another_hosts_block_is_removed_through_its_owner(make_hosts, mode):
    hosts = make_hosts(3, mode)
    a, b, c = (hosts.ns(h) for h in range(3))
    keys = hosts.chain(1)
    fill(a, keys)
    assert b.contains(keys).all()
    assert c.contains(keys).all()
    assert b.remove(keys) == 8
    assert not b.contains(keys).any()
    hosts.settle()
    assert not a.contains(keys).any()
    assert not c.contains(keys).any()
    assert hosts.pools[0].check().blocks["live"] == 0
    assert fill(a, hosts.chain(2, 64)) == 64


def test_a_key_that_two_hosts_published_is_removed_whole(make_hosts):
    hosts = make_hosts()
    a, b = hosts.ns(0), hosts.ns(1)
    keys = hosts.chain(1)
    with a.reserve(keys) as mine, b.reserve(keys) as theirs:
        for new in (mine, theirs):
            for key, view in zip(keys, new.views, strict=True):
                view[:] = payload(key)
        assert mine.publish() == 8
        assert 0 <= theirs.publish() <= 8
    hosts.settle()
    assert holds(a, keys)
    assert holds(b, keys)
    assert b.remove(keys) == 8
    hosts.settle()
    assert not a.contains(keys).any()
    assert not b.contains(keys).any()
    assert hosts.checks()


@modes
def test_pins_of_another_host_keep_the_bytes(make_hosts, mode):
    hosts = make_hosts(2, mode)
    a, b = hosts.ns(0), hosts.ns(1)
    keys = hosts.chain(1, 64)
    fill(a, keys)
    with b.match(keys[:40]) as hit:
        assert len(hit) == 40
        assert fill(a, hosts.chain(2, 24)) == 24
        with pytest.raises(kvpool.PoolFull):
            a.reserve(hosts.chain(3, 40), timeout=0)
        assert hosts.pools[0].evict(64) == 24
        assert a.remove(keys[:40]) == 40
        assert fill(a, hosts.chain(4, 24)) == 24
        assert all(np.array_equal(view, payload(key)) for key, view in zip(keys, hit.views, strict=False))
        stale = hit.refs
    assert fill(a, hosts.chain(5, 64)) == 64
    with pytest.raises(kvpool.Stale):
        hosts.pools[1].pin(stale)
    assert hosts.checks()


@modes
def test_following_is_learning(make_hosts, mode):
    hosts = make_hosts(2, mode)
    a, b = hosts.ns(0), hosts.ns(1)
    fill(a, hosts.chain(1))
    lookups = hosts.pools[1].stats()["replayed"]
    hosts.pools[1].follow()
    assert hosts.pools[1].stats()["replayed"] >= lookups
    assert b.lookup(hosts.chain(1)).all()
    assert hosts.pools[1].follow() == 0


def test_uses_of_others_keep_a_block(make_hosts):
    hosts = make_hosts()
    a, b = hosts.ns(0), hosts.ns(1)
    used, idle = hosts.chain(1), hosts.chain(2)
    fill(a, used)
    fill(a, idle)
    assert holds(b, used)
    hosts.settle()
    hosts.pools[0].evict(8)
    assert a.contains(used).all()
    assert not a.contains(idle).any()


def test_a_log_lapped_a_thousand_times(make_hosts):
    """One host sleeps while another publishes and evicts; then it finds exactly what is there."""
    hosts = make_hosts(lease=60)
    a = hosts.ns(0)
    fill(a, hosts.chain(1))
    child = hosts.child(
        1,
        """
        held = ns.match(chain(1, 4)); say(len(held)); wait()
        pool.follow()
        say(" ".join(str(ns.contains(chain(number, 64)).sum()) for number in (1, *range(300, 600))))
        say(pool.stats()["rescans"], holds(ns, chain(599, 64)[:20]), len(ns.match(chain(1))))
        wait()
        """,
    )
    assert child.hears() == "4"
    child.stop()
    data = np.zeros((60, 4096), np.uint8)
    records = hosts.pools[0].info["log_records"]
    for number in range(300, 600):
        a.put(hosts.chain(number, 64)[:60], data)
        hosts.pools[0].evict(60)
    written = max(event.sequence for event in hosts.pools[0].events().poll())
    assert written > 1000 * records
    fill(a, hosts.chain(599, 64)[:20])
    child.cont()
    child.go_on()
    found = [int(word) for word in child.hears().split()]
    assert found == [4, *[0] * 299, 20]
    rescans, right, kept = child.hears().split()
    assert int(rescans) >= 1
    assert (right, kept) == ("True", "4")
    assert hosts.checks()


# ---- segments -----------------------------------------------------------------------------------------------------


@modes
def test_segments_are_given_taken_and_revoked(make_hosts, mode):
    hosts = make_hosts(2, mode)
    a, b = hosts.ns(0), hosts.ns(1)
    pools = hosts.pools
    fill(a, hosts.chain(1, 16))
    assert [host["segments"] for host in pools[0].hosts()] == [8, 8]
    given = pools[0].give(1, 2)
    assert given == 2
    pools[0].revoke()
    assert eventually(lambda: sum(host["segments"] for host in pools[0].hosts()) == 16)
    pools[0].give(1, 2)
    assert eventually(lambda: pools[1].follow() >= 0 and pools[1].hosts()[1]["segments"] >= 10)
    taken = pools[1].hosts()[1]["segments"]
    pools[0].follow()
    assert pools[0].revoke() == 0
    assert [host["segments"] for host in pools[0].hosts()] == [16 - taken, taken]
    assert fill(b, hosts.chain(2, 80)[: 8 * taken]) == 8 * taken
    assert holds(a, hosts.chain(2, 80)[: 8 * taken])
    assert holds(b, hosts.chain(1, 16))
    with pytest.raises(kvpool.PoolFull):
        a.reserve(hosts.chain(3, 64), timeout=0)
    for wrong in (0, 2, 99):
        with pytest.raises((kvpool.OutOfRange, kvpool.InvalidArgument)):
            pools[0].give(wrong)
    assert hosts.checks()


def test_what_is_pinned_is_not_given(make_hosts):
    hosts = make_hosts()
    a, b = hosts.ns(0), hosts.ns(1)
    keys = hosts.chain(1, 64)
    fill(a, keys)
    with b.match(keys):
        assert hosts.pools[0].give(1, 8) == 0
        assert holds(a, keys)
    with a.reserve(hosts.chain(2, 64)):
        assert hosts.pools[0].give(1, 8) == 0


def test_a_host_without_room_gets_idle_segments(make_hosts):
    hosts = make_hosts()
    a, b = hosts.ns(0), hosts.ns(1)
    hosts.pools[1].give(0, 4)
    assert eventually(lambda: hosts.settle() or hosts.seen(0)["segments"] == 12)
    full = hosts.chain(1, 32)
    fill(b, full)
    with b.match(full):
        with pytest.raises(kvpool.PoolFull):
            b.reserve(hosts.chain(2), timeout=0)
        with b.reserve(hosts.chain(2), timeout=30) as new:  # waits until the other, which has more, has given one
            assert len(new) == 8
    assert 9 <= hosts.seen(0)["segments"] <= 11
    assert a.contains(full).all() or holds(a, full)
    assert hosts.checks()


def test_a_quota_is_not_exceeded(make_hosts):
    hosts = make_hosts(quota=8)
    hosts.ns(1)
    assert hosts.pools[0].give(1, 1) == 1
    hosts.settle()
    assert [host["segments"] for host in hosts.pools[1].hosts()] == [8, 8]
    assert hosts.pools[0].revoke() == 1
    assert fill(hosts.ns(0), hosts.chain(1, 64)) == 64


# ---- lost hosts ---------------------------------------------------------------------------------------------------

HOLD = """
fill(ns, chain(1, 32))
hit = ns.match(chain(2))
new = ns.reserve(chain(3))
say(len(hit)); wait()
"""


def lose_one(hosts):
    """Host 1 has published chain 1, pinned chain 2 of host 0 and reserved: then it is reset. References of chain 1."""
    fill(hosts.ns(0), hosts.chain(2))
    child = hosts.child(1, HOLD)
    assert child.hears() == "8"
    refs = hosts.ns(0).lookup(hosts.chain(1, 32))
    with pytest.raises(kvpool.Busy, match="signs of life"):
        hosts.pools[0].fence(1, 1)
    child.kill()
    hosts.lose(1)
    return refs


def test_a_lost_hosts_blocks_are_readable_and_not_reused(make_hosts):
    hosts = make_hosts(3)
    refs = lose_one(hosts)
    a, c = hosts.ns(0), hosts.ns(2)
    assert hosts.becomes(1, "lapsed")
    assert hosts.becomes(1, "lapsed", by=2)
    seen = hosts.seen(1)
    assert (seen["incarnation"], seen["segments"]) == (1, 8)
    assert seen["silent_ms"] >= hosts.pools[0].info["lease_ms"] - 100
    for ns in (a, c):
        assert holds(ns, hosts.chain(1, 32))
    with pytest.raises(kvpool.PoolFull):
        a.reserve(hosts.chain(9, 65), timeout=0)
    assert hosts.pools[0].evict(1000) == 0  # its pins count
    assert a.lookup(hosts.chain(1, 32)).tolist() == refs.tolist()
    with pytest.raises(kvpool.InvalidArgument, match="incarnation 1, and 2 was fenced"):
        hosts.pools[0].fence(1, 2)


def test_a_fence_names_the_adopter(make_hosts):
    hosts = make_hosts(3)
    refs = lose_one(hosts)
    a, c = hosts.ns(0), hosts.ns(2)
    keys = hosts.chain(1, 32)
    assert hosts.becomes(1, "lapsed")
    assert hosts.pools[0].fence(1, 1) == 8
    assert hosts.pools[0].fence(1, 1) == 0
    assert hosts.seen(1)["state"] == "fenced"
    assert hosts.becomes(1, "fenced", by=2)
    assert [host["segments"] for host in hosts.pools[2].hosts()] == [16, 0, 8]
    for ns in (a, c):
        assert holds(ns, keys)
    assert hosts.checks()
    with hosts.pools[2].pin(refs) as hit:
        assert all(np.array_equal(view, payload(key)) for key, view in zip(keys, hit.views, strict=True))
    assert hosts.pools[0].evict(1000) == 40  # adopted ones, and those that the lost host had pinned
    assert fill(a, hosts.chain(9, 128)) == 128
    assert holds(c, hosts.chain(9, 128))
    for ref in refs.tolist():
        with pytest.raises(kvpool.Stale):
            hosts.pools[2].pin([ref])
    assert hosts.checks()


def test_a_lost_host_comes_back_and_owns_nothing(make_hosts):
    hosts = make_hosts()
    lose_one(hosts)
    assert hosts.becomes(1, "lapsed")
    assert hosts.pools[0].fence(1, 1) == 8
    b = hosts.ns(1)
    assert hosts.pools[1].info["owned"] == 0
    assert hosts.seen(1)["incarnation"] == 2
    assert hosts.becomes(1, "present")
    assert holds(b, hosts.chain(1, 32))
    with pytest.raises(kvpool.PoolFull):
        b.reserve(hosts.chain(4), timeout=0)
    with pytest.raises(kvpool.InvalidArgument):
        hosts.pools[0].fence(1, 1)
    with b.reserve(hosts.chain(4), timeout=30) as new:  # an idle segment of the adopter's
        new.withdraw()
    assert fill(b, hosts.chain(4)) == 8
    assert holds(hosts.ns(0), hosts.chain(4))
    assert hosts.checks()


def test_a_host_that_restarts_before_its_lease_lapses_keeps_its_blocks(make_hosts):
    hosts = make_hosts(lease=60)
    lose_one(hosts)
    b = hosts.ns(1)
    assert hosts.seen(1)["state"] == "present"
    assert hosts.seen(1)["incarnation"] == 2
    with pytest.raises((kvpool.Busy, kvpool.InvalidArgument)):
        hosts.pools[0].fence(1, 1)
    assert hosts.pools[1].info["owned"] == 8
    for ns in (hosts.ns(0), b):
        assert holds(ns, hosts.chain(1, 32))
    assert fill(b, hosts.chain(4, 64)) == 64
    assert holds(hosts.ns(0), hosts.chain(4, 64))
    assert hosts.pools[0].evict(1000) == 8  # the pins of the former incarnation are gone
    assert hosts.checks()


def test_a_killed_process_is_not_a_lost_host(make_hosts):
    hosts = make_hosts(2)
    fill(hosts.ns(0), hosts.chain(2))
    child = hosts.child(1, HOLD)
    assert child.hears() == "8"
    child.kill()
    b = hosts.ns(1)
    assert hosts.seen(1)["incarnation"] == 1
    assert eventually(lambda: hosts.pools[1].check().pins == 0)
    assert holds(b, hosts.chain(1, 32))
    assert hosts.pools[1].check().blocks["reserved"] == 0
    assert hosts.pools[0].evict(1000) == 8


def test_a_zombie_publishes_nothing(make_hosts):
    hosts = make_hosts()
    hosts.is_clean = False  # a zombie's stores reach what is another's by now: that is what a site's fence prevents
    child = hosts.child(
        1,
        """
        fill(ns, chain(1)); new = ns.reserve(chain(2)); new.views[0][:] = 7; say("reserved"); wait()
        try:
            new.publish(); say("published")
        except kvpool.Fenced as error:
            say("Fenced", "open it again" in str(error))
        for call in (lambda: ns.match(chain(1)), lambda: ns.put(chain(3), [b"x"] * 8), pool.check):
            try:
                call(); say("went on")
            except kvpool.Fenced:
                say("Fenced")
        pool.close()
        again = kvpool.open(sys.argv[1], host=1)
        say(len(again.namespace(IDENTITY).match(chain(1))), again.info["owned"])
        wait()
        """,
    )
    assert child.hears() == "reserved"
    child.stop()
    assert hosts.becomes(1, "lapsed")
    assert hosts.pools[0].fence(1, 1) == 8
    child.cont()
    child.go_on()
    assert child.hears() == "Fenced True"
    assert [child.hears() for _ in range(3)] == ["Fenced"] * 3
    assert child.hears() == "8 0"
    assert not hosts.ns(0).contains(hosts.chain(2)).any()
    assert holds(hosts.ns(0), hosts.chain(1))
    assert hosts.seen(1)["incarnation"] == 2


def test_all_hosts_die_and_a_new_one_finds_everything(make_hosts):
    hosts = make_hosts(4)
    hosts.pools.pop(0).close()
    body = "fill(ns, chain(10 + int(sys.argv[2]), 20)); hit = ns.match(chain(10, 20)); say(len(hit)); wait()"
    children = [hosts.child(host, body) for host in range(4)]
    assert [child.hears() for child in children] == ["20"] * 4
    for child in children:
        child.kill()
    gc.collect()
    for host in range(4):
        hosts.lose(host)
    for host in (2, 0, 1, 3):
        hosts.open(host)
        assert all(holds(hosts.ns(host), hosts.chain(10 + writer, 20)) for writer in range(4))
    hosts.settle()
    assert [hosts.pools[host].check().blocks["live"] for host in range(4)] == [20] * 4
    assert sum(hosts.pools[host].evict(100) for host in range(4)) == 80
    assert hosts.checks()
