"""Cases of one tenant, deployment or version of weights seeing another's: nothing is found, nothing is touched."""

from __future__ import annotations

import dataclasses
import os
import stat

import numpy as np
import pytest
from conftest import completion, eventually, fill, payload

import kvpool
from kvpool.bindings.door import Door

STATED = {"revision": "1", "dtype": "bfloat16", "chunk_tokens": 256}


def ask(client, verb, *arguments):
    """One batch, and what became of each of it."""
    return completion(client, getattr(client, f"submit_batch_{verb}")(*arguments))[2]


def test_I01_a_tenant_is_carried_to_every_call_of_a_connector(pool, client_of):
    a, b = client_of(tenant="a"), client_of(tenant="b")
    data, out = np.full(9000, 7, np.uint8), np.zeros(9000, np.uint8)
    assert ask(a, "set", ["k"], [data]) == [True]
    assert ask(b, "exists", ["k"]) == [False]
    assert ask(b, "get", ["k"], [out]) == [False]
    assert ask(b, "delete", ["k"]) == [False]
    assert not out.any()
    assert ask(b, "set", ["k"], [data + 1]) == [True]
    assert ask(a, "get", ["k"], [out]) == [True]
    assert (out == 7).all()
    with pytest.raises(kvpool.InvalidArgument):
        client_of(tenant=None)


def test_I01_a_salt_in_the_name_is_part_of_the_key(pool, ns):
    assert not set(ns.named([f"model@0@{i}@salt1" for i in range(99)])) & set(
        ns.named([f"model@0@{i}@salt2" for i in range(99)])
    )


def test_I02_what_one_deployment_clears_the_other_keeps(pool, identity):
    x, y = (pool.namespace(dataclasses.replace(identity, extra=(("deployment", name),))) for name in "xy")
    for each in (x, y):
        fill(each, each.keys(range(160)))
    held = y.match(y.keys(range(160)))
    events = pool.events()
    events.poll()
    assert x.remove(x.keys(range(160))) == 10
    mine = set(y.keys(range(160)))
    assert not [event for event in events.poll() if event.key in mine]
    assert y.contains(y.keys(range(160))).all()
    assert pool.check().pins == 10
    assert all(np.array_equal(view, payload(key)) for key, view in zip(y.keys(range(160)), held.views, strict=True))


def test_I02_pinned_blocks_of_one_are_safe_from_a_flood_of_the_other(pool, identity):
    """Tenants share the order of eviction, which the contract says; what one holds no other takes."""
    x, y = pool.namespace(identity, "x"), pool.namespace(identity, "y")
    fill(y, y.keys(range(160)))
    with y.match(y.keys(range(160))) as held:
        for i in range(20):
            fill(x, x.keys(range(10000 * i, 10000 * i + 16 * 50)))
        assert all(np.array_equal(v, payload(k)) for k, v in zip(y.keys(range(160)), held.views, strict=True))
        assert y.contains(y.keys(range(160))).all()


def test_I03_after_new_weights_nothing_of_before_is_found(pool, identity):
    """A new revision is a new name; what began under the old one is never published under the new."""
    old, new = (pool.namespace(dataclasses.replace(identity, revision=revision)) for revision in "12")
    fill(old, old.keys(range(160)))
    begun = old.reserve(old.keys(range(160, 320)))
    with old.match(old.keys(range(160))) as loading:
        assert not new.contains(new.keys(range(320))).any()
        for view in begun.views:
            view[:] = 1
        begun.publish()
        assert not new.contains(new.keys(range(320))).any()
        assert np.array_equal(loading.views[0], payload(old.keys(range(16))[0]))
    assert len(new.match(new.keys(range(320)))) == 0


@pytest.fixture
def refs(make_pool, identity):
    """References that are no good, by what is wrong with them, of a pool that has live ones too."""
    pool = make_pool()
    ns = pool.namespace(identity)
    keys = ns.keys(range(160))
    fill(ns, keys)
    live = [int(ref) for ref in ns.lookup(keys)]
    freed = ns.keys(range(7, 23))
    fill(ns, freed)
    gone = int(ns.lookup(freed)[0])
    ns.remove(freed)
    with kvpool.create("memfd:", blocks=64, block="4KiB") as other:
        theirs = other.namespace(identity)
        for _ in range(3):
            fill(theirs, theirs.keys(range(32)))
            foreign = int(theirs.lookup(theirs.keys(range(32)))[1])
            theirs.remove(theirs.keys(range(32)))
    reserved = ns.reserve(1)
    number = int(reserved.blocks[0])
    wrong = {
        "nothing": 0,
        "freed": gone,
        "of another pool": foreign,
        "reserved": live[0] & ~0x1FFFFFFF | number,
        "no such block": live[0] & ~0x1FFFFFFF | 0x1FFFFFFE,
        "no such class": live[0] | 7 << 29,
        "truncated": live[0] & 0xFFFFFFFF,
        "all ones": (1 << 64) - 1,
        **{f"bit {bit}": live[0] ^ 1 << bit for bit in range(32, 62)},
    }
    return pool, live, wrong


def test_I05_a_reference_that_is_not_whole_is_refused(refs):
    pool, live, wrong = refs
    for what, ref in wrong.items():
        for batch in ([ref], [live[1], ref, live[2]]):
            with pytest.raises((kvpool.Stale, kvpool.OutOfRange, kvpool.InvalidArgument)):
                pool.pin(batch)
                pytest.fail(what)
    assert pool.check().pins == 0
    assert len(pool.pin(live)) == 10


def test_I05_a_reference_of_before_a_restart_is_stale_or_the_same_block(tmp_path, identity):
    path = f"file:{tmp_path}/pool"
    with kvpool.create(path, blocks=64, block="4KiB") as pool:
        ns = pool.namespace(identity)
        fill(ns, ns.keys(range(160)))
        refs = ns.lookup(ns.keys(range(160))).tolist()
    with kvpool.open(path) as pool:
        ns = pool.namespace(identity)
        with pool.pin(refs) as hit:  # a restart is no new life of the pool
            assert all(np.array_equal(v, payload(k)) for k, v in zip(ns.keys(range(160)), hit.views, strict=True))
        ns.remove(ns.keys(range(160)))
        fill(ns, ns.keys(range(7, 7 + 16 * 64)))
        for ref in refs:
            with pytest.raises(kvpool.Stale):
                pool.pin([ref])


def test_I06_a_load_that_fails_in_part_is_told_by_object(pool, client_of):
    """What could not be loaded is listed; its buffer holds nothing of anybody else."""
    client = client_of()
    keys = [f"k{i}" for i in range(6)]
    data = [np.full(9000, i + 1, np.uint8) for i in range(6)]
    assert ask(client, "set", keys, data) == [True] * 6
    for i in (0, 2, 5):
        assert ask(client, "delete", keys[i : i + 1]) == [True]
    out = [np.full(9000, 99, np.uint8) for _ in keys]
    got = ask(client, "get", keys, out)
    assert got == [False, True, False, True, True, False]
    assert all(np.array_equal(o, d) if g else (o == 99).all() for o, d, g in zip(out, data, got, strict=True))


def test_I07_names_and_rights_of_two_users(make_pool, uri, rack):
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    make_pool()
    path, name = rack.path(uri), uri.removeprefix("shm:")
    child = os.fork()
    if child == 0:
        status = 0
        try:
            os.setuid(65534)
            with kvpool.create(uri, "1MiB", "4KiB"):  # the same name is another user's own
                pass
            kvpool.remove(uri)
            try:
                kvpool.open(f"{uri}?uid=0")
                status = 1
            except kvpool.PermissionDenied as error:
                status = 0 if path in str(error) else 2
        except BaseException:
            status = 3
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    with kvpool.create(f"shm:{name}-2?mode=0660", "1MiB", "4KiB"):
        assert stat.S_IMODE(os.stat(f"{path}-2").st_mode) == 0o660
    kvpool.remove(f"shm:{name}-2")


# ---- our own ----


def test_IX1_what_a_block_held_before_is_not_read_behind_a_short_put(make_pool, identity):
    """A block that another tenant had filled is put with fewer bytes: nobody reads the rest as it was."""
    pool = make_pool(blocks=8)
    secret, other = pool.namespace(identity, "secret"), pool.namespace(identity, "other")
    secret.put(secret.keys(range(128)), np.full((8, 4096), 0x5E, np.uint8))
    keys = other.keys(range(128))
    assert other.put(keys, [b"x" * 100] * 8) == 8
    out = np.zeros((8, 4096), np.uint8)
    assert other.get_into(keys, out).all()
    assert (out[:, :100] == ord("x")).all()
    assert not out[:, 100:].any()
    parts = kvpool.Parts([(out.ctypes.data, 4096, 10, 0), (out.ctypes.data, 4096, 10, 2000)])  # with a gap
    other.remove(keys)
    secret.put(secret.keys(range(128)), np.full((8, 4096), 0x5E, np.uint8))
    secret.remove(secret.keys(range(128)))
    assert other.put_parts(keys, parts, range(8)) == 8
    assert other.get_into(keys, out).all()
    assert not (out == 0x5E).any()


def test_IX2_an_adapter_that_fails_at_one_pool_does_not_serve_another(make_pool, uri, identity):
    """A door whose pool was made anew by somebody with another layout refuses it, and says so, and goes on missing."""
    pool = make_pool(uri=uri)
    opened = []

    def demand(each):
        if each.block_bytes != (4096,):
            raise kvpool.InvalidArgument("another layout")
        opened.append(each.info["uuid"])

    door = Door(uri, opened=demand, pause=0)
    kvpool.remove(uri, force=True)
    with kvpool.create(uri, blocks=8, block="8KiB"):
        assert [door.run(lambda each: each.evict(1), "miss") for _ in range(3)] == ["miss"] * 3
        assert door.misses["InvalidArgument"] >= 1
    kvpool.remove(uri, force=True)
    with kvpool.create(uri, blocks=8, block="4KiB") as right:
        assert eventually(lambda: door.run(lambda each: each.info["uuid"], None) == right.info["uuid"])
        assert opened == [pool.info["uuid"], right.info["uuid"]]
    door.close()
