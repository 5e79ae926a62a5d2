"""Cases of many at once: nobody sees half of anything, nobody gets what another holds, and every wait has an end."""

from __future__ import annotations

import contextlib
import random
import sys
import threading

import numpy as np
import pytest
from conftest import eventually, fill, payload, said

import kvpool
from kvpool.bindings.cuda import Pieces, RecordingDevice, Transfers

FORKS = """
def forks(count, work):
    pids = []
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            try:
                work(number); sys.stdout.flush(); os._exit(0)
            except BaseException:
                import traceback; traceback.print_exc(); os._exit(1)
        pids.append(pid)
    return pids
def ended(pids):
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
def meet(path, count):
    open(path + str(os.getpid()), "w").close()
    folder, name = os.path.split(path)
    while sum(each.startswith(name) for each in os.listdir(folder)) < count:
        time.sleep(0.001)
"""


def together(count, work):
    """Run it in threads; all must end."""
    failed = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert not [thread for thread in threads if thread.is_alive()], "a thread waits for ever"
    if failed:
        raise failed[0]


def test_N01_no_thread_waits_for_another_with_a_lock_held(pool, ns):
    """Put, get, evict, a scraper and a collector, with the interpreter switching as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def work(number):
            rng = random.Random(number)
            out = np.zeros((4, 4096), np.uint8)
            for _ in range(150):
                keys = ns.keys(range(16 * rng.randrange(20), 16 * 24))[:4]
                if number == 0:
                    pool.stats(), pool.check(), pool.events().poll()
                elif number == 1:
                    pool.evict(3)
                elif number == 2:
                    ns.match(keys)  # let go by the collector
                elif number % 2:
                    ns.put(keys, [payload(key) for key in keys])
                else:
                    got = ns.get_into(keys, out)
                    assert all(np.array_equal(o, payload(k)) for o, k, g in zip(out, keys, got, strict=True) if g)

        together(8, work)
    finally:
        sys.setswitchinterval(before)
    assert pool.check().clean


def test_N04_a_load_waits_for_who_still_writes_to_its_pages(make_pool, identity):
    """A request that has ended has a write under way to the page that another's load is given."""
    pool = make_pool(block=8192, blocks=16)
    ns, device = pool.namespace(identity), RecordingDevice()
    keys = ns.keys(range(16))
    ns.put(keys, [payload(keys[0], 8192)])
    page, late = np.zeros(8192, np.uint8), np.full(8192, 9, np.uint8)
    with Transfers(pool, device) as transfers:
        stream, done = device.new_stream(), device.new_event()
        device.copy(page.ctypes.data, late.ctypes.data, 8192, stream)
        device.record(done, stream)
        load = transfers.load(ns.match(keys), [[Pieces(page.ctypes.data, 8192)]], after=done)
        assert load.finish() == 1
        device.run()  # whatever was not done yet
        assert np.array_equal(page, payload(keys[0], 8192))
        device.end_event(done)
        device.end_stream(stream)


def test_N07_no_block_has_two_owners(make_pool, uri, start, tmp_path):
    """Processes take blocks of one class, stamp them, look at the stamps, and give them back."""
    make_pool(blocks=48)
    body = (
        FORKS
        + """
def work(number):
    pool = kvpool.open(sys.argv[1]); stock = pool.stock(); rows = pool.writable(0, np.uint64)
    rng = __import__("random").Random(number)
    meet(sys.argv[2], 8)
    for i in range(2500):
        try:
            taken = stock.take(rng.randrange(1, 7))
        except kvpool.PoolFull:
            continue
        stamp = number << 32 | i
        for block in taken: rows[block, :] = stamp
        for block in taken: assert (rows[block] == stamp).all(), "somebody else wrote here"
        stock.give(taken)
say(*ended(forks(8, work)))
"""
    )
    assert said(start(body, uri, f"{tmp_path}/meet"), 200).split() == ["0"] * 8


def test_N08_a_block_is_given_back_once(pool, ns):
    new = ns.reserve(4)
    new.withdraw()
    new.withdraw()  # says nothing more
    with pytest.raises(kvpool.NotOwned):
        new.publish(ns.keys(range(64)))
    stock, outcomes = pool.stock(), []
    for _ in range(50):
        taken = stock.take(3)

        def give(number, taken=taken):
            try:
                stock.give(taken)
                outcomes.append("given")
            except kvpool.NotOwned:
                outcomes.append("refused")

        together(2, give)
    assert (outcomes.count("given"), outcomes.count("refused")) == (50, 50)
    taken = stock.take(2)
    with pytest.raises(kvpool.NotOwned):
        stock.give([taken[0], taken[0]])
    stock.publish(taken, ns.keys(range(32)))
    with pytest.raises(kvpool.NotOwned):
        stock.give(taken)  # published is not reserved
    stock.release(taken)
    with pytest.raises(kvpool.NotOwned):
        stock.release(taken)
    hit = ns.match(ns.keys(range(32)))
    together(4, lambda number: hit.release())
    report = pool.check()
    assert report.clean
    assert (report.pins, report.blocks["reserved"], report.blocks["live"]) == (0, 0, 2)


def test_N11_the_next_victim_is_matched_or_evicted_never_both(make_pool, identity):
    """One asks for the oldest block while others need its room: right bytes, or a miss."""
    pool = make_pool(blocks=8, policy="lru")
    ns = pool.namespace(identity)

    def work(number):
        rng = random.Random(number)
        for _ in range(400):
            keys = ns.named([str(rng.randrange(12))])
            if number % 2:
                ns.put(keys, [payload(keys[0])], timeout=1)
            else:
                with ns.match(keys) as hit:
                    for _ in range(3):
                        assert all(np.array_equal(view, payload(keys[0])) for view in hit.views)

    together(6, work)
    assert pool.check().clean
    assert pool.stats()["evicted"] > 100


def test_N12_of_many_who_put_one_key_one_wins(pool, ns, uri, start, tmp_path):
    body = (
        FORKS
        + """
def work(number):
    pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity); won = 0
    meet(sys.argv[2], 16)
    for i in range(30):
        won += ns.put(ns.named([f"one/{i}"]), np.full((1, 4096), number + 1, np.uint8))
    os.write(1, f"{won}\\n".encode())
say(*ended(forks(16, work)))
"""
    )
    lines = said(start(body, uri, f"{tmp_path}/meet")).splitlines()
    assert sum(int(line) for line in lines[:16]) == 30
    assert lines[16].split() == ["0"] * 16
    with ns.match(ns.named([f"one/{i}" for i in range(30)])) as hit:
        assert len(hit) == 30
        assert all(view.min() == view.max() > 0 for view in hit.views)
    twice = ns.named(["twice", "twice", "twice"])
    assert ns.put(twice, np.ones((3, 4096), np.uint8)) == 1
    with ns.reserve(ns.named(["both", "both"])) as new:
        assert new.publish() == 1
        assert (new.refs != 0).sum() == 1
    report = pool.check()
    assert report.clean
    assert (report.blocks["live"], report.blocks["reserved"]) == (32, 0)


def test_N13_cancelled_and_retried_requests_harm_no_other(pool, ns):
    class Cancelled(Exception):
        pass

    shared = ns.keys(range(16 * 6))
    fill(ns, shared)

    def request(number):
        rng = random.Random(number)
        for i in range(20):
            tail = ns.keys([number, i, *range(30)], after=shared)
            try:
                with ns.match(shared) as hit:
                    assert all(np.array_equal(v, payload(k)) for k, v in zip(shared, hit.views, strict=False))
                    with ns.reserve(tail, timeout=10) as new:
                        if rng.random() < 0.4:
                            raise Cancelled
                        for key, view in zip(tail, new.views, strict=True):
                            view[:] = payload(key)
                        new.publish()
                with ns.match(tail) as mine:
                    assert all(np.array_equal(v, payload(k)) for k, v in zip(tail, mine.views, strict=False))
            except Cancelled:
                if rng.random() < 0.5:
                    fill(ns, tail) if not ns.contains(tail).any() else None

    together(16, request)
    report = pool.check()
    assert report.clean
    assert (report.pins, report.blocks["reserved"]) == (0, 0)


def test_N14_counts_are_right_after_all_have_come_and_gone(pool, ns, uri, rack, start):
    body = (
        FORKS
        + """
def work(number):
    for i in range(4):
        pool = kvpool.open(sys.argv[1]); ns = pool.namespace(identity)
        ns.put(ns.named([f"{number}/{i}"]), np.ones((1, 4096), np.uint8))
        new, hit = ns.reserve(1), ns.match(ns.named([f"{number}/{i}"]))
        if number % 3 == 0 and i == 3:
            die()
        if number % 3 == 1:
            pool.close()
        del new, hit
say(*ended(forks(12, work)))
"""
    )
    codes = said(start(body, uri)).split()
    assert sorted(codes) == ["-9"] * 4 + ["0"] * 8
    report = rack.recovered()
    assert report
    assert report.blocks["live"] == report.entries == rack.count("published") == 48
    assert (report.pins, report.blocks["reserved"], report.leaked) == (0, 0, 0)
    assert eventually(lambda: sum(worker["state"] == "alive" for worker in rack.workers()) == 1, 20)
    assert pool.info["incarnation"] == kvpool.open(uri).info["incarnation"]  # nobody has made it anew


def test_N15_openers_while_it_is_being_made_find_none_or_all_of_it(uri, start, tmp_path):
    body = (
        FORKS
        + """
def stop(done, total):
    say(done == total); sys.stdin.readline()
if os.fork() == 0:
    pool = kvpool.create(sys.argv[1], "300MiB", "64KiB", progress=stop)
    say("made"); sys.stdin.readline(); os._exit(0)
os.wait()
"""
    )
    creator = start(body, uri)
    for last in ("False\n", "True\n"):
        assert creator.stdout.readline() == last
        for _ in range(8):
            with pytest.raises(kvpool.NotFound):
                kvpool.open(uri)
        creator.stdin.write("\n")
        creator.stdin.flush()
    assert creator.stdout.readline() == "made\n"
    with kvpool.open(uri) as pool:
        assert pool.info["bytes"] >= 300 << 20
        assert pool.check().clean
    creator.stdin.write("\n")
    creator.stdin.flush()
    assert creator.wait(60) == 0


def test_N17_what_is_published_pinned_was_never_free_to_go(make_pool, identity):
    pool = make_pool(blocks=16)
    ns, going = pool.namespace(identity), threading.Event()

    def work(number):
        if number:
            while not going.is_set():
                pool.evict(100)
            return
        try:
            for i in range(300):
                keys = ns.named([f"{i}/{j}" for j in range(4)])
                with ns.reserve(keys) as new:
                    for key, view in zip(keys, new.views, strict=True):
                        view[:] = payload(key)
                    hit = new.publish_pinned()
                assert eventually(lambda keys=keys: ns.contains(keys).all())  # who looks at one for a moment lets it be
                assert all(np.array_equal(v, payload(k)) for k, v in zip(keys, hit.views, strict=True))
                hit.release()
        finally:
            going.set()

    together(3, work)


def test_N18_old_handles_do_not_reach_a_new_pool_at_the_same_place(identity, uri):
    """Descriptor numbers, addresses and sizes repeat; what stands for the old pool is told so."""
    places, old = set(), []
    for i in range(12):
        pool = kvpool.create(uri, blocks=64, block="4KiB")
        ns = pool.namespace(identity)
        fill(ns, ns.keys(range(160)))
        places.add(pool.tensor().ctypes.data)
        for other in old:
            with pytest.raises((kvpool.Closed, kvpool.Replaced)):
                other.match(ns.keys(range(160)))
            with pytest.raises((kvpool.Closed, kvpool.Replaced)):
                other.pool.pin(ns.lookup(ns.keys(range(160))))
        assert pool.check().pins == 0
        kvpool.remove(uri, force=True)
        if i % 2:
            pool.close()
        old.append(ns)
        del pool, ns


@pytest.mark.parametrize("way", ["get_into", "get_into_parts", "match", "pin"])
def test_N19_a_slow_read_ends_right_or_as_a_miss(make_pool, identity, way):
    """Large blocks are read while others evict and reuse them all the time."""
    size = 8 << 20
    pool = make_pool(blocks=3, block=size, policy="fifo")  # the next to go is often the one that is being read
    ns, going = pool.namespace(identity), threading.Event()
    keys = ns.named([str(i) for i in range(6)])
    data = [np.full(size, i + 1, np.uint8) for i in range(6)]

    def writer():
        while not going.is_set():
            for i in range(6):
                with contextlib.suppress(kvpool.PoolFull):
                    ns.put(keys[i : i + 1], [data[i]])

    def read(i):
        out = np.full((1, size), 99, np.uint8)
        if way == "get_into":
            got = ns.get_into(keys[i : i + 1], out)[0]
        elif way == "get_into_parts":
            got = ns.get_into_parts(keys[i : i + 1], kvpool.Parts([(out.ctypes.data, size, size, 0)]), [0])[0]
        else:
            try:
                with ns.match(keys[i : i + 1]) if way == "match" else pool.pin(ns.lookup(keys[i : i + 1])) as hit:
                    for view in hit.views:
                        out[0] = view
                    got = len(hit) > 0
            except kvpool.Stale:
                got = False
        assert (out == i + 1).all() if got else set(np.unique(out)) <= {0, 99}
        return got

    writers = [threading.Thread(target=writer) for _ in range(2)]
    for thread in writers:
        thread.start()
    try:
        assert sum(read(i % 6) for i in range(60)) > 0
    finally:
        going.set()
        for thread in writers:
            thread.join(60)


def test_N21_a_value_is_a_miss_until_the_whole_of_it_is_committed(make_pool, identity, uri):
    pool = make_pool(blocks=8, block="16MiB")
    with kvpool.open(uri) as other:
        ns, reader = pool.namespace(identity), other.namespace(identity)
        keys = ns.keys(range(64))
        with ns.reserve(keys) as new:  # 64 MiB
            for view in new.views:
                for at in range(0, view.nbytes, 4 << 20):
                    view[at : at + (4 << 20)] = 7
                    assert not reader.contains(keys).any()
                    assert len(reader.match(keys)) == 0
                    assert not reader.get_into(keys[:1], np.zeros((1, 64), np.uint8)).any()
            new.publish()
        with reader.match(keys) as hit:
            assert len(hit) == 4
            assert all((view == 7).all() for view in hit.views)


# ---- our own ----


def test_NX1_a_thread_that_ends_with_a_reservation_loses_it_to_nobody(pool, ns):
    """What a thread had reserved can be published by no other thread, and goes back with its object."""
    made = []

    def work(number):
        made.append(ns.reserve(ns.keys(range(64))))

    together(1, work)
    for call in (made[0].publish, made[0].withdraw, lambda: made[0].views, lambda: made[0].fill(0, b"x")):
        with pytest.raises(kvpool.WrongThread):
            call()
    assert pool.check().blocks["reserved"] == 4
    made.clear()
    assert pool.check().blocks["reserved"] == 0


def test_NX2_handles_come_and_go_while_others_work(pool, ns, identity, uri):
    """Each has a slot of its own: the close of one gives back its own things only."""

    def work(number):
        for i in range(15):
            with kvpool.open(uri) as mine:
                own = mine.namespace(identity)
                keys = own.named([f"{number}/{i}"])
                fill(own, keys)
                hit = own.match(keys)
                if len(hit):
                    assert np.array_equal(hit.views[0], payload(keys[0]))
                new = own.reserve(1)
                if i % 2:
                    del new, hit

    held = ns.reserve(8)
    together(6, work)
    report = pool.check()
    assert report.clean
    assert (report.pins, report.blocks["reserved"]) == (0, 8)
    assert held.publish(ns.keys(range(128))) == 8
