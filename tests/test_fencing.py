"""Lost hosts and the word of a site: asked once for each incarnation, again when it fails, believed if it names us."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from conftest import eventually, payload

import kvpool
from kvpool.bindings import core
from kvpool.fencing import Answers


class FakePool:
    """Hosts as a script has them; host 0 is ours."""

    uri, host = "sim:fake", 0

    def __init__(self, *states):
        self.states = list(states)
        self.incarnation = 1
        self.adopted = []
        self.error = None
        self.answers = Answers()

    def hosts(self):
        return [
            {"host": number, "state": state, "incarnation": self.incarnation, "silent_ms": 900, "segments": 4}
            for number, state in enumerate(self.states)
        ]

    def fence(self, host, incarnation):
        if self.error:
            raise self.error
        self.adopted.append((host, incarnation))
        self.states[host] = "fenced"
        return 4

    def tend(self, fence):
        return self.answers.tend(self, fence)


class Site:
    """Answers in turn; remembers the questions."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = []

    def __call__(self, lost):
        self.asked.append((lost.host, lost.incarnation))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_nobody_is_asked_about_the_living():
    pool, site = FakePool("present", "present", "free", "left", "fenced"), Site()
    assert pool.tend(site) == 0
    assert site.asked == []


def test_asked_until_it_answers_and_then_adopted_once():
    pool, site = FakePool("present", "lapsed"), Site(None, None, 0)
    assert [pool.tend(site) for _ in range(4)] == [0, 0, 4, 0]
    assert pool.adopted == [(1, 1)]
    assert len(site.asked) == 3


def test_another_adopter_is_asked_for_once_and_left_to_adopt():
    pool, site = FakePool("present", "lapsed", "present"), Site(2)
    assert [pool.tend(site) for _ in range(3)] == [0, 0, 0]
    assert len(site.asked) == 1
    assert pool.adopted == []


def test_asked_again_when_the_adopter_was_lost_itself():
    pool, site = FakePool("present", "lapsed", "present"), Site(2, 0, 0)
    pool.tend(site)
    pool.states[2] = "lapsed"
    assert pool.tend(site) == 8
    assert site.asked == [(1, 1), (1, 1), (2, 1)]


def test_another_incarnation_is_another_question():
    pool, site = FakePool("present", "lapsed"), Site(0, 0)
    pool.tend(site)
    pool.states[1], pool.incarnation = "lapsed", 2
    pool.tend(site)
    assert pool.adopted == [(1, 1), (1, 2)]


def test_a_hook_that_fails_is_logged_and_asked_again(caplog):
    pool, site = FakePool("present", "lapsed", "lapsed"), Site(OSError("no route to the controller"), 0, 0)
    with caplog.at_level(logging.ERROR, "kvpool.fencing"):
        assert pool.tend(site) == 4  # the failure about one host keeps nobody from tending the other
    assert "no route to the controller" in caplog.text
    assert pool.adopted == [(2, 1)]
    assert pool.tend(site) == 4


@pytest.mark.parametrize("nonsense", ["0", True, -1, 2, 1, 0.5])
def test_answers_that_name_no_other_host_are_refused(nonsense, caplog):
    pool, site = FakePool("present", "lapsed"), Site(nonsense, 0)
    assert pool.tend(site) == 0
    assert "another host of 0 to 1 was expected" in caplog.text
    assert pool.tend(site) == 4


@pytest.mark.parametrize("error", [kvpool.Busy("it beats"), kvpool.InvalidArgument("another incarnation")])
def test_a_host_that_came_back_is_not_adopted(error, caplog):
    pool, site = FakePool("present", "lapsed"), Site(0, 0)
    pool.error = error
    assert pool.tend(site) == 0
    assert "signs of life" in caplog.text
    pool.error = None
    assert pool.tend(site) == 4
    assert len(site.asked) == 2


def test_a_tender_asks_by_itself_and_ends_with_its_pool(caplog):
    pool, answered = FakePool("present", "lapsed"), threading.Event()

    def site(lost):
        answered.set()
        return 0

    with kvpool.Tender(pool, site, 0.01) as tender:
        assert answered.wait(10)
        assert eventually(lambda: pool.adopted == [(1, 1)])
    assert not tender._thread.is_alive()
    pool.states[1], pool.error = "lapsed", kvpool.Closed("closed")
    pool.incarnation = 2
    with kvpool.Tender(pool, site, 0.01) as tender:
        assert eventually(lambda: not tender._thread.is_alive())
    with pytest.raises(kvpool.InvalidArgument):
        kvpool.Tender(pool, site, 0)


def test_a_tender_outlives_other_errors(caplog):
    pool = FakePool("present", "lapsed")
    pool.error = kvpool.SystemFailure("for a moment")
    with kvpool.Tender(pool, lambda lost: 0, 0.01):
        assert eventually(lambda: "for a moment" in caplog.text)
        pool.error = None
        assert eventually(lambda: pool.adopted == [(1, 1)])


HOST = f"""
import sys, kvpool
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import fill
pool = kvpool.open(sys.argv[1], host=1)
ns = pool.namespace(kvpool.Identity(model="test", revision="1", dtype="float32", layout="plain/16"))
fill(ns, ns.keys(range(64)))
print("filled", flush=True)
sys.stdin.read()
"""


def test_a_tender_ends_with_its_handle(uri):
    name = uri.replace("shm:", "sim:")
    pool = kvpool.create(name, blocks=256, block="4KiB", hosts=2)
    try:
        with kvpool.Tender(pool, lambda lost: None, 0.01) as tender:
            pool.close()
            assert eventually(lambda: not tender._thread.is_alive())
        with pytest.raises(kvpool.Closed):
            pool.tend(lambda lost: None)
    finally:
        kvpool.remove(name, force=True)


def test_a_real_host_is_lost_and_adopted(uri, identity):
    name = uri.replace("shm:", "sim:")
    try:
        with kvpool.create(name, blocks=256, block="4KiB", hosts=2, lease=0.4) as pool:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", HOST, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert child.stdout.readline() == b"filled\n"
            ns = pool.namespace(identity)
            keys = ns.keys(range(64))
            assert eventually(lambda: ns.contains(keys).all())
            child.kill()
            child.communicate()

            def site(lost):
                assert lost.silent_ms >= 300
                sim = core("sim")
                return 0 if sim.check(sim.lib.kvp_pool_lose_host(lost.uri.encode(), lost.host)) >= 0 else None

            with kvpool.Tender(pool, site, 0.05):
                assert eventually(lambda: pool.hosts()[1]["state"] == "fenced", 20)
                assert eventually(lambda: pool.hosts()[0]["segments"] == pool.info["segments"])
            with ns.match(keys) as hit:
                assert len(hit) == 4
                for key, view in zip(keys, hit.views, strict=True):
                    assert (view == payload(key)).all()
            assert pool.check().clean
    finally:
        kvpool.remove(name, force=True)
