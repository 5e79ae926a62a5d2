"""Cases of making, opening, closing and removing: the pool stays, what was lent comes back, on every way out."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import eventually, fill, payload, said

import kvpool
from kvpool.bindings.lmcache import PoolClient

ENDS = {"normally": "", "by an exception": "raise SystemExit(3)", "by kill -9": "die()"}


@pytest.mark.racks("sim-2")
@pytest.mark.parametrize("how", ENDS)
def test_L01_who_only_attached_takes_nothing_along(pool, ns, uri, rack, start, how):
    keys = ns.keys(range(160))
    fill(ns, keys)
    gone = start("pool = kvpool.open(sys.argv[1]); pool.namespace(identity); say('in')\n" + ENDS[how], uri)
    out, err = gone.communicate(timeout=60)
    assert (out, gone.returncode) == ("in\n", {"normally": 0, "by an exception": 3, "by kill -9": -9}[how])
    assert "leaked" not in err
    assert "Warning" not in err
    with ns.match(keys) as hit:
        assert all(np.array_equal(view, payload(key)) for key, view in zip(keys, hit.views, strict=True))
    with rack.open(uri) as third:
        assert third.namespace(ns.identity).contains(keys).all()


@pytest.mark.parametrize("mode", ["shm", "sim", "memfd"])
def test_L02_killed_and_made_again_fills_no_tmpfs(container, mode):
    """Room for one pool and a fifth: a fixed name and an unnamed pool, made again after every user was killed."""
    options = {"size": "8MiB", "block": "64KiB", "hosts": 2} if mode == "sim" else {"size": "32MiB", "block": "64KiB"}
    uri = "memfd:" if mode == "memfd" else f"{mode}:fixed"
    body = f"""
import os, signal, kvpool
pool = kvpool.create({uri!r}, replace={mode != "memfd"}, **{options!r})
pool.namespace(kvpool.Identity("m", "1", "f", "l")).put([b"k" * 16], [bytes(65536)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    program = f"""
import subprocess
for _ in range(5):
    done = subprocess.run([sys.executable, "-P", "-c", {body!r}], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    room = os.statvfs("/dev/shm")
    say((room.f_blocks - room.f_bfree) * room.f_frsize >> 20)
"""
    out = container(40, program)
    used = [int(each) for each in out.split()]
    assert max(used) <= 33
    assert max(used) - min(used) <= 1


def test_L03_a_dead_consumer_stops_no_producer(pool, ns, uri, rack, start):
    """The hand-off is the pool itself: what a killed consumer had pinned comes back, and nothing else was made."""
    keys = ns.keys(range(160))
    fill(ns, keys)
    consumer = start(
        "pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); hit = ns.match(ns.keys(range(160)))\n"
        "say(len(hit)); time.sleep(60)",
        uri,
    )
    assert consumer.stdout.readline() == "10\n"
    before = sorted(name for name in os.listdir("/dev/shm") if uri[4:] in name)
    consumer.kill()
    consumer.wait()
    events, told = pool.events(), set()
    for i in range(1000):
        assert fill(ns, ns.keys(range(1000 + 16 * i, 1016 + 16 * i))) == 1
        told |= {event.kind for event in events.poll()}
    assert rack.recovered().pins == 0
    assert sorted(name for name in os.listdir("/dev/shm") if uri[4:] in name) == before
    assert "recovered" in told | {event.kind for event in events.poll()}


def test_L05_memory_and_descriptors_go_with_the_last_user(container):
    out = container(
        64,
        """
        import gc, subprocess
        def free():
            return os.statvfs("/dev/shm").f_bfree
        def mapped():
            return "kvpool" in open("/proc/self/maps").read()
        base = free()
        owner = kvpool.create("shm:x", "32MiB", "16KiB"); pool = kvpool.open("shm:x"); ns = pool.namespace(identity)
        for i in range(1000):
            keys = ns.keys(range(16 * i, 16 * i + 16))
            fill(ns, keys)
            ns.match(keys).release()
        child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
        said = [any("kvpool" in os.readlink(f"/proc/{child.pid}/fd/{n}") for n in os.listdir(f"/proc/{child.pid}/fd"))]
        said.append(mapped())
        pool.close(); owner.close(); kvpool.remove("shm:x")
        del pool, ns, keys, owner; gc.collect()
        say(*said, mapped(), base - free())
        child.kill()
        """,
    )
    assert out.split() == ["False", "True", "False", "0"]


def test_L06_old_views_outlive_the_pool_that_is_made_anew(uri, start):
    body = """
        def new():
            pool = kvpool.create(sys.argv[1], blocks=64, block="4KiB", replace=False)
            fill(pool.namespace(identity), keys)
            return pool
        maker = kvpool.create("memfd:", blocks=8, block="4KiB").namespace(identity)
        keys = maker.keys(range(160)); told = set()
        owner = new()
        for _ in range(200):
            reader = kvpool.open(sys.argv[1]); ns = reader.namespace(identity)
            hit = ns.match(keys); views = hit.views
            going = threading.Event()
            def work():
                out = np.zeros((10, 4096), np.uint8)
                while not going.is_set():
                    try:
                        got = ns.get_into(keys, out)
                        assert all(np.array_equal(o, payload(k)) for o, k, g in zip(out, keys, got) if g)
                    except kvpool.Error as error:
                        told.add(type(error).__name__)
            thread = threading.Thread(target=work); thread.start()
            kvpool.remove(sys.argv[1], force=True); owner.close(); owner = new()
            assert all(np.array_equal(v, payload(k)) for v, k in zip(views, keys))
            try:
                ns.match(keys); say("found")
            except kvpool.Replaced:
                pass
            going.set(); thread.join(); reader.close()
        say(*told or ["-"])
    """
    assert said(start(body, uri), 120).strip() in ("Replaced", "-")


def resources():
    mapped = sum("kvpool" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped


def test_L08_a_connector_that_is_shut_down_leaves_nothing(pool, uri):
    made = []  # what is closed is closed, not only forgotten

    def once(used):
        client = PoolClient(uri, revision="1", dtype="bfloat16", chunk_tokens=256)
        if used:
            client.submit_batch_set(["a"], [b"x" * 9000])
            client.submit_batch_exists(["a"])
        client.close()
        client.close()
        made.append(client)

    def alive():
        return sum(worker["state"] == "alive" for worker in pool.stats()["worker_list"])

    once(True)
    gc.collect()
    before = *resources(), alive()
    for i in range(200):
        once(i % 2)
    gc.collect()
    assert (*resources(), alive()) == before
    assert pool.check().pins == 0


VIEWS = {
    "numpy": lambda pool, hit: hit.views[0],
    "memoryview": lambda pool, hit: memoryview(hit.views[0]),
    "dtype": lambda pool, hit: hit.views_as(np.float16)[0],
    "rows": lambda pool, hit: pool.tensor()[hit.blocks[0]],
}


@pytest.mark.parametrize("form", VIEWS)
@pytest.mark.parametrize("order", [*itertools.permutations(("release", "close", "forget"))], ids="-".join)
def test_L10_views_are_readable_whatever_ends_first(uri, rack, identity, form, order):
    with rack.create_alone(uri, blocks=64) as pool:
        ns = pool.namespace(identity)
        keys = ns.keys(range(16))
        fill(ns, keys)
        hit = ns.match(keys)
        view = VIEWS[form](pool, hit)
        for step in order:
            if step == "release":
                hit.release()
            elif step == "close":
                pool.close()
            else:
                del hit, ns
                hit = kvpool.open(uri).pin([])
            gc.collect()
            assert bytes(view) == payload(keys[0]).tobytes()
    kvpool.remove(uri, force=True)
    assert bytes(view) == payload(keys[0]).tobytes()


@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "handled"])
def test_L11_a_signal_ends_eight_busy_threads_cleanly(pool, ns, uri, rack, start, how):
    body = f"""
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity)
        def handler(number, frame):
            say("handled"); sys.exit(7)
        if {how!r} == "handled":
            signal.signal(signal.SIGTERM, handler)
        def work(i):
            keys, out = ns.keys(range(i * 160, i * 160 + 64)), np.zeros((4, 4096), np.uint8)
            while True:
                ns.put(keys, out); ns.get_into(keys, out); ns.remove(keys)
        for i in range(8):
            threading.Thread(target=work, args=(i,), daemon=True).start()
        say("ready")
        while True:
            time.sleep(1)
    """
    expected = {"SIGINT": -signal.SIGINT, "SIGTERM": -signal.SIGTERM, "handled": 7}[how]
    rng = random.Random(how)
    for _ in range(3):
        process = start(body, uri)
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGINT if how == "SIGINT" else signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == expected, err
        assert "Segmentation" not in err
        assert ("handled" in out) == (how == "handled")
        assert rack.recovered()
    assert fill(ns, ns.keys(range(9000, 9000 + 16 * 60))) == 60


@pytest.mark.parametrize("first", [0, 1])
def test_L12_two_handles_of_one_process_are_independent(pool, ns, uri, rack, identity, first):
    keys = ns.keys(range(160))
    fill(ns, keys)
    handles = [rack.open(uri), rack.open(uri)]
    hits = [handle.namespace(identity).match(keys) for handle in handles]
    handles[first].close()
    with pytest.raises(kvpool.Closed):
        handles[first].namespace(identity).match(keys)
    assert pool.check().pins == 10
    assert all(np.array_equal(v, payload(k)) for v, k in zip(hits[1 - first].views, keys, strict=True))
    handles[1 - first].close()
    assert pool.check().pins == 0
    assert ns.contains(keys).all()


BAD = [
    {"block": 0},
    {"blocks": -1},
    {"policy": "none"},
    {"lease": -1},
    {"threads": -1},
    {"workers": 1000},
    {"uri": "posix:x"},
    {"uri": "shm:" + "x" * 300},
    {"size": "8TiB", "blocks": None},
]


def test_L14_a_create_that_fails_leaves_nothing(uri):
    class Broken(Exception):
        pass

    def failing(step):
        def progress(done, total):
            if done >= total * step:
                raise Broken

        return progress

    wrong = [{"progress": failing(step)} for step in (0, 0.5, 1)] + BAD
    good = {"blocks": 9000, "block": "64KiB"}
    gc.collect()
    before, names = resources(), set(os.listdir("/dev/shm"))
    for options in wrong:
        with pytest.raises((kvpool.Error, Broken)):
            kvpool.create(**{"uri": uri, **good, **options})
        assert {name for name in set(os.listdir("/dev/shm")) - names if uri[4:] in name} == set(), options
    with pytest.raises(kvpool.InvalidArgument, match="NUMA"):
        kvpool.create(uri + "?node=63", **good)
    gc.collect()
    assert resources() == before
    with kvpool.create(uri, blocks=64, block="4KiB") as pool:
        assert pool.check().clean


# ---- our own ----


def test_LX1_a_forked_child_that_exits_politely_leaves_the_parents_things(pool, uri, rack, start):
    """Python's atexit runs in the child too; pins, a reservation and the slot are the parent's."""
    body = """
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity)
        keys = ns.keys(range(160)); fill(ns, keys)
        hit = ns.match(keys); new = ns.reserve(ns.keys(range(7, 87)))
        new.views[0][:] = 1
        child = os.fork()
        if child == 0:
            del hit, new
            sys.exit(0)  # with everything that an interpreter does at its end
        assert os.waitpid(child, 0)[1] == 0
        assert pool.check().pins == 10
        same = all(np.array_equal(v, payload(k)) for k, v in zip(keys, hit.views))
        say(new.publish(), pool.check().blocks["reserved"], same)
    """
    assert said(start(body, uri)).split() == ["5", "0", "True"]
    assert rack.recovered().pins == 0


def test_LX2_a_name_that_was_deleted_by_hand(pool, ns, uri, rack, identity):
    """Somebody cleans up /dev/shm: who has the pool open goes on, and the name can be taken anew."""
    keys = ns.keys(range(160))
    fill(ns, keys)
    os.unlink(rack.path(uri))
    assert ns.contains(keys).all()
    with pytest.raises(kvpool.NotFound):
        kvpool.open(uri)
    with kvpool.create(uri, blocks=64, block="4KiB") as anew:
        assert not anew.namespace(identity).contains(keys).any()
        with contextlib.suppress(kvpool.Replaced):  # or told that another has its name
            assert ns.contains(keys).all()
    assert eventually(lambda: pool.check().clean)
