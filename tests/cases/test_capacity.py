"""Cases of room: what is promised is there, what is full says so and lets go of nothing, what was lent comes back."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time

import numpy as np
import pytest
from conftest import eventually, fill, payload, said

import kvpool
from kvpool.bindings.lmcache import PoolClient


def test_P01_what_a_lookup_pinned_goes_whatever_follows(pool, uri):
    """Loaded, loaded in part, with another length, never: at once, or when its time is over."""
    client = PoolClient(uri, revision="1", dtype="bfloat16", chunk_tokens=256, hold_seconds=0.2)
    keys = [f"k{i}" for i in range(5)]
    numbers = iter(range(1, 1000))

    def done(number):
        assert number == next(numbers)
        assert eventually(lambda: [each for each in client.drain_completions() if each[0] == number], 30)

    done(client.submit_batch_set(keys, [np.ones(9000, np.uint8)] * 5))
    for loaded in (5, 3, 1, 0):
        for size in (9000, 8000):
            done(client.submit_batch_exists(keys))
            done(client.submit_batch_get(keys[:loaded], [np.zeros(size, np.uint8)] * loaded))
            assert pool.check().pins <= 3 * (5 - loaded)
    assert eventually(lambda: client.drain_completions() or pool.check().pins == 0, 20)
    client.close()
    assert pool.check().pins == 0


@pytest.mark.parametrize("percent", [0, 25, 50, 75, 100])
def test_P02_pinned_stay_and_the_others_go_from_index_and_memory(pool, ns, percent):
    keys = ns.keys(range(16 * 64))
    for part in (keys[i : i + 8] for i in range(0, 64, 8)):
        fill(ns, part)
    kept = keys[: 64 * percent // 100]
    with ns.match(kept) as hit:
        for _ in range(5):
            pool.evict(1000)
            report = pool.check()
            assert report.clean
            assert report.entries == report.blocks["live"] == ns.contains(keys).sum() == len(kept)
            assert (
                report.blocks["live"] + report.blocks["free"] + report.blocks["cached"] + report.blocks["absent"] == 64
            )
        assert all(np.array_equal(v, payload(k)) for k, v in zip(kept, hit.views, strict=True))


def test_P03_large_blocks_find_room_after_hours_of_small_ones(make_pool, identity):
    pool = make_pool(size="24MiB", block=["4KiB", "1MiB"])
    small, large = pool.namespace(identity), pool.namespace(identity, block_class=1)
    rng, failed = random.Random(3), 0
    for i in range(3000):
        if rng.random() < 0.9:
            keys = small.named([f"s{i}/{j}" for j in range(rng.randrange(1, 20))])
            small.put(keys, np.ones((len(keys), 4096), np.uint8), timeout=0)
        else:
            try:
                large.put(large.named([f"l{i}"]), np.ones((1, 1 << 20), np.uint8), timeout=0)
            except kvpool.PoolFull:
                failed += 1
    assert failed == 0
    assert pool.check().clean
    assert sum(part["segments"] for part in pool.stats()["classes"]) <= pool.info["segments"]
    pool.evict(1 << 20), pool.evict(1 << 20, 1)
    most = pool.info["classes"][1]["blocks"]
    with large.reserve(most) as everything:  # all of it, in the largest size
        assert len(everything) == most


def test_P04_memory_is_backed_or_refused_at_create(container):
    out = container(
        40,
        """
        try:
            kvpool.create("shm:big", "64MiB", "64KiB"); say("made")
        except kvpool.NoSpace as error:
            say("refused", "missing" in str(error), os.listdir("/dev/shm"))
        pool = kvpool.create("shm:x", "24MiB", "64KiB")
        with open("/dev/shm/other", "wb") as other:  # somebody else takes the rest
            try:
                while True: other.write(bytes(1 << 20)); other.flush()
            except OSError:
                pass
        joiner = kvpool.open("shm:x")  # asks for no room
        with joiner.namespace(identity).reserve(joiner.info["classes"][0]["blocks"]) as new:
            for view in new.views: view[:] = 1  # every page
            say(len(new) > 300)
        """,
    )
    assert out.split("\n")[:2] == ["refused True []", "True"]


def test_P04_twin_memory_of_hosts_is_backed_too(container):
    """The memory of a simulated host is an object of its own: it is refused where it cannot be had, not at a store."""
    out = container(
        24,
        """
        try:
            pool = kvpool.create("sim:big", "16MiB", "64KiB", hosts=2)
            with pool.namespace(identity).reserve(100) as new:
                for view in new.views: view[:] = 1
                say(new.publish(pool.namespace(identity).keys(range(1600))))
        except (kvpool.NoSpace, kvpool.PoolFull) as error:
            say(type(error).__name__)
        """,
    )
    assert out.split()[0] in ("NoSpace", "100", "PoolFull")


def test_P05_sixty_four_megabytes_of_shm_say_what_to_do(container):
    out = container(
        64,
        """
        import subprocess
        try:
            kvpool.create("shm:x", "1GiB", "64KiB")
        except kvpool.NoSpace as error:
            say("missing" in str(error), "memfd:" in str(error), "file:" in str(error))
        command = [sys.executable, "-P", "-m", "kvpool.tools.main", "create", "shm:x", "--size", "1GiB"]
        done = subprocess.run(command, capture_output=True, text=True)
        say(done.returncode > 0, "missing" in done.stderr, "memfd:" in done.stderr, len(done.stderr.splitlines()) < 4)
        command = [sys.executable, "-P", "-m", "kvpool.tools.main", "doctor"]
        say("64 MiB of 64 MiB free" in subprocess.run(command, capture_output=True, text=True).stdout)
        """,
    )
    assert "False" not in out
    assert len(out.split()) == 8


def test_P06_evicting_more_than_there_is_stops_when_it_is_empty(pool, ns):
    for part in (ns.keys(range(16 * i, 16 * i + 128)) for i in range(0, 64, 8)):
        fill(ns, part)
    evicted = []

    def work():
        evicted.append(pool.evict(1 << 40))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(evicted) == pool.stats()["evicted"] <= 64
    assert pool.evict(1 << 40) == 0
    assert all(
        value >= 0 for name, value in pool.stats().items() if isinstance(value, int) and not isinstance(value, bool)
    )
    assert fill(ns, ns.keys(range(9, 9 + 16 * 64))) == 64


def test_P07_a_constant_live_set_needs_constant_memory(uri, rack, start):
    body = """
        pool = rack.create_alone(sys.argv[1], blocks=64); ns = pool.namespace(identity)
        data, out = np.zeros((8, 4096), np.uint8), np.zeros((8, 4096), np.uint8)
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096
        def work(count):
            for i in range(count):
                keys = ns.keys(range(16 * (i % 900), 16 * (i % 900) + 128))
                ns.put(keys, data); ns.get_into(keys, out); ns.lookup(keys)
                with ns.match(keys) as hit: hit.views
                with ns.reserve(2) as new: new.views
                pool.pin([])
        work(2000); before = resident()
        work(10000)
        say((resident() - before) >> 10, pool.info["metadata_bytes"] > 0)
    """
    grown, told = said(start(body, uri), 200).split()
    assert int(grown) < 2048, "KiB"
    assert told == "True"


def test_P09_a_wait_for_room_ends_and_can_be_interrupted(pool, ns, uri, start):
    held = ns.reserve(64)
    for timeout in (0, 0.05, None):
        with pytest.raises(kvpool.PoolFull, match=r"pinned or reserved|no block"):
            ns.reserve(ns.keys(range(16)), timeout=timeout)
    waiting = start(
        "pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); say('in')\n"
        "try:\n    ns.reserve(ns.keys(range(16)), timeout=1000)\nexcept KeyboardInterrupt:\n    say('interrupted')",
        uri,
    )
    assert waiting.stdout.readline() == "in\n"
    time.sleep(0.2)
    pool.stats()  # nobody who waits holds a lock
    assert ns.lookup(ns.keys(range(16))).tolist() == [0]
    waiting.send_signal(signal.SIGINT)
    assert said(waiting) == "interrupted\n"
    held.withdraw()


def test_P10_many_loads_that_cannot_all_have_room_all_end(make_pool, identity):
    """Thirty-two want eight blocks each of forty-four: all or nothing, so none keeps some while it waits for the rest.

    Four are over when five have theirs: who finds only those gives them back.
    """
    pool = make_pool(blocks=44)
    ns, done = pool.namespace(identity), []

    def load(number):
        try:
            with ns.reserve(ns.named([f"{number}/{i}" for i in range(8)]), timeout=30) as new:
                time.sleep(0.01)
                done.append(len(new.views))
        except kvpool.PoolFull:
            done.append(0)

    threads = [threading.Thread(target=load, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert done == [8] * 32
    assert pool.check().blocks["reserved"] == 0


def test_P11_when_all_is_pinned_a_put_is_refused_and_counted(pool, ns):
    keys = ns.keys(range(16 * 64))
    for part in (keys[i : i + 8] for i in range(0, 64, 8)):
        fill(ns, part)
    with ns.match(keys) as hit:
        before = pool.stats()
        with pytest.raises(kvpool.PoolFull):
            ns.put(ns.keys(range(5, 21)), [bytes(4096)], timeout=0)
        after = pool.stats()
        assert after["full"] > before["full"]
        assert after["evicted"] == before["evicted"]
        assert after["classes"][0]["live"] == 64
        assert all(np.array_equal(v, payload(k)) for k, v in zip(keys, hit.views, strict=True))


def test_P13_usage_is_what_is_cached_and_what_is_live(pool, ns):
    rng = random.Random(13)
    held = []
    for i in range(500):
        end = rng.choice(["finish", "abort", "preempt"])
        keys = ns.keys(range(160 * (i % 30), 160 * (i % 30) + 48))
        hit = ns.match(keys)
        new = ns.reserve(keys[len(hit) :])
        if end == "finish":
            new.publish()
            hit.release()
        elif end == "abort":
            new.withdraw()
            hit.release()
        else:
            held.append((hit, new))
            if len(held) > 3:
                for part in held.pop(0):
                    part.release() if isinstance(part, kvpool.Hit) else part.withdraw()
        report = pool.check()
        assert report.clean
        assert report.blocks["reserved"] == sum(len(each[1]) for each in held if each[1].is_open)
        assert report.pins == sum(len(each[0]) for each in held)
        assert 0 <= report.blocks["live"] == report.entries <= 64
        assert sum(report.blocks.values()) == 64


# ---- our own ----


def test_PX1_room_that_was_refused_once_is_not_lost(pool, ns):
    """A reservation of more than there is gives back all that it had gathered, however often it fails."""
    held = ns.reserve(40)
    for _ in range(200):
        with pytest.raises(kvpool.PoolFull):
            ns.reserve(25, timeout=0)
    with ns.reserve(24, timeout=0) as rest:
        assert len(rest) == 24
    held.withdraw()
    assert pool.check().blocks["reserved"] == 0
    assert len(ns.reserve(64)) == 64


def test_PX2_pins_run_out_in_one_worker_only(make_pool, identity, uri):
    """A reader that pins all that it may keeps no other from pinning, and frees its slots one by one."""
    pool = make_pool(blocks=4096, block="4KiB")
    ns = pool.namespace(identity)
    most = pool.info["pin_slots"]
    keys = ns.named([str(i) for i in range(most + 64)])
    for i in range(0, len(keys), 64):
        ns.put(keys[i : i + 64], np.zeros((len(keys[i : i + 64]), 4096), np.uint8))
    hit = ns.match(keys)
    assert len(hit) == most  # as far as they reach
    with pytest.raises(kvpool.NoPins):
        ns.match(keys[most:])
    with kvpool.open(uri) as other:
        assert len(other.namespace(identity).match(keys[most:])) == 64
    hit.release()
    gc.collect()
    assert len(ns.match(keys[most:])) == 64
