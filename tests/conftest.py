"""Shared fixtures: a rack to run on, pools with names of their own that always go away, and an identity.

One suite for every memory: a test that uses `rack` (or `uri`, `pool`, `ns`, which do) runs on one coherent machine, and
where its module or itself says `@pytest.mark.racks(...)` also on simulated hosts. Its body stays the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import kvpool

_numbers = itertools.count()

# A shell that starts us in the background ignores SIGINT for us and so for the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tables are as wide as into a pipe, whatever terminal, or runner of tests side by side, tells its width.
os.environ.pop("COLUMNS", None)


RACKS = ("coherent", "sim-1", "sim-2", "sim-4")


class Rack:
    """One coherent machine, or simulated hosts that share a pool.

    Sizes are what one host gets: `create` multiplies them by the number of hosts. It also opens a resident handle on
    each host, so that deaths there are noticed. `open` takes the hosts in turn, and so do child processes.
    """

    def __init__(self, name="coherent"):
        self.name = name
        self.is_sim = name.startswith("sim-")
        self.hosts = int(name.removeprefix("sim-")) if self.is_sim else 1
        self.residents = {}
        self._turns = itertools.count(1)

    @classmethod
    def here(cls):
        """In a child process: the rack of its parent."""
        return cls(os.environ.get("KVPOOL_RACK", "coherent"))

    def uri(self, name):
        return f"sim:{name}" if self.is_sim else f"shm:{name}"

    def next_host(self):
        return next(self._turns) % self.hosts

    def environment(self, pool=None):
        """Of a child process, on the host of that pool or on the next one."""
        return {**os.environ, "KVPOOL_RACK": self.name, "KVPOOL_HOST": str(pool.host if pool else self.next_host())}

    def whole(self, blocks):
        """So many blocks a host, in all."""
        return blocks if self.hosts == 1 else -(-blocks // 8) * 8 * self.hosts

    def path(self, uri):
        """The file of a pool; what belongs to it has names that begin so."""
        return f"/dev/shm/kvpool.{os.getuid()}.{uri.replace(':', '.') if self.is_sim else uri.removeprefix('shm:')}"

    def create_alone(self, uri, size=None, block="4KiB", **options):
        if "blocks" in options:
            options["blocks"] = self.whole(options["blocks"])
        elif size is not None:
            size = kvpool.parse_size(size) * self.hosts
        if self.is_sim:
            options.setdefault("hosts", self.hosts)
        return kvpool.create(uri, size, block, **options)

    def create(self, uri, *sizes, **options):
        """A pool, with a resident handle on every host."""
        pool = self.create_alone(uri, *sizes, **options)
        self.residents = {pool.host: pool}
        self.inhabit(uri)
        return pool

    def open(self, uri):
        """A new handle, on the next host."""
        return kvpool.open(uri, host=self.next_host())

    def inhabit(self, uri):
        """A resident handle on every host that has none."""
        for host in set(range(self.hosts)) - set(self.residents):
            self.residents[host] = kvpool.open(uri, host=host)

    def settle(self):
        """Every host has taken notice of all that the others have done, and of what owners did about it."""
        for pool in [*self.residents.values()] * (2 if self.hosts > 1 else 0):
            pool.follow()

    def count(self, name):
        """A counter, over the workers of all hosts."""
        return sum(pool.stats()[name] for pool in self.residents.values())

    def workers(self):
        return [worker for pool in self.residents.values() for worker in pool.stats()["worker_list"]]

    def report(self):
        """The checks of all hosts as one: each checks its own part."""
        reports = [pool.check() for pool in self.residents.values()]
        return dataclasses.replace(
            reports[0],
            clean=all(report.clean for report in reports),
            problems=[problem for report in reports for problem in report.problems],
            blocks={state: sum(report.blocks[state] for report in reports) for state in reports[0].blocks},
            **{name: sum(getattr(r, name) for r in reports) for name in ("leaked", "pins", "unlinked")},
        )

    def recovered(self):
        """No dead worker is left on any host, and all is clean."""
        return eventually(
            lambda: all(worker["state"] != "dead" for worker in self.workers()) and (r := self.report()).clean and r
        )

    def leave(self):
        """Close the residents. No two hosts may ever have written one line."""
        for pool in self.residents.values():
            pool.close()
        if self.is_sim and self.residents:
            counts = next(iter(self.residents.values())).line_counts()
            broken = {name: counts[name] for name in BROKEN if counts[name]}
            assert not broken, f"{broken}, of {counts}"
        self.residents = {}


BROKEN = ("conflicts", "dirty_invalidated")


def pytest_configure(config):
    config.addinivalue_line("markers", "racks(*names): the racks that this test runs on, besides coherent")
    config.addinivalue_line("markers", "not_on(*names, reason): racks for which it is skipped, and why")


def pytest_generate_tests(metafunc):
    if "rack" not in metafunc.fixturenames:
        return
    chosen = metafunc.definition.get_closest_marker("racks")
    names = ["coherent", *(chosen.args if chosen else ())]
    reasons = {name: mark.kwargs["reason"] for mark in metafunc.definition.iter_markers("not_on") for name in mark.args}
    skip = {name: [pytest.mark.skip(reason=reason)] for name, reason in reasons.items()}
    metafunc.parametrize("rack", [pytest.param(n, marks=skip.get(n, [])) for n in names], indirect=True, ids=names)


@pytest.fixture
def rack(request):
    made = Rack(request.param)
    yield made
    made.leave()


@pytest.fixture
def uri(rack):
    """A name that nobody else uses; whatever is left under it is removed."""
    name = rack.uri(f"test-{os.getpid()}-{next(_numbers)}")
    yield name
    with contextlib.suppress(kvpool.NotFound):
        kvpool.remove(name, force=True)


@pytest.fixture
def make_pool(uri, rack):
    """Make the pool of this test: 64 blocks of 4 KiB (on each host) unless told otherwise."""
    made = []

    def make(**options):
        if "size" not in options:
            options.setdefault("blocks", 64)
        options.setdefault("block", "4KiB")
        made.append(rack.create(options.pop("uri", uri), **options))
        return made[-1]

    yield make
    rack.leave()
    for pool in made:
        pool.close()


@pytest.fixture
def make_hosts():
    """Make the pool of this test; what is left of it goes, and no line ever had two writers."""
    from hosts import Hosts  # it needs what stands here

    made = []

    def make(count=2, mode="sim", **options):
        kind = "sim" if mode == "sim" else "shm"
        made.append(Hosts(f"{kind}:hosts-{os.getpid()}-{next(_numbers)}", count, mode, **options))
        return made[-1]

    yield make
    for hosts in made:
        hosts.end()


@pytest.fixture
def identity():
    return kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16")


@pytest.fixture
def pool(make_pool):
    return make_pool()


@pytest.fixture
def ns(pool, identity):
    return pool.namespace(identity)


@pytest.fixture
def python(rack):
    """Run a program in a fresh interpreter, on the next host; returns the finished process."""

    def run(source, *arguments, check=True, **options):
        done = subprocess.run(
            [sys.executable, "-P", "-c", textwrap.dedent(source), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            env=rack.environment(),
            **options,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    return run


PRELUDE = """
import os, signal, sys, time, threading
import numpy as np
import kvpool
sys.path.insert(0, {tests!r})
from conftest import Rack, fill, payload
rack = Rack.here()
identity = kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16")
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def say(*words):
    print(*words, flush=True)
"""


def script(body):
    """A program after PRELUDE."""
    return PRELUDE.format(tests=os.path.dirname(__file__)) + textwrap.dedent(body)


@pytest.fixture
def start(rack):
    """Start a program that prints lines, on the next host or on that of a pool; killed at the end of the test.

    PRELUDE stands before it.
    """
    running = []

    def run(body, *arguments, at=None):
        running.append(
            subprocess.Popen(
                [sys.executable, "-P", "-c", script(body), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=rack.environment(at),
            )
        )
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def said(process, seconds=60):
    """What a program says until it ends well."""
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    assert "ignored" not in err, err
    return out


@pytest.fixture
def client_of(uri):
    """Clients of LMCache's second level, on the pool of this test; closed at its end."""
    from kvpool.bindings.lmcache import PoolClient  # few tests need it

    made = []

    def client(**options):
        made.append(PoolClient(uri, **{"revision": "1", "dtype": "bfloat16", "chunk_tokens": 256, **options}))
        return made[-1]

    yield client
    for each in made:
        each.close()


def completion(client, number, seconds=30):
    """Of a batch that was submitted to such a client, after waiting on its event: ok, error, one bool per key."""
    found = []

    def look():
        select.select([client.event_fd()], [], [], 5)
        found.extend(client.drain_completions())
        return [each for each in found if each[0] == number]

    return eventually(look, seconds)[0][1:]


@pytest.fixture
def container(tmp_path):
    """Run a program where /dev/shm has so few MiB; its output. A mount namespace plays the container."""

    def run(mebibytes, body):
        if os.getuid() != 0 or not shutil.which("unshare"):
            pytest.skip("needs root for a mount namespace")
        program = tmp_path / "program.py"
        program.write_text(script(body))
        mount = f"mount -t tmpfs -o size={mebibytes}m none /dev/shm && exec {sys.executable} -P {program}"
        done = subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, timeout=100)
        if "unshare" in done.stderr and "denied" in done.stderr:
            pytest.skip("mount namespaces are not allowed here")
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def eventually(condition, seconds=5.0):
    """Wait until condition() holds; its last value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return value


def payload(key, size=4096):
    """The bytes that belong to a key: every test pool holds these, so wrong bytes show."""
    seed = int.from_bytes(key[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def fill(ns, keys, size=4096):
    """Reserve, fill and publish what is missing of a chain."""
    with ns.reserve(keys) as new:
        for key, view in zip(keys, new.views, strict=True):
            view[:size] = payload(key, size)
        return new.publish()
