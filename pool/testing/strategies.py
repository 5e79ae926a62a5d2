"""Hypothesis strategies for pools, and a state machine over a rack that needs nothing but to be run.

The only module of the package that needs Hypothesis.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvpool.testing.actor import VERBS, Actor, Operation
from kvpool.testing.rack import Child, Rack

__all__ = ["PoolMachine", "chains", "operations", "payloads"]

_CHILD = "kvpool.testing.actor:serve"


def chains(*, length: int = 6, alphabet: int = 3, block_tokens: int = 1) -> Any:
    """Token chains that share prefixes often: tuples of 1 to `length` blocks of `block_tokens` tokens each.

    Each block is one of `alphabet` kinds, so two chains begin alike with a chance of 1 in `alphabet`, and shrink to the
    same first blocks.
    """
    kinds = st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=length)
    return kinds.map(lambda chain: tuple(token for kind in chain for token in [kind] * block_tokens))


def payloads(size: int = 4096) -> Any:
    """Payloads of `size` bytes: random ones, whole and cheap to draw and shrink, and some of one byte all over."""
    noise = st.integers(0, 2**32 - 1).map(lambda seed: np.random.default_rng(seed).bytes(size))
    return st.integers(0, 255).map(lambda byte: bytes([byte]) * size) | noise


def operations(*, hosts: int = 4, verbs: Sequence[str] = VERBS, chain: Any = None) -> Any:
    """Operations of `Actor`s on so many hosts, with chains of `chains()` unless another strategy is given."""
    return st.builds(
        Operation,
        host=st.integers(0, hosts - 1),
        verb=st.sampled_from(list(verbs)),
        tokens=chains() if chain is None else chain,
        blocks=st.integers(1, 8),
        to=st.integers(0, hosts - 1),
    )


class PoolMachine(RuleBasedStateMachine):
    """Publishes, matches, copies, removes, evicts, gives segments, and loses hosts, on a rack drawn from a seed.

    What must hold: every block that is found has the bytes that belong to its key, in place (at the match and as long
    as it is pinned) and by copy, or is a miss; nothing is found that nobody has published; after a removal it is not
    found any more until it is published again (as long as no host was lost: a lost host's cache may hold what would
    have told the others of its blocks); nothing is leaked, every structure is whole, no cache line ever had two
    writers, no store was dropped.

    Host 0 is in this process and stays; every other host is a process of its own, that is killed with its host: at
    rest, or in the middle of an operation. So an example takes a second or so: run it with few of them and many steps,
    `run_state_machine_as_test(PoolMachine, settings=settings(max_examples=20, deadline=None))`. Where a process stops
    in the middle of an operation is not drawn, it happens; a failure that depends on it may not come again.

    Subclass it to set the class attributes, or to add rules and invariants: `do` runs an operation and checks its
    answer, `rack` is the rack, `known` holds every prefix that may be found.
    """

    hosts: ClassVar[int] = 3
    """Hosts of the rack, 2 at least."""
    blocks: ClassVar[int] = 16
    """Blocks of each host: so few that publishing evicts."""
    block: ClassVar[int] = 4096
    """Bytes of a block."""
    lease: ClassVar[float] = 0.3
    """Seconds of silence after which a lost host is fenced."""
    options: ClassVar[dict[str, Any]] = {}
    """More options of `kvpool.create`."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[tuple[int, ...]] = set()
        self.losses = 0
        self._workers: dict[int, Child] = {}

    @initialize(seed=st.integers(0, 2**31 - 1))
    def set_up(self, seed: int) -> None:
        """The rack; its seed is part of the example."""
        self.rack = Rack(self.hosts, blocks=self.blocks, block=self.block, lease=self.lease, seed=seed, **self.options)
        self._here = Actor(self.rack.pool(0))

    def teardown(self) -> None:
        """Kill the processes and remove the pool."""
        if hasattr(self, "rack"):
            self.rack.close()

    # ---- one operation ----

    def _worker(self, host: int) -> Child:
        if host not in self._workers:
            self._workers[host] = self.rack.start(host, _CHILD)
        return self._workers[host]

    def _before(self, operation: Operation) -> None:
        if operation.verb == "publish":
            self.known |= set(_prefixes(operation.tokens))

    def do(self, operation: Operation) -> Any:
        """Do it on its host, check the answer, let all hosts take notice. Returns the answer."""
        self._before(operation)
        if operation.host:
            worker = self._worker(operation.host)
            worker.say(json.dumps(operation))
            answer = json.loads(worker.hears())
        else:
            answer = self._here.do(operation)
        self.rack.settle()
        self._after(operation, answer)
        return answer

    def _after(self, operation: Operation, answer: Any) -> None:
        if answer == "full":
            return
        if operation.verb == "release":
            assert all(answer), f"{operation}: pinned blocks have changed: {answer}"
        elif operation.verb in ("match", "get_into"):
            for prefix, state in zip(_prefixes(operation.tokens), answer, strict=True):
                assert state is not False, f"{operation}: wrong bytes under {prefix}"
                assert state is None or prefix in self.known, f"{operation}: {prefix} came from nowhere"
        elif operation.verb == "remove" and not self.losses:
            self.known -= set(_prefixes(operation.tokens))

    # ---- rules ----

    @rule(data=st.data())
    def operate(self, data: Any) -> None:
        """Anything, anywhere."""
        self.do(data.draw(operations(hosts=self.hosts), label="operation"))

    @rule(chain=chains(), data=st.data())
    def publish_and_read(self, chain: tuple[int, ...], data: Any) -> None:
        """One host publishes, another one reads: what it is all about."""
        writer, reader = (data.draw(st.integers(0, self.hosts - 1), label=who) for who in ("writer", "reader"))
        self.do(Operation(writer, "publish", chain))
        self.do(Operation(reader, "match", chain))
        self.do(Operation(reader, "get_into", chain))

    @rule(data=st.data())
    def lose(self, data: Any) -> None:
        """A host is lost, at rest or in the middle of an operation; the site names an adopter, and it may come back."""
        lost = data.draw(st.integers(1, self.hosts - 1), label="lost")
        others = [host for host in range(self.hosts) if host != lost]
        adopter = data.draw(st.sampled_from(others), label="adopter")
        worker = self._worker(lost)
        last = data.draw(st.none() | operations(hosts=self.hosts), label="in the middle of")
        if last is not None:
            self._before(last)
            worker.say(json.dumps(last._replace(host=lost)))
        self.losses += 1
        self.rack.lose(lost)
        del self._workers[lost]
        self.rack.fence(lost, adopter)
        self.rack.settle()

    @invariant()
    def all_is_whole(self) -> None:
        """Every structure of every host that is up; no conflict of writers; nothing leaked."""
        if hasattr(self, "rack"):
            problems = self.rack.check()
            assert not problems, problems


def _prefixes(tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What the keys of a chain stand for: each covers all tokens before it."""
    return [tokens[: i + 1] for i in range(len(tokens))]
