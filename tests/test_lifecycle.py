"""Processes come and go, politely or not: nothing is lost, nothing leaks, nobody waits for the dead."""

import contextlib
import os
import pathlib
import random
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from conftest import eventually, fill, payload

import kvpool

pytestmark = pytest.mark.racks("sim-1", "sim-2", "sim-4")

PHASES = {
    "reserved": "new = ns.reserve(keys); die()",
    "half filled": "new = ns.reserve(keys); new.views[0][:] = 1; die()",
    "filled": "new = ns.reserve(keys)\nfor k, v in zip(keys, new.views): v[:] = payload(k)\ndie()",
    "published": "fill(ns, keys); die()",
    "pinning": "fill(ns, keys); hit = ns.match(keys); die()",
    "pinning removed": "fill(ns, keys); hit = ns.match(keys); ns.remove(keys); die()",
    "withdrawn": "new = ns.reserve(keys); new.withdraw(); die()",
    "joined": "die()",
}


@pytest.mark.parametrize("phase", PHASES)
def test_kill_in_each_phase(pool, ns, uri, rack, start, phase):
    keys = ns.keys(range(160))
    killed = start(
        "pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); keys = ns.keys(range(160))\n" + PHASES[phase],
        uri,
    )
    assert killed.wait(30) == -signal.SIGKILL
    report = rack.recovered()
    assert report, rack.report()
    assert (report.pins, report.leaked, report.blocks["reserved"]) == (0, 0, 0)
    rack.settle()
    kept = ns.contains(keys)
    assert kept.all() if phase in ("published", "pinning") else not kept.any()
    assert rack.count("recoveries") == 1
    with ns.match(keys) as hit:
        assert all(np.array_equal(v, payload(k)) for k, v in zip(keys, hit.views, strict=False))
    assert fill(ns, ns.keys(range(7, 7 + 16 * 64))) == 64


def test_killed_while_all_work(pool, uri, rack, start):
    """Random kills among random work, for a while; every byte that anybody reads is right."""
    body = """
        import random
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); rng = random.Random(int(sys.argv[2]))
        say("ready")
        while True:
            at = rng.randrange(30) * 16
            keys = ns.keys(range(at, at + 16 * rng.randrange(1, 8)))
            with ns.match(keys) as hit:
                for k, v in zip(keys, hit.views):
                    if not np.array_equal(v, payload(k)):
                        say("WRONG"); die()
                rest = keys[len(hit):]
            try:
                fill(ns, rest)
            except kvpool.PoolFull:
                pass
            if rng.random() < 0.1:
                ns.remove(keys[:2])
    """
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    seeds = iter(range(seed, seed + 1000))
    workers = [start(body, uri, next(seeds)) for _ in range(3)]
    for _ in range(12):
        time.sleep(rng.random() * 0.15)
        victim = workers.pop(rng.randrange(len(workers)))
        victim.kill()
        assert "WRONG" not in victim.communicate()[0]
        workers.append(start(body, uri, next(seeds)))
    for worker in workers:
        worker.kill()
        assert "WRONG" not in worker.communicate()[0]
    report = rack.recovered()
    assert report, rack.report()
    assert report.pins == report.leaked == report.blocks["reserved"] == 0


def test_everybody_dies_and_a_newcomer_recovers(uri, rack, start, identity):
    body = """
        first = sys.argv[2] == "0"
        pool = kvpool.open(sys.argv[1]) if not first else rack.create_alone(sys.argv[1], blocks=64, workers=4)
        ns = pool.namespace(identity); keys = ns.keys(range(160)); fill(ns, keys); hit = ns.match(keys)
        new = ns.reserve(ns.keys(range(int(sys.argv[2]) * 1000 + 5, int(sys.argv[2]) * 1000 + 85)))
        say("ready"); time.sleep(60)
    """
    workers = []
    for i in range(4):
        workers.append(start(body, uri, i))
        assert workers[-1].stdout.readline() == "ready\n"
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
    with rack.open(uri) as pool:
        rack.inhabit(uri)
        report = rack.recovered()
        assert report, rack.report()
        assert (report.pins, report.leaked, report.blocks["live"]) == (0, 0, 10)
        assert pool.namespace(identity).contains(pool.namespace(identity).keys(range(160))).all()


def test_readers_that_die_use_up_nothing(pool, uri, rack, start):
    body = "p = kvpool.open(sys.argv[1]); die()"
    for _ in range(3):
        waiting = [start(body, uri) for _ in range(4)]
        assert all(each.wait(30) == -signal.SIGKILL for each in waiting)
    assert rack.recovered()
    assert sum(worker["state"] != "free" for worker in rack.workers()) == rack.hosts


def test_a_stopped_worker_blocks_nobody(pool, ns, uri, rack, start):
    stopped = start(
        """
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity)
        new = ns.reserve(ns.keys(range(160))); say("ready"); time.sleep(60)
    """,
        uri,
        at=pool,
    )
    assert stopped.stdout.readline() == "ready\n"
    stopped.send_signal(signal.SIGSTOP)
    assert fill(ns, ns.keys(range(16 * 54))) == 54
    with pytest.raises(kvpool.PoolFull):
        ns.reserve(ns.keys(range(3, 3 + 16 * 60)), timeout=0.1)
    assert ns.contains(ns.keys(range(16 * 54))).all()
    assert pool.evict(100) == 54
    stopped.kill()
    stopped.wait()
    assert rack.recovered()
    assert fill(ns, ns.keys(range(3, 3 + 16 * 64))) == 64


@pytest.mark.racks("sim-2")  # watched by processes of its own host: more hosts add nothing
def test_exec_is_a_death(pool, uri, rack, start):
    body = """
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); new = ns.reserve(ns.keys(range(160)))
        os.execv("/bin/sleep", ["sleep", "30"])
    """
    gone = start(body, uri)
    assert eventually(lambda: rack.count("recoveries") == 1, 10)
    report = rack.recovered()
    assert report
    assert report.blocks["reserved"] == 0
    assert gone.poll() is None


EXITS = {
    "normally": "",
    "by an exception": "raise SystemExit(3)",
    "by os._exit": "os._exit(0)",
    "by sys.exit in a with": "sys.exit(0)",
    "with a cycle": "a = [hit, views]; a.append(a); del hit, views",
    "with the pool first": "pool.close(); del pool",
    "with the module torn down": "import builtins; builtins.keep = (hit, views, new, pool)",
    "with a daemon thread reading": (
        "threading.Thread(target=lambda: [v.sum() for _ in range(10**9) for v in views], daemon=True).start()"
    ),
}


@pytest.mark.racks("sim-2")  # more hosts add nothing to it
@pytest.mark.parametrize("how", EXITS)
def test_exit_with_live_views_never_crashes(pool, ns, uri, rack, start, how):
    keys = ns.keys(range(160))
    fill(ns, keys)
    done = start(
        "pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity)\n"
        "keys = ns.keys(range(160)); hit = ns.match(keys)\n"
        "views = hit.views; rows = pool.tensor(); new = ns.reserve(ns.keys(range(5, 85))); wv = new.views\n"
        + EXITS[how],
        uri,
    )
    err = done.communicate(timeout=30)[1]
    assert done.returncode in (0, 3), err
    assert "ignored" not in err
    assert "leaked" not in err
    assert ns.contains(keys).all()
    report = rack.recovered()
    assert report
    assert report.pins == report.blocks["reserved"] == 0


def test_views_survive_their_pool(uri, rack, identity):
    pool = rack.create(uri, blocks=64)
    ns = pool.namespace(identity)
    keys = ns.keys(range(16))
    fill(ns, keys)
    view = ns.match(keys).views[0]
    rows = pool.tensor()
    rack.leave()
    kvpool.remove(uri)
    del pool, ns
    assert np.array_equal(view, payload(keys[0]))
    assert rows.sum() > 0


CALLS = {
    "create": "make().close()",
    "open": "kvpool.open(sys.argv[1]).close()",
    "match": "ns.match(keys).release()",
    "reserve": "ns.reserve(other).withdraw()",
    "reserve in a with": "with_reserve()",
    "publish": "fill(ns, other); ns.remove(other)",
    "put": "ns.put(other, data); ns.remove(other)",
    "get_into": "ns.get_into(keys, data)",
    "contains": "ns.contains(keys)",
    "evict": "pool.evict(1)",
    "waiting": "ns.reserve(ns.keys(range(16 * 64)), timeout=30) if not full else ns.reserve(other, timeout=30)",
    "check": "pool.check()",
    "events": "pool.events().poll()",
    "stats": "pool.stats()",
}


@pytest.mark.racks("sim-2")  # more hosts add nothing to it
@pytest.mark.parametrize("call", CALLS)
def test_interrupts_leak_nothing(pool, uri, rack, start, call):
    """Ctrl-C at random moments: KeyboardInterrupt, not a crash, not a lost block, and the pool goes on."""
    body = f"""
        full = None
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity)
        keys, other = ns.keys(range(160)), ns.keys(range(5, 165))
        data = np.zeros((10, 4096), np.uint8)
        fill(ns, keys)
        def make():
            if not rack.is_sim:
                return kvpool.create("memfd:", "64MiB", "4KiB")
            return kvpool.create(sys.argv[1] + "-other", "64MiB", "4KiB", hosts=rack.hosts, replace=True)
        def with_reserve():
            with ns.reserve(other):
                pass
        if {call!r} == "waiting":
            full = ns.match(keys), ns.reserve(ns.keys(range(9, 9 + 16 * 54)))
        armed = owed = False
        def interrupt(*_):
            global armed, owed
            if armed:
                armed = False
                raise KeyboardInterrupt
            owed = True  # we are still telling of the last one
        signal.signal(signal.SIGINT, interrupt)
        import faulthandler; faulthandler.enable()
        say("ready")
        for _ in range(10):
            try:
                armed = True
                while not owed:
                    {CALLS[call]}
            except KeyboardInterrupt:
                pass
            armed = owed = False
            say("interrupted")
        del full
        import gc; gc.collect()
        report = pool.check()
        print(report.clean, report.pins, report.blocks["reserved"], len(os.listdir("/proc/self/fd")) < 20)
    """
    process = start(body, uri)
    assert process.stdout.readline() == "ready\n", process.communicate()
    rng = random.Random(call)
    stuck = threading.Timer(200, process.send_signal, [signal.SIGABRT])  # then it says where
    stuck.daemon = True
    stuck.start()
    for _ in range(10):
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n", process.communicate()
    stuck.cancel()
    out, err = process.communicate(timeout=30)
    assert out.split() == ["True", "0", "0", "True"], (out, err)
    assert process.returncode == 0, err
    with contextlib.suppress(kvpool.NotFound):
        kvpool.remove(uri + "-other", force=True)
    assert rack.recovered()


def test_no_handles_are_lost(pool, uri, rack):
    def resources():
        with open("/proc/self/maps") as maps:
            mapped = sum("kvpool" in line for line in maps)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), mapped

    before = resources()
    for _ in range(100):
        with rack.open(uri):
            pass
        with pytest.raises(kvpool.Error):
            rack.open(uri + "-none")
        with pytest.raises(kvpool.Exists):
            kvpool.create(uri, "1MiB", "4KiB")
    assert resources() == before


def test_descriptors_do_not_reach_children(pool):
    done = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True)
    assert "kvpool" not in done.stdout


@pytest.mark.not_on("sim-1", "sim-2", "sim-4", reason="simulated pools have a name")
def test_memfd_by_inheritance_and_by_pid(identity, start):
    with kvpool.create("memfd:", blocks=64, block="4KiB") as pool:
        ns = pool.namespace(identity)
        keys = ns.keys(range(160))
        fill(ns, keys)
        child = start(
            "pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); say(len(ns.match(ns.keys(range(160)))))",
            pool.uri,
        )
        assert child.stdout.readline() == "10\n", child.communicate()


def test_no_huge_pages_is_a_clear_refusal():
    with pytest.raises(kvpool.NoSpace, match="huge pages are not free"):
        kvpool.create("hugetlb:2MiB", "4GiB", "64KiB")


@pytest.fixture
def huge_pages():
    """Sixteen reserved huge pages of 2 MiB, if this machine lets us."""
    knob = pathlib.Path("/proc/sys/vm/nr_hugepages")
    before = knob.read_text()
    try:
        knob.write_text(str(int(before) + 16))
    except OSError as error:
        pytest.skip(f"huge pages cannot be reserved here: {error}")
    yield
    knob.write_text(before)


def test_hugetlb(identity, huge_pages):
    with kvpool.create("hugetlb:2MiB", "16MiB", "64KiB") as pool:
        ns = pool.namespace(identity)
        fill(ns, ns.keys(range(160)))
        assert pool.check().clean
        assert pool.stats()["huge_bytes"] == pool.info["bytes"]


def test_all_memory_is_backed_at_create(uri, rack):
    steps = []
    with rack.create(uri, "32MiB", "64KiB", progress=lambda done, total: steps.append((done, total))):
        info = os.stat(rack.path(uri))
        assert info.st_blocks * 512 >= 32 * rack.hosts << 20
    assert steps[-1] == (32 * rack.hosts << 20, 32 * rack.hosts << 20)


def test_a_creator_that_dies_leaves_nothing(uri, rack, start):
    body = """
        def stop(done, total):
            die()
        rack.create(sys.argv[1], "128MiB", "64KiB", progress=stop)
    """
    assert start(body, uri).wait(30) == -signal.SIGKILL
    assert not [entry for entry in os.listdir("/dev/shm") if uri[4:] in entry]
    rack.create(uri, "1MiB", "4KiB").close()


def test_of_two_creators_one_wins(uri, start):
    body = """
        try:
            p = rack.create_alone(sys.argv[1], '4MiB'); say('made'); time.sleep(5)
        except kvpool.Exists:
            say('exists')
    """
    said = sorted(each.stdout.readline() for each in [start(body, uri) for _ in range(4)])
    assert said == ["exists\n"] * 3 + ["made\n"]


@pytest.mark.racks("sim-1", "sim-4")
def test_a_creator_that_comes_too_late_leaves_nothing(rack, container):
    """The name is taken only at the end: who loses it there has memory of its host to give back."""
    said = container(
        512,
        f"""
        rack = Rack({rack.name!r})
        uri, made, go, told = rack.uri("late"), threading.Event(), threading.Event(), []
        def wait(done, total):
            made.set(), go.wait(60)
        def late():
            try:
                rack.create_alone(uri, "4MiB", progress=wait)
            except kvpool.Exists:
                told.append("exists")
        thread = threading.Thread(target=late)
        thread.start()
        made.wait(60)
        with rack.create_alone(uri, "4MiB"):
            go.set(), thread.join(60)
        kvpool.remove(uri, force=True)
        say(told, os.listdir("/dev/shm"))
        """,
    )
    assert said == "['exists'] []\n"
