"""The handle that adapters share: trouble with a pool is a miss, and a pool that is made anew is opened again."""

from __future__ import annotations

import os

import pytest

import kvpool
from kvpool.bindings.door import Door, class_for, pool_block_bytes


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """No pause between attempts to open."""
    monkeypatch.setattr("kvpool.bindings.door.REOPEN_S", 0)


def fail(pool):
    raise kvpool.PoolFull("no room")


def test_work_is_done_and_errors_are_misses(pool, uri):
    door = Door(uri)
    assert door.run(lambda pool: pool.uri, None) == uri
    assert door.run(fail, "otherwise") == "otherwise"
    assert door.run(fail, "otherwise") == "otherwise"
    assert door.misses == {"PoolFull": 2}
    with pytest.raises(ZeroDivisionError):  # which is no trouble of the pool
        door.run(lambda pool: 1 / 0, None)
    door.close()
    door.close()
    assert door.run(lambda pool: pool.uri, None) is None


def test_what_can_never_work_is_refused_at_start(pool, uri):
    with pytest.raises(kvpool.NotFound):
        Door("shm:nobody-has-this")
    alive = sum(worker["state"] == "alive" for worker in pool.stats()["worker_list"])

    def refuse(pool):
        raise kvpool.InvalidArgument("no such class")

    with pytest.raises(kvpool.InvalidArgument, match="no such class"):
        Door(uri, opened=refuse)
    assert sum(worker["state"] == "alive" for worker in pool.stats()["worker_list"]) == alive


def test_another_version_is_refused_at_start_and_later_a_miss(tmp_path):
    path = tmp_path / "pool"

    def make(version):
        with kvpool.create(f"file:{path}", block="4KiB", blocks=16):
            pass
        with path.open("r+b") as file:
            file.seek(8)
            file.write(version.to_bytes(8, "little"))

    make(99)
    with pytest.raises(kvpool.VersionMismatch, match="use a newer kvpool"):
        Door(f"file:{path}")
    path.unlink()
    with kvpool.create(f"file:{path}", block="4KiB", blocks=16):
        door = Door(f"file:{path}")
    kvpool.remove(f"file:{path}", force=True)
    make(2)
    for _ in range(2):
        assert door.run(lambda pool: pool.pin([]), None) is None
    assert door.misses == {"Replaced": 1, "VersionMismatch": 1}
    door.close()


def test_a_pool_that_is_made_anew(pool, uri, make_pool):
    seen = []

    def opened(pool):
        if pool.block_bytes != (4096,):
            raise kvpool.InvalidArgument("blocks of another size")
        seen.append(pool.info["uuid"])

    door = Door(uri, opened=opened)
    kvpool.remove(uri, force=True)
    assert door.run(lambda pool: pool.pin([]), None) is None
    assert door.run(lambda pool: pool.pin([]), None) is None
    pool.close()
    with kvpool.create(uri, block="8KiB", blocks=16):
        assert door.run(lambda pool: pool.uri, None) is None  # never blocks of a wrong size
    kvpool.remove(uri, force=True)
    again = make_pool()
    assert door.run(lambda pool: pool.info["uuid"], None) == again.info["uuid"]
    assert len(seen) == 2
    assert {"Replaced", "NotFound", "InvalidArgument"} <= set(door.misses)
    door.close()


def test_a_forked_child_opens_the_pool_itself(pool, uri):
    door = Door(uri)
    child = os.fork()
    if child == 0:
        first = door.run(lambda pool: pool.pin([]) and None, "miss")
        second = door.run(lambda pool: pool.info["self"], "miss")
        os._exit(0 if first == "miss" and isinstance(second, int) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert door.run(lambda pool: pool.uri, None) == uri
    door.close()


def test_the_smallest_class_that_fits(make_pool):
    pool = make_pool(block=["4KiB", "16KiB", "8KiB"], size="1MiB")
    assert class_for(pool, 1, "it") == 0
    assert class_for(pool, 4097, "it") == 2
    assert class_for(pool, 16384, "it") == 1
    with pytest.raises(kvpool.InvalidArgument, match=r"a page needs blocks of 16385 bytes.*--block 16448"):
        class_for(pool, 16385, "a page")
    assert pool_block_bytes(1) == 4096
