"""Several hosts in one test: handles of each in this process, others in children that can be stopped and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
from conftest import BROKEN, eventually, payload

import kvpool
from kvpool.bindings import core

IDENTITY = kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16")
LEASE = 0.5
CHILD = """
import os, sys, time
import numpy as np
sys.path.insert(0, {tests!r})
import kvpool
from conftest import fill, payload
from hosts import IDENTITY, holds
pool = kvpool.open(sys.argv[1], host=int(sys.argv[2])); ns = pool.namespace(IDENTITY)
def chain(number, n=8):
    return ns.keys(range(number * 100000, number * 100000 + 16 * n))
def say(*words):
    print(*words, flush=True)
def wait():
    sys.stdin.readline()
say("ready")
"""


def holds(ns, keys):
    """Are all keys there, with the right bytes, both in place and by copy?"""
    out = np.zeros((len(keys), 4096), np.uint8)
    with ns.match(keys) as hit:
        in_place = len(hit) == len(keys) and all(
            np.array_equal(view, payload(key)) for key, view in zip(keys, hit.views, strict=True)
        )
    return bool(
        in_place
        and ns.get_into(keys, out).all()
        and all(np.array_equal(row, payload(key)) for key, row in zip(keys, out, strict=True))
    )


class Child:
    """A process of one host. It says lines, and goes on when it is told to."""

    def __init__(self, uri, host, body, env=None):
        source = CHILD.format(tests=os.path.dirname(__file__)) + textwrap.dedent(body)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", source, uri, str(host)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        assert self.hears() == "ready"

    def hears(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return line.strip()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def cont(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()


class Hosts:
    """A pool of several hosts, 64 blocks of 4 KiB (8 segments) each."""

    def __init__(self, uri, count, mode, events=None, **options):
        uri += "" if events is None else f"?events={events}"
        self.uri, self.count, self.mode = uri, count, mode
        self.pools, self.children, self.is_clean = {}, [], True
        options = {"blocks": 64 * count, "block": "4KiB", "hosts": count, "lease": LEASE, "policy": "lru", **options}
        self.pools[0] = kvpool.create(uri, mode=mode, **options)

    def open(self, host):
        self.pools[host] = kvpool.open(self.uri, host=host)
        return self.pools[host]

    def ns(self, host):
        if host not in self.pools:
            self.open(host)
        return self.pools[host].namespace(IDENTITY)

    def chain(self, number, n=8):
        first = number * 100000
        return next(iter(self.pools.values())).namespace(IDENTITY).keys(range(first, first + 16 * n))

    def child(self, host, body, **options):
        self.children.append(Child(self.uri, host, body, **options))
        return self.children[-1]

    def lose(self, host):
        """The host is reset: of what its cache had not written back, some is lost."""
        chosen = core(self.mode)
        return chosen.check(chosen.lib.kvp_pool_lose_host(self.uri.encode(), host))

    def seen(self, host, by=0):
        self.pools[by].follow()
        return self.pools[by].hosts()[host]

    def becomes(self, host, state, by=0):
        return eventually(lambda: self.seen(host, by)["state"] == state, 30)

    def settle(self):
        for pool in [*self.pools.values()] * 2:
            pool.follow()

    def checks(self):
        return all(eventually(lambda pool=pool: pool.check().clean, 10) for pool in self.pools.values())

    def end(self):
        for child in self.children:
            child.process.kill()
            child.process.communicate()
        for pool in self.pools.values():
            pool.close()
        counts = next(iter(self.pools.values())).line_counts() if self.mode == "sim" else {}
        kvpool.remove(self.uri, force=True)
        broken = {name: counts[name] for name in BROKEN if counts.get(name)}
        assert not (broken and self.is_clean), f"{broken}, of {counts}"
