"""A state machine over real processes, against a dictionary: publish, match, pin, evict, remove, and kill -9 anywhere.

Hypothesis draws the commands and the step at which a worker dies; the workers are C processes with crash points, so a
failure is the same every time. The seed is printed; KVPOOL_SEED=N replays a run.
"""

import functools
import itertools
import os
import random
import subprocess
import time

import pytest
from conftest import Rack
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from native_build import CRASH, CRASH_SIM, program

import kvpool

WORKERS, CHAINS, LENGTH = 3, 4, 6
SEED = int(os.environ.get("KVPOOL_SEED", random.randrange(1 << 32)))
EXAMPLES = int(os.environ.get("KVPOOL_EXAMPLES", 60))
SIM_EXAMPLES = EXAMPLES // 6

chains = st.integers(0, CHAINS - 1)
lengths = st.integers(1, LENGTH)
workers = st.integers(0, WORKERS - 1)


numbers = itertools.count()


class Died(Exception):
    """The worker was killed by its crash point in the middle of a command."""


class Worker:
    """A process, and what it holds according to the model."""

    def __init__(self, rack, uri):
        self.process = subprocess.Popen(
            [program(CRASH_SIM if rack.is_sim else CRASH, "native/worker.c"), uri, str(rack.next_host())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.slot = int(self.process.stdout.readline().split()[1])
        self.pins: list[tuple[int, int]] = []
        self.reserved: list[tuple[int, int]] = []

    def do(self, verb, chain=0, n=0):
        try:
            self.process.stdin.write(f"{verb} {chain} {n}\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:  # it died while it recovered somebody else
            answer = ""
        if not answer:
            assert self.process.wait(10) == -9, "the worker died of something else than its crash point"
            raise Died
        return int(answer)


class Machine(RuleBasedStateMachine):
    """The pool against `published`: key -> must be there, may be there (killed in between), or absent = must not be."""

    blocks = 64
    evicts = False

    def __init__(self, rack):
        super().__init__()
        self.rack = Rack(rack)
        uri = self.rack.uri(f"machine-{os.getpid()}-{next(numbers)}") if self.rack.is_sim else "memfd:"
        self.pool = self.rack.create(uri, blocks=self.blocks, workers=8, policy="lru")
        self.workers = [Worker(self.rack, self.pool.uri) for _ in range(WORKERS)]
        self.sure: set[tuple[int, int]] = set()
        self.maybe: set[tuple[int, int]] = set()

    def teardown(self):
        for worker in self.workers:
            worker.process.kill()
            worker.process.communicate()
        self.rack.leave()
        if self.rack.is_sim:
            kvpool.remove(self.pool.uri, force=True)

    def key_range(self, chain, n):
        return [(chain, i) for i in range(n)]

    def bury(self, index, uncertain):
        """The worker is dead: what its last command touched is uncertain; the rest of the model stands."""
        self.sure -= set(uncertain)
        self.maybe |= set(uncertain)
        dead = self.workers[index]
        deadline = time.monotonic() + 10
        while any(w["pid"] == dead.process.pid and w["state"] != "free" for w in self.rack.workers()):
            assert time.monotonic() < deadline, "nobody has recovered the dead worker"
            time.sleep(0.001)
        self.workers[index] = Worker(self.rack, self.pool.uri)

    def command(self, index, verb, chain=0, n=0, touches=()):
        """Run a command; None if the worker died in it. `touches`: keys that are uncertain then."""
        self.rack.settle()
        try:
            return self.workers[index].do(verb, chain, n)
        except Died:
            self.bury(index, touches)
            return None

    def may_vanish(self):
        """Something may have been evicted."""
        pinned = {key for worker in self.workers for key in worker.pins}
        self.maybe |= self.sure - pinned
        self.sure &= pinned

    @rule(index=workers, step=st.integers(1, 60))
    def arm(self, index, step):
        self.command(index, "arm", 0, step)

    @rule(index=workers, chain=chains, n=lengths)
    def reserve(self, index, chain, n):
        if self.evicts:
            self.may_vanish()
        self.workers[index].reserved = []
        answer = self.command(index, "reserve", chain, n)
        assert answer in (0, -30, None)
        assert self.evicts or answer != -30
        if answer == 0:
            self.workers[index].reserved = self.key_range(chain, n)

    @rule(index=workers)
    def publish(self, index):
        keys = self.workers[index].reserved
        self.workers[index].reserved = []
        if not keys:
            return
        answer = self.command(index, "publish", touches=[key for key in keys if key not in self.sure])
        if answer is not None:
            known = sum(key in self.sure for key in keys)
            unsure = sum(key in self.maybe for key in keys)
            assert len(keys) - known - unsure <= answer <= len(keys) - known
            self.maybe -= set(keys)
            self.sure |= set(keys)

    @rule(index=workers)
    def withdraw(self, index):
        self.workers[index].reserved = []
        self.command(index, "withdraw")

    @rule(index=workers, chain=chains, n=lengths)
    def match(self, index, chain, n):
        keys = self.key_range(chain, n)
        self.workers[index].pins = []
        found = self.command(index, "match", chain, n)
        if found is None:
            return
        assert found >= 0
        assert all(key in self.sure or key in self.maybe for key in keys[:found]), "found what was never published"
        assert found == n or keys[found] not in self.sure, "missed what must be there"
        self.workers[index].pins = keys[:found]
        self.sure |= set(keys[:found])
        self.maybe -= set(keys[:found])
        if found < n:
            self.maybe.discard(keys[found])

    @rule(index=workers)
    def release(self, index):
        self.workers[index].pins = []
        self.command(index, "release")

    @rule(index=workers, chain=chains, n=lengths)
    def remove(self, index, chain, n):
        keys = set(self.key_range(chain, n))
        answer = self.command(index, "remove", chain, n, touches=keys & (self.sure | self.maybe))
        if answer is not None:
            assert len(keys & self.sure) <= answer <= len(keys & (self.sure | self.maybe))
            self.sure -= keys
            self.maybe -= keys

    @precondition(lambda self: self.evicts)
    @rule(index=workers, n=st.integers(1, 8))
    def evict(self, index, n):
        self.may_vanish()
        self.command(index, "evict", 0, n)

    @rule(index=workers, chain=chains)
    def look(self, index, chain):
        bits = self.command(index, "present", chain, LENGTH)
        if bits is None:
            return
        assert bits >= 0, "wrong bytes"
        for key in self.key_range(chain, LENGTH):
            there = bits >> key[1] & 1
            assert there or key not in self.sure, f"{key} is lost"
            assert not there or key in self.sure | self.maybe, f"{key} came from nowhere"

    @rule(index=workers)
    def kill(self, index):
        self.workers[index].process.kill()
        self.workers[index].process.wait()
        self.bury(index, ())

    @invariant()
    def pinned_bytes_are_right(self):
        for index in range(WORKERS):
            if self.workers[index].pins:
                assert self.command(index, "right") in (1, None)

    @invariant()
    def structures_are_whole(self):
        for index in range(WORKERS):
            if self.workers[index].process.poll() is not None:
                self.bury(index, ())
        self.rack.settle()
        report = self.rack.report()
        assert report.clean, report.problems
        assert report.leaked == 0
        assert report.blocks["reserved"] == sum(len(worker.reserved) for worker in self.workers)
        assert sum(report.blocks.values()) == self.rack.whole(self.blocks)
        most = (len(self.sure) + len(self.maybe)) * self.rack.hosts  # what its writer died too early to tell: twice
        assert len(self.sure) <= report.blocks["live"] <= most + report.unlinked


class SmallMachine(Machine):
    """So small that reservations evict."""

    blocks = 12
    evicts = True


@pytest.mark.racks("sim-1", "sim-2")
def test_what_a_dead_worker_published_is_found_once_it_is_recovered(rack):
    found = set()
    for step in range(26, 38):
        machine = Machine(rack.name)
        machine.reserve(0, 3, LENGTH)
        machine.arm(0, step)
        machine.publish(0)
        there = [machine.command(index, "present", 3, LENGTH) for index in (1, 2)]
        live = machine.rack.report().blocks["live"]
        assert there[0] == there[1]
        assert bin(there[0]).count("1") == live
        found.add(there[0])
        machine.teardown()
    assert len(found) > 2, "it always died before, or after, it had published"


@pytest.mark.racks("sim-1", "sim-2", "sim-4")
@pytest.mark.parametrize("machine", [Machine, SmallMachine])
def test_machine(machine, rack):
    print(f"KVPOOL_SEED={SEED}")
    factory = functools.partial(machine, rack.name)
    seed(SEED)(factory)
    run_state_machine_as_test(
        factory,
        settings=settings(
            max_examples=SIM_EXAMPLES if rack.is_sim else EXAMPLES,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            database=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
