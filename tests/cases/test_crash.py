"""Cases of kill -9: who dies in the middle holds up nobody, and what it left is whole, gone, or given back."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import eventually, fill, payload, said, script

import kvpool
from kvpool.testing import Rack

OPEN = "pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); keys = ns.keys(range(160))\n"
STEPS = {
    "before a write": "new = ns.reserve(keys); die()",
    "in the middle": "new = ns.reserve(keys); new.fill(0, payload(keys[0])); new.views[1][:9] = 1; die()",
    "before commit": "new = ns.reserve(keys)\nfor k, v in zip(keys, new.views): v[:] = payload(k)\ndie()",
    "by put": "threading.Timer(0.001, die).start(); data = [payload(k) for k in keys]\n"
    "while True: ns.put(keys, data); ns.remove(keys)",
}


@pytest.mark.racks("sim-2")
@pytest.mark.parametrize("step", STEPS)
def test_C01_a_writer_that_dies_leaves_no_key_in_between(pool, ns, uri, rack, start, step):
    killed = start(OPEN + STEPS[step], uri)
    assert killed.wait(60) == -signal.SIGKILL
    keys = ns.keys(range(160))
    with ns.match(keys) as hit:  # at once: whole or not there
        assert all(np.array_equal(v, payload(k)) for k, v in zip(keys, hit.views, strict=False))
        assert not hit or step == "by put"
    assert rack.recovered()
    ns.remove(keys)
    assert fill(ns, keys) == 10
    assert rack.report().blocks["reserved"] == 0


PHASES = {
    "before any operation": "pool = kvpool.open(sys.argv[1]); die()",
    "while it warms up": OPEN + "pool.tensor().sum(); pool.stock().take(3); die()",
    "in steady state": OPEN + "fill(ns, keys); a = ns.match(keys), ns.reserve(ns.keys(range(9, 89))); die()",
}


BROOD = """
import sys
count = 0
for _ in range({count}):
    child = os.fork()  # as fast as a new process can be had
    if child == 0:
        work = {work!r}
        exec(work)
    count += os.waitpid(child, 0)[1] == 9
    time.sleep({gap})
say(count)
"""


@pytest.mark.parametrize("phase", PHASES)
def test_C03_what_a_client_held_goes_with_it(pool, uri, rack, start, phase):
    assert said(start(BROOD.format(work=PHASES[phase], count=30, gap=0.02), uri)) == "30\n"
    report = rack.recovered()
    assert (report.pins, report.leaked, report.blocks["reserved"]) == (0, 0, 0)
    assert eventually(lambda: sum(worker["state"] == "alive" for worker in rack.workers()) == 1, 20)
    assert len(rack.workers()) < 12  # slots are used again


def test_C04_killed_anywhere_the_others_go_on(pool, ns, uri, rack, start):
    """At random moments of allocating, publishing, evicting, removing; the checker finds nothing lost or doubled."""
    body = (
        OPEN
        + """
rng = random.Random(int(sys.argv[2])); say("ready")
while True:
    at = rng.randrange(30) * 16
    part = ns.keys(range(at, at + 16 * rng.randrange(1, 9)))
    verb = rng.randrange(4)
    if verb == 0:
        try:
            fill(ns, part[len(ns.match(part)):])
        except kvpool.PoolFull:
            pass
    elif verb == 1: ns.remove(part[:1])
    elif verb == 2: pool.evict(3)
    else: ns.match(part).release()
"""
    )
    rng = random.Random(4)
    for number in range(8):
        victim = start("import random\n" + body, uri, number)
        assert victim.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 0.05)
        victim.kill()
        for i in range(200):  # meanwhile, and nobody waits
            at = i % 40 * 16
            keys = ns.keys(range(at, at + 64))
            with ns.match(keys) as hit:
                assert all(np.array_equal(v, payload(k)) for k, v in zip(keys, hit.views, strict=False))
            ns.put(keys, [payload(k) for k in keys])
        report = rack.recovered()
        assert report, rack.report()
        assert sum(report.blocks.values()) == 64


@pytest.mark.parametrize("when", ["at the start", "half way", "at the end"])
def test_C05_a_creator_that_dies_leaves_nothing_to_wait_for(uri, start, when):
    part = {"at the start": 0, "half way": 0.5, "at the end": 1}[when]
    body = f"""
        def stop(done, total):
            if done >= total * {part}:
                die()
        kvpool.create(sys.argv[1], "600MiB", "64KiB", progress=stop)
    """
    assert start(body, uri).wait(60) == -signal.SIGKILL
    began = time.process_time()
    with pytest.raises(kvpool.NotFound):
        kvpool.open(uri)
    kvpool.create(uri, "1MiB", "4KiB").close()
    assert time.process_time() - began < 1  # nobody spins
    assert kvpool.open(uri).check().clean


def test_C05_a_device_whose_creator_died_is_not_ready(tmp_path, start):
    """A device has no name to be taken at the end: its header says whether it is whole."""
    path = tmp_path / "device"
    path.write_bytes(bytes(8 << 20))
    for call in (lambda: kvpool.open(f"file:{path}"), lambda: kvpool.remove(f"file:{path}")):
        with pytest.raises((kvpool.NotReady, kvpool.Foreign)):
            call()
    kvpool.remove(f"file:{path}", force=True)
    kvpool.create(f"file:{path}", "1MiB", "4KiB").close()


@pytest.mark.parametrize("version", [1, 2, 99])
def test_C06_an_image_of_another_version_is_replaced_without_hands(tmp_path, python, version):
    path = tmp_path / "pool"
    python(
        """
        import os, signal, sys, kvpool
        kvpool.create(sys.argv[1], blocks=64, block="4KiB"); os.kill(os.getpid(), signal.SIGKILL)
        """,
        f"file:{path}",
        check=False,
    )
    with path.open("r+b") as file:
        file.seek(8)
        file.write(version.to_bytes(8, "little"))
    with pytest.raises(kvpool.VersionMismatch, match=f"format {version}, this build reads"):
        kvpool.open(f"file:{path}")
    with kvpool.create(f"file:{path}", blocks=64, block="4KiB", replace=True) as pool:
        assert pool.check().clean


@pytest.mark.parametrize("what", ["host 0", "host 1", "the device"])
def test_C06_half_of_the_files_removed_by_hand(start, what):
    uri = f"sim:cases-{os.getpid()}"
    try:
        for host in (0, 1):
            made = "kvpool.create(sys.argv[1], blocks=128, block='4KiB', hosts=2, lease=0.5)" if host == 0 else ""
            died = start(f"{made}\npool = kvpool.open(sys.argv[1], host={host}); die()", uri)
            assert died.wait(60) == -signal.SIGKILL
        names = [name for name in os.listdir("/dev/shm") if uri[4:] in name]
        images = sorted(name for name in names if name.endswith(uri.replace(":", ".")))
        gone = images if what == "the device" else [name for name in names if name not in images][int(what[-1]) :][:1]
        for name in gone:
            os.unlink(f"/dev/shm/{name}")

        def anew():
            """A host whose memory is gone cannot be seen to be dead until its lease is over."""
            with contextlib.suppress(kvpool.Busy):
                return kvpool.create(uri, blocks=128, block="4KiB", hosts=2, replace=True)

        with eventually(anew, 60) as pool:
            assert pool.check().clean
    finally:
        with contextlib.suppress(kvpool.NotFound):
            kvpool.remove(uri, force=True)


def test_C07_opening_while_the_dead_are_cleared_away_is_never_corrupt(pool, uri, rack, start):
    body = """
        say("ready"); n = 0
        while not os.path.exists(sys.argv[2]):
            try:
                with kvpool.open(sys.argv[1]) as p:
                    p.namespace(identity).match([b"k" * 16]).release()
            except kvpool.NoSlot:
                pass
            n += 1
        say(n)
    """
    end = f"/dev/shm/end.{os.getpid()}"
    openers = [start(body, uri, end) for _ in range(3)]
    assert [each.stdout.readline() for each in openers] == ["ready\n"] * 3
    try:
        for _ in range(6):
            victim = start(OPEN + "fill(ns, keys); hit = ns.match(keys); say('in'); time.sleep(60)", uri)
            assert victim.stdout.readline() == "in\n"
            victim.kill()
    finally:
        open(end, "w").close()
    counts = [int(said(each)) for each in openers]
    os.unlink(end)
    assert min(counts) > 20
    assert rack.recovered()


def test_C08_dead_readers_use_up_no_slots(make_pool, uri, rack, start):
    pool = make_pool(workers=4)
    work = """
while True:
    try:
        pool = kvpool.open(sys.argv[1])
        break
    except kvpool.NoSlot:  # those before are being cleared away
        time.sleep(0.005)
die()
"""
    assert said(start(BROOD.format(work=work, count=300, gap=0), uri), 120) == "300\n"
    assert eventually(lambda: all(worker["state"] != "dead" for worker in rack.workers()), 20)
    kvpool.open(uri).close()
    assert sum(worker["state"] == "alive" for worker in pool.stats()["worker_list"]) == 1


NAMESPACE = """
import os, signal, subprocess, time
body = {holder!r}
holder = subprocess.Popen([sys.executable, "-P", "-c", body], stdout=subprocess.PIPE, text=True)
assert holder.stdout.readline() == "in\\n"
{then}
"""


def in_pid_namespace(program, tmp_path, background=False):
    if os.getuid() != 0 or not shutil.which("unshare"):
        pytest.skip("needs root for a PID namespace")
    path = tmp_path / "inside.py"
    path.write_text(script(program))
    command = ["unshare", "-p", "-f", "--mount-proc", "--kill-child", sys.executable, "-P", path]
    made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    return made if background else said(made)


def test_C10_the_pid_of_a_dead_worker_used_again(pool, uri, rack, start, tmp_path):
    """Another process gets the number of the dead one while nobody is there to look; it is found dead all the same."""
    body = script(
        f"pool = kvpool.open({uri!r}); ns = pool.namespace(identity); new = ns.reserve(20); say('in'); time.sleep(99)"
    )
    rack.leave()
    again = f"""
pid = holder.pid
holder.kill(); holder.wait()
open("/proc/sys/kernel/ns_last_pid", "w").write(str(pid - 1))
other = subprocess.Popen(["sleep", "60"])
say(other.pid == pid)
with kvpool.open({uri!r}) as pool:
    for _ in range(600):
        alive = sum(w["state"] == "alive" for w in pool.stats()["worker_list"])
        reserved = pool.check().blocks["reserved"]  # a little later: the process is asked after once more
        if alive == 1 and not reserved:
            break
        time.sleep(0.05)
    say(alive, reserved)
other.kill()
"""
    said_there = in_pid_namespace(NAMESPACE.format(holder=body, then=again), tmp_path).split()
    assert said_there == ["True", "1", "0"]


def test_C10_a_live_worker_of_another_pid_namespace_is_left_alone(pool, ns, uri, rack, tmp_path):
    program = f"""
pool = kvpool.open({uri!r}); ns = pool.namespace(identity); new = ns.reserve(20); say("in", os.getpid() < 10)
sys.stdin.readline()
say(new.publish(ns.keys(range(320))))
"""
    inside = in_pid_namespace(program, tmp_path, background=True)
    assert inside.stdout.readline() == "in True\n"
    for _ in range(5):
        kvpool.open(uri).close()  # who opens looks for the dead
    time.sleep(0.3)
    assert pool.check().blocks["reserved"] == 20
    assert rack.count("recoveries") == 0
    assert inside.communicate("\n", timeout=60)[0] == "20\n"
    assert ns.contains(ns.keys(range(320))).all()


def filled_file(path, python, blocks=64):
    """A pool in a file whose only process was killed with 48 keys published and 5 blocks half written."""
    done = python(
        """
        import os, signal, sys
        sys.path.insert(0, sys.argv[2])
        import kvpool
        from conftest import fill
        pool = kvpool.create(sys.argv[1], blocks=int(sys.argv[3]), block="4KiB")
        ns = pool.namespace(kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16"))
        fill(ns, ns.keys(range(16 * 48)))
        new = ns.reserve(ns.keys(range(7, 7 + 80))); new.views[0][:] = 1
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        f"file:{path}",
        os.path.dirname(os.path.dirname(__file__)),
        blocks,
        check=False,
    )
    assert done.returncode == -9, done.stderr


def test_C11_after_a_restart_all_that_was_committed_is_found(tmp_path, python, identity):
    filled_file(tmp_path / "pool", python)
    with kvpool.open(f"file:{tmp_path}/pool") as pool:
        ns = pool.namespace(identity)
        keys = ns.keys(range(16 * 48))
        assert ns.contains(keys).all()
        assert not ns.contains(ns.keys(range(7, 7 + 80))).any()
        assert eventually(lambda: pool.check().clean, 20)
        report = pool.check()
        assert (report.blocks["live"], report.blocks["reserved"]) == (48, 0)
        assert ns.put(keys, [payload(key) for key in keys]) == 0
        assert pool.check().blocks["live"] == 48


def test_C12_after_a_restart_no_two_keys_share_bytes(tmp_path, python, identity):
    filled_file(tmp_path / "pool", python)
    with kvpool.open(f"file:{tmp_path}/pool") as pool:
        ns = pool.namespace(identity)
        keys = ns.keys(range(16 * 48))
        with ns.match(keys) as hit:
            assert len(set(hit.blocks.tolist())) == 48
        more = ns.keys(range(100000, 100000 + 16 * 64))
        for part in (more[i : i + 8] for i in range(0, 64, 8)):
            fill(ns, part)
            for old in (keys, more):
                present = ns.contains(old)
                out = np.zeros((len(old), 4096), np.uint8)
                got = ns.get_into(old, out)
                assert (got == present).all()
                assert all(np.array_equal(o, payload(k)) for o, k, g in zip(out, old, got, strict=True) if g)


@pytest.mark.parametrize("seed", range(3))
def test_C13_lost_caches_bring_back_nothing_of_before(seed, identity):
    """Lines reach the simulated memory in any order, and a host is lost with what it had not written back."""
    with Rack(2, seed=seed, blocks=64) as rack:
        body = """
        import numpy as np, kvpool
        ns = pool.namespace(kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16"))
        def fill(at, n, value):
            with ns.reserve(ns.keys(range(at, at + 16 * n))) as new:
                for view in new.views: view[:] = value
                return new.publish()
        fill(0, 32, 1)
        ns.remove(ns.keys(range(16 * 32)))
        fill(100000, 60, 2)                    # the same blocks, of other keys
        fill(0, 2, 3)                          # an old key with new bytes
        new = ns.reserve(4); new.views[0][:] = 9
        say("done"); hear()
        """
        child = rack.start(1, body)
        assert child.hears() == "done"
        rack.lose(1)
        rack.fence(1, 0)
        ns = rack.pool(0).namespace(identity)
        for first, blocks, value in ((0, 2, 3), (100000, 60, 2), (32, 30, None)):
            keys = ns.keys(range(first, first + 16 * blocks))
            out = np.zeros((blocks, 4096), np.uint8)
            got = ns.get_into(keys, out)
            assert all((row == value).all() for row, there in zip(out, got, strict=True) if there)
        assert not ns.contains(ns.keys(range(16 * 32))[2:]).any()  # removed, and not put again
        assert rack.check() == []


# ---- our own ----


def test_CX1_a_worker_killed_while_it_recovers_another(pool, ns, uri, rack, start):
    """A chain of deaths: each may have been recovering the one before it."""
    body = OPEN + "new = ns.reserve(2); hit = ns.match(keys); say('in'); time.sleep(60)"
    fill(ns, ns.keys(range(160)))
    chain = [start(body, uri) for _ in range(8)]
    assert [each.stdout.readline() for each in chain] == ["in\n"] * 8
    for each in chain:
        each.kill()  # the survivors wake up to recover, and are killed at it
    report = rack.recovered()
    assert report
    assert (report.pins, report.blocks["reserved"]) == (0, 0)
    assert ns.contains(ns.keys(range(160))).all()


def test_CX2_a_parent_that_dies_takes_no_child_along(pool, ns, uri, rack, start):
    """A worker that was started by another one is another worker: only the dead one's things go back."""
    body = """
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); mine = ns.reserve(3)
        child = os.fork()
        if child == 0:
            pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); new = ns.reserve(4)
            say("in"); sys.stdin.readline()
            for view in new.views: view[:] = 5
            say(new.publish(ns.keys(range(64))))
            os._exit(0)
        os.waitpid(child, 0)
    """
    parent = start(body, uri)
    assert parent.stdout.readline() == "in\n"
    os.kill(parent.pid, signal.SIGKILL)
    assert eventually(lambda: rack.count("recoveries") == 1, 20)
    assert pool.check().blocks["reserved"] == 4
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "4\n"
    with ns.match(ns.keys(range(64))) as hit:
        assert all((view == 5).all() for view in hit.views)
