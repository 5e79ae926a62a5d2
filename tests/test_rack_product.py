"""kvpool.testing.Rack: hosts with processes, deaths, losses, and nothing left behind."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys

import pytest
from conftest import fill

import kvpool
from kvpool.testing import ChildEnded, Rack

IDENTITY = kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16")
PUBLISH = """
import kvpool
from kvpool.testing import payload_of
ns = pool.namespace(kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16"))
keys = ns.keys(range(args[0]))
say(ns.put(keys, [payload_of(key, 4096) for key in keys]))
hit = ns.match(keys)
say("heard", hear())
hear()
"""

pytest_plugins = ["kvpool.testing.pytest_plugin"]


def left(rack):
    return glob.glob(f"/dev/shm/*{rack.uri.removeprefix('sim:')}*")


def body_of_a_child(here, first, second):
    here.say(here.pool.host, first + second)
    here.say(here.hear().upper())


def test_a_host_is_lost_and_what_it_published_is_adopted(kvpool_rack):
    rack = kvpool_rack(hosts=3, seed=7)
    child = rack.start(1, PUBLISH, 64)
    assert child.hears() == "4"
    child.say("go", "on")
    assert child.hears() == "heard go on"
    assert rack.used() == [0, 1]
    assert rack.state(1)["state"] == "present"
    with pytest.raises(kvpool.Busy, match="signs of life"):
        rack.fence(1, 0, timeout=0)
    assert rack.check() == []
    rack.lose(1)
    assert rack.used() == [0]
    assert rack.fence(1, 0) == 8
    assert rack.state(1, by=0)["state"] == "fenced"
    ns = rack.pool(2).namespace(IDENTITY)
    assert len(ns.match(ns.keys(range(64)))) == 4
    assert rack.pool(1).info["owned"] == 0  # it is back
    rack.settle()
    assert rack.check() == []
    assert sorted(rack.reports()) == [0, 1, 2]


def test_a_killed_process_is_not_a_lost_host(kvpool_rack):
    rack = kvpool_rack(hosts=2)
    child = rack.start(1, PUBLISH, 32)
    assert child.hears() == "2"
    rack.pool(1)
    rack.kill(child)
    assert rack.check() == []
    assert rack.state(1)["incarnation"] == 1
    with pytest.raises(ChildEnded, match="ended with -9"):
        child.hears()


def test_a_function_by_its_path(kvpool_rack):
    child = kvpool_rack(hosts=2).start(1, f"{os.path.basename(__file__)[:-3]}:body_of_a_child", 1, 2)
    assert child.hears() == "1 3"
    child.stop()
    child.say("x y")
    with pytest.raises(TimeoutError):
        child.hears(timeout=0.1)
    child.cont()
    assert child.hears() == "X Y"
    with pytest.raises(ChildEnded, match="ended with 0"):
        child.hears()


def test_a_child_that_fails_says_why(kvpool_rack):
    rack = kvpool_rack(hosts=1)
    child = rack.start(0, "raise ValueError('no such luck')")
    with pytest.raises(ChildEnded, match="no such luck"):
        child.hears()
    with pytest.raises(kvpool.OutOfRange, match="host 1 does not exist"):
        rack.pool(1)


def test_a_view_in_use_keeps_a_host(kvpool_rack):
    rack = kvpool_rack(hosts=2)
    ns = rack.pool(1).namespace(IDENTITY)
    fill(ns, ns.keys(range(32)))
    with pytest.raises(kvpool.Busy):
        rack.lose(1)
    del ns
    rack.lose(1)
    assert rack.fence(1, 0) == 8


def test_it_goes_whatever_happens():
    with contextlib.suppress(ZeroDivisionError), Rack(hosts=2) as rack:
        child = rack.start(1, "hear()")
        assert left(rack)
        raise ZeroDivisionError
    assert not left(rack)
    assert not child.is_alive
    source = "from kvpool.testing import Rack; rack = Rack(hosts=1); print(rack.uri, flush=True); input()"
    python = subprocess.Popen(
        [sys.executable, "-P", "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    name = python.stdout.readline().strip().removeprefix("sim:")
    assert glob.glob(f"/dev/shm/*{name}*")
    python.send_signal(signal.SIGINT)
    python.communicate()
    assert not glob.glob(f"/dev/shm/*{name}*")
