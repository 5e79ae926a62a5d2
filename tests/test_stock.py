"""Blocks by number: reserved, published while they go on being read, found, released."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

import kvpool

KEYS = [bytes([i + 1]) * 16 for i in range(64)]


def test_published_blocks_stay_until_released(make_pool, identity):
    pool = make_pool(blocks=8)
    other = kvpool.open(pool.uri)
    with pool.stock() as stock, other.stock() as theirs:
        mine = stock.take(4)
        for number in mine:
            pool.writable(0)[number] = number + 1
        assert stock.publish(mine, KEYS[:4]) == [True] * 4
        assert (stock.reserved, stock.pinned) == (0, 4)
        with pytest.raises(kvpool.PoolFull):
            theirs.take(5)  # ours are pinned
        assert len(theirs.take(4)) == 4
        assert [theirs.find(key) for key in KEYS[:4]] == mine
        stock.release(mine)
        with pytest.raises(kvpool.PoolFull):
            theirs.take(1)
        theirs.release(mine)
        assert sorted(theirs.take(4)) == sorted(mine)
        assert stock.find(KEYS[0]) is None
    assert pool.check().clean
    assert pool.check().blocks["reserved"] == 0
    other.close()


def test_a_second_block_of_a_key_stays_reserved(make_pool, identity):
    pool = make_pool(blocks=8)
    other = kvpool.open(pool.uri)
    stock, theirs = pool.stock(), other.stock()
    (first,), (second, third) = stock.take(1), theirs.take(2)
    assert stock.publish([first], KEYS[:1]) == [True]
    assert theirs.publish([second, third], KEYS[:2]) == [False, True]
    assert (theirs.reserved, theirs.pinned) == (1, 1)
    assert theirs.find(KEYS[0]) == first
    pool.writable(0)[second] = 1  # still ours to write
    theirs.give([second])
    assert (theirs.reserved, theirs.pinned) == (0, 2)
    theirs.close()
    theirs.close()
    stock.close()
    assert pool.check().clean
    assert pool.check().pins == 0
    other.close()


def test_found_twice_is_released_once(make_pool):
    pool = make_pool(blocks=4)
    with pool.stock() as stock:
        (number,) = stock.take(1)
        stock.publish([number], KEYS[:1])
        assert stock.find(KEYS[0]) == stock.find(KEYS[0]) == number
        stock.release([number])
        assert pool.check().pins == 0


def test_what_is_not_here(make_pool):
    pool = make_pool(blocks=8)
    with pool.stock() as stock:
        (number,) = stock.take(1)
        for wrong in ([number, number], [(number + 1) % 8], [-1], [1 << 20]):
            with pytest.raises(kvpool.NotOwned):
                stock.give(wrong)
            with pytest.raises(kvpool.NotOwned):
                stock.publish(wrong, KEYS[: len(wrong)])
            with pytest.raises(kvpool.NotOwned):
                stock.release(wrong)
        with pytest.raises(kvpool.InvalidArgument, match="one each"):
            stock.publish([number], KEYS[:2])
        with pytest.raises(kvpool.InvalidArgument, match="all zeros"):
            stock.publish([number], [bytes(16)])
        with pytest.raises(kvpool.InvalidArgument):
            stock.take(-1)
        assert (stock.reserved, stock.pinned) == (1, 0)
        assert stock.publish([number], KEYS[:1]) == [True]
    with pytest.raises(kvpool.Closed):
        stock.take(1)


def test_many_publications_race_with_eviction(make_pool):
    """Two engines that publish, find and evict in a pool that is too small: nobody loses a block that it holds."""
    pool = make_pool(blocks=16)
    other = kvpool.open(pool.uri)
    stocks = [pool.stock(), other.stock()]
    for turn in range(200):
        stock = stocks[turn % 2]
        numbers = stock.take(4)
        for number in numbers:
            pool.writable(0)[number, :8] = turn % 251
        ours = stock.publish(numbers, [turn.to_bytes(8, "little") + bytes([i] * 8) for i in range(1, 5)])
        assert ours == [True] * 4
        assert all((pool.tensor(0)[number, :8] == turn % 251).all() for number in numbers)
        stock.release(numbers)
    for stock in stocks:
        stock.close()
    report = pool.check()
    assert report.clean
    assert report.blocks["live"] == 16
    other.close()


def test_a_dead_engine_gives_everything_back(make_pool):
    pool = make_pool(blocks=16)
    code = f"""
import kvpool, time
stock = kvpool.open({pool.uri!r}).stock()
numbers = stock.take(8)
stock.publish(numbers[:4], [bytes([i + 1]) * 16 for i in range(4)])
print("ready", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"ready\n"
        assert pool.check().pins == 4
        os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while pool.check().pins and time.monotonic() < deadline:
        time.sleep(0.01)
    with pool.stock() as stock:
        assert stock.find(KEYS[3]) is not None
        assert len(stock.take(15)) == 15
