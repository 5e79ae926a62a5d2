"""Shared fixtures: pools with names of their own that always go away, and an identity."""

from __future__ import annotations

import contextlib
import itertools
import os
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


@pytest.fixture
def uri():
    """A shm: name that nobody else uses; whatever is left under it is removed."""
    name = f"shm:test-{os.getpid()}-{next(_numbers)}"
    yield name
    with contextlib.suppress(kvpool.NotFound):
        kvpool.remove(name, force=True)


@pytest.fixture
def make_pool(uri):
    """Make the pool of this test: 64 blocks of 4 KiB unless told otherwise."""
    made = []

    def make(**options):
        if "size" not in options:
            options.setdefault("blocks", 64)
        options.setdefault("block", "4KiB")
        made.append(kvpool.create(options.pop("uri", uri), **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


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
def python():
    """Run a program in a fresh interpreter; returns the finished process."""

    def run(source, *arguments, check=True, **options):
        done = subprocess.run(
            [sys.executable, "-P", "-c", textwrap.dedent(source), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=60,
            **options,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

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
