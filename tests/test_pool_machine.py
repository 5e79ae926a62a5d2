"""kvpool.testing.strategies: chains share prefixes, and PoolMachine runs, and finds what it is for."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool.testing import Rack, actor
from kvpool.testing.actor import Operation
from kvpool.testing.strategies import PoolMachine, chains, operations, payloads


def brief(examples, steps):
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.slow
def test_pool_machine():
    run_state_machine_as_test(PoolMachine, settings=brief(3, 12))


class TwoHosts(PoolMachine):
    hosts = 2
    blocks = 64


@contextlib.contextmanager
def machine():
    made = TwoHosts()
    made.set_up(1)
    try:
        yield made
    finally:
        made.teardown()


def test_operations_and_a_loss():
    chain = (1, 2, 1)
    with machine() as made:
        assert made.do(Operation(1, "publish", chain)) == 3
        for host in (0, 1):
            assert made.do(Operation(host, "match", chain)) == [True] * 3
            assert made.do(Operation(host, "get_into", (*chain, 0))) == [True, True, True, None]
            assert made.do(Operation(host, "release")) == [True] * 3
        made.rack.lose(1)
        del made._workers[1]
        assert made.rack.fence(1, 0) == 8
        assert made.do(Operation(1, "match", chain)) == [True] * 3  # by a host that was started anew
        assert made.do(Operation(0, "remove", chain)) == 3
        assert made.do(Operation(1, "get_into", chain)) == [None] * 3
        made.all_is_whole()


def test_it_finds_wrong_bytes(monkeypatch):
    right = actor.payload_of
    with machine() as made:
        made.do(Operation(0, "publish", (1, 2)))
        monkeypatch.setattr(actor, "payload_of", lambda key, size: np.roll(right(key, size), 1))
        for verb in ("match", "get_into"):
            with pytest.raises(AssertionError, match="wrong bytes under"):
                made.do(Operation(0, verb, (1, 2)))
        with pytest.raises(AssertionError, match="pinned blocks have changed"):
            made.do(Operation(0, "release"))


def test_it_finds_a_removal_that_does_nothing(monkeypatch):
    monkeypatch.setattr(actor.Actor, "_remove", lambda self, operation: 0)
    with machine() as made:
        for verb in ("publish", "remove"):
            made.do(Operation(0, verb, (1, 2)))
        with pytest.raises(AssertionError, match="came from nowhere"):
            made.do(Operation(0, "match", (1, 2)))


def test_chains_share_prefixes():
    one, other = find(
        chains().flatmap(lambda a: chains().map(lambda b: (a, b))),
        lambda pair: pair[0] != pair[1] and pair[0][:2] == pair[1][:2] and len(pair[0]) > 2 < len(pair[1]),
        settings=settings(database=None),
    )
    assert one[:2] == other[:2]


@settings(max_examples=20, database=None)
@given(chain=chains(length=3, block_tokens=16), payload=payloads(100), operation=operations(hosts=2, verbs=["evict"]))
def test_what_is_drawn(chain, payload, operation):
    assert len(chain) in (16, 32, 48)
    assert len(payload) == 100
    assert operation.host in (0, 1)
    assert operation.verb == "evict"


@settings(max_examples=3, deadline=None, database=None)
@given(payload=payloads())
def test_payloads_fill_a_block(payload):
    with Rack(hosts=1, blocks=8) as rack:
        new = actor.Actor(rack.pool()).ns
        assert new.put(new.keys([1]), [payload]) == 1
