"""One host's part in `kvpool qualify`: it meets the others by cards in the pool and runs every litmus test with each.

A card is a small block published under a key that both sides know. What was left by an earlier run fits no nonce of
this one. So the sides need nothing but the pool itself, and may be processes here or machines of a rack.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import kvpool
from kvpool.pool import core_of
from kvpool.reports import LITMUSES

__all__ = ["DEFECTS", "Task", "run_side"]

IDENTITY = kvpool.Identity(model="kvpool qualify", revision="1", dtype="none", layout="card", block_tokens=1)
CARD_BYTES, HOSTS = 4096, 64
RESULTS, VERDICTS, READ = HOSTS * HOSTS, HOSTS * HOSTS + HOSTS, HOSTS * HOSTS + 2 * HOSTS
COUNTS = ("rounds", "failures", "noted", "silent")
PAUSE_S, MEET_MS = 0.02, 250
DEFECTS = {"none": 0, "write-back": 1, "invalidate": 2}
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Task:
    """What all sides must agree on."""

    uri: str
    hosts: tuple[int, ...]
    """That take part, in order; the first one leads: it collects the results and records them."""
    rounds: int
    defect: str = "none"
    """For tests: the instructions to leave out where they matter."""
    patience: float = 60.0
    """Seconds to wait for another side to turn up or to answer."""


@dataclass
class Pair:
    """Two sides and what their tests have counted."""

    low: int
    high: int
    side: Any = None
    tests: dict[str, dict[str, int]] = field(default_factory=dict)

    def peer(self, host: int) -> int:
        """The other one."""
        return self.high if host == self.low else self.low


class Board:
    """Cards in the pool."""

    def __init__(self, pool: kvpool.Pool, patience: float) -> None:
        self.space = pool.namespace(IDENTITY)
        self.patience = patience
        self.posted: set[int] = set()

    def post(self, number: int, content: Any) -> None:
        """Publish a card in place of an earlier one."""
        text = json.dumps(content, separators=(",", ":")).encode()
        if len(text) > CARD_BYTES:
            raise kvpool.InvalidArgument(f"{len(text)} bytes do not fit a card: take fewer hosts at a time")
        deadline = time.monotonic() + self.patience
        self.posted.add(number)
        key = self.space.keys([number])
        self.space.remove(key)
        while not self.space.put(key, [text.ljust(CARD_BYTES)]):
            if time.monotonic() > deadline:  # an old card of a host that does not answer any more
                raise kvpool.Busy(
                    f"an old card cannot be removed: is a host silent? see 'kvpool hosts {self.space.pool.uri}'"
                )
            time.sleep(PAUSE_S)
            self.space.remove(key)

    def look(self, number: int) -> Any:
        """The content of a card, None if there is none."""
        buffer = bytearray(CARD_BYTES)
        if not self.space.get_into(self.space.keys([number]), [buffer])[0]:
            return None
        return json.loads(buffer)

    def clear(self) -> None:
        """Take our cards away."""
        for number in self.posted:
            self.space.remove(self.space.keys([number]))


class Side:
    """A host at work on a task."""

    def __init__(self, pool: kvpool.Pool, task: Task, advance: Advance) -> None:
        self.pool, self.task, self.advance = pool, task, advance
        self.core, self.host = pool.core, pool.host
        self.board = Board(pool, task.patience)
        self.pairs = [Pair(*pair) for pair in combinations(task.hosts, 2) if self.host in pair]
        self.done, self.total = 0, len(self.pairs) * len(LITMUSES) * task.rounds

    # ---- finding each other ----

    def prepare(self, numbers: list[int]) -> None:
        """Zero two blocks for each pair and post where they are."""
        for n, pair in enumerate(self.pairs):
            side = self.core.ffi.new("struct kvp_litmus_side *")
            side.side, side.nonce = int(self.host == pair.high), secrets.randbits(63) | 1
            side.mine = side.theirs = numbers[2 * n : 2 * n + 2]
            side.defects, side.patience_ms = DEFECTS[self.task.defect], round(self.task.patience * 1000)
            self.core.check(self.core.lib.kvp_litmus_begin(self.pool.handle, side))
            pair.side = side
            self.board.post(self.host * HOSTS + pair.peer(self.host), [side.nonce, *side.mine])

    def meet(self, pair: Pair) -> None:
        """Find the other side by its card."""
        peer, side = pair.peer(self.host), pair.side
        deadline = time.monotonic() + self.task.patience
        while time.monotonic() < deadline:
            card = self.board.look(peer * HOSTS + self.host)
            if card is None:
                time.sleep(PAUSE_S)
                continue
            side.their_nonce, side.theirs = card[0], card[1:]
            if self.core.check(self.core.lib.kvp_litmus_meet(self.pool.handle, side, MEET_MS)):
                return
        raise kvpool.SystemFailure(
            f"host {peer} has not turned up within {self.task.patience:.0f} s: start 'kvpool qualify {self.task.uri} "
            f"--host {peer}' with the same hosts on its machine"
        )

    # ---- tests ----

    def run_test(self, pair: Pair, number: int) -> dict[str, int]:
        """All rounds of one test, a part at a time for the sake of progress and Ctrl-C."""
        counts = dict.fromkeys(COUNTS, 0)
        raw = self.core.ffi.new("struct kvp_litmus_counts *")
        step = max(self.task.rounds // 16, 1)
        for first in range(0, self.task.rounds, step):
            rounds = min(step, self.task.rounds - first)
            self.core.check(self.core.lib.kvp_litmus_run(self.pool.handle, pair.side, number, rounds, raw))
            for name in ("rounds", "failures", "noted"):
                counts[name] += getattr(raw, name)
            self.done += rounds
            self.advance(self.done, self.total)
            if raw.is_silent:
                return counts | {"silent": 1}
        return counts

    def run_pair(self, pair: Pair) -> None:
        """Every test, until the other side falls silent."""
        self.meet(pair)
        for number, name in enumerate(LITMUSES):
            pair.tests[name] = self.run_test(pair, number)
            if pair.tests[name]["silent"]:
                return

    # ---- results ----

    def report(self) -> list[Any]:
        """Pairs of which we are the lower host, so that each is reported once: hosts, and the counts of each test."""
        return [
            [pair.low, pair.high, [list(test.values()) for test in pair.tests.values()]]
            for pair in self.pairs
            if pair.low == self.host
        ]

    def nonce_for(self, host: int) -> int:
        """What shows that a card of another host's belongs to this run: the nonce that it chose for us."""
        return next(int(p.side.their_nonce) for p in self.pairs if p.peer(self.host) == host)

    def await_card(self, number: int, nonce: int, who: int) -> Any:
        """The content of a card of this run."""
        deadline = time.monotonic() + 2 * self.task.patience  # it may have waited for a silent side first
        while time.monotonic() < deadline:
            card = self.board.look(number)
            if card is not None and card[0] == nonce:
                return card[1]
            time.sleep(PAUSE_S)
        raise kvpool.SystemFailure(f"host {who} has not reported within {2 * self.task.patience:.0f} s")

    def await_no_card(self, number: int) -> None:
        """Wait until a card is taken away, as long as one waits for anything."""
        deadline = time.monotonic() + self.task.patience
        while self.board.look(number) is not None and time.monotonic() < deadline:
            time.sleep(PAUSE_S)

    def lead(self) -> dict[str, Any]:
        """Collect, record, and let the others go."""
        pairs = self.report()
        for host in self.task.hosts[1:]:
            pairs += self.await_card(RESULTS + host, self.nonce_for(host), host)
        result = judge(self.pool, self.task, [unpack(pair) for pair in pairs])
        told = {name: result[name] for name in result if name != "pairs"}
        for pair in self.pairs:
            self.board.post(VERDICTS + pair.high, [int(pair.side.nonce), told])
        for host in self.task.hosts[1:]:  # they have read it: else it would go with us
            self.await_card(READ + host, self.nonce_for(host), host)
        return result

    def follow(self) -> dict[str, Any]:
        """Report to the leader and wait for its verdict; our blocks stay until nobody looks at them any more."""
        leader = self.task.hosts[0]
        mine = next(int(pair.side.nonce) for pair in self.pairs if pair.low == leader)
        self.board.post(RESULTS + self.host, [mine, self.report()])
        result = self.await_card(VERDICTS + self.host, self.nonce_for(leader), leader)
        self.board.post(READ + self.host, [mine, None])
        self.await_no_card(VERDICTS + self.host)
        assert isinstance(result, dict)
        return result


def unpack(pair: list[Any]) -> dict[str, Any]:
    """A pair of a report, with names."""
    low, high, tests = pair
    named = {name: dict(zip(COUNTS, test, strict=True)) for name, test in zip(LITMUSES, tests, strict=False)}
    return {"hosts": [low, high], "tests": named}


def judge(pool: kvpool.Pool, task: Task, pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the counts mean; recorded in the pool if every test has passed, withdrawn if not."""
    from kvpool.tools.bench import processor

    tests = [test for pair in pairs for test in pair["tests"].values()]
    complete = all(set(pair["tests"]) == set(LITMUSES) for pair in pairs)
    failures = sum(test["failures"] for test in tests)
    stale = sum(pair["tests"].get("stale", {}).get("noted", 0) for pair in pairs)
    cpu, features = processor()
    instructions = pool.core.ffi.string(pool.core.lib.kvp_line_instructions()).decode()
    qualified = complete and failures == 0 and task.defect == "none"
    digest = pool.core.ffi.NULL
    if qualified:
        digest = pool.core.ffi.new("struct kvp_qualification *")
        digest.when_ns, digest.rounds, digest.stale = time.time_ns(), task.rounds, stale
        digest.hosts = sum(1 << host for host in task.hosts)
        digest.tests = (1 << len(LITMUSES)) - 1
        digest.cpu, digest.features = cpu.encode()[:63], " ".join(features).encode()[:55]
    pool.core.check(pool.core.lib.kvp_pool_qualify(pool.handle, digest))
    return {
        "uri": task.uri, "mode": pool.info["mode"], "qualified": qualified, "hosts": list(task.hosts),
        "rounds": task.rounds, "failures": failures, "stale": stale, "cpu": cpu, "features": features,
        "instructions": instructions, "pairs": pairs,
    }  # fmt: skip


def run_side(task: Task, host: int, advance: Advance) -> dict[str, Any]:
    """Be one host of a task; returns the result, the same on every side.

    Raises what `kvpool.open` raises, `PoolFull` where no blocks can be had, `SystemFailure` if a side does not turn up.
    """
    if core_of(task.uri).mode == "coherent":
        raise kvpool.InvalidArgument(f"{task.uri} has one host, in mode coherent: there is nothing to qualify")
    with kvpool.open(task.uri, host=host, unqualified=True) as pool:
        if max(task.hosts) >= pool.info["hosts"]:
            raise kvpool.WrongHost(f"host {max(task.hosts)}: the pool has {pool.info['hosts']}, numbered from 0")
        side = Side(pool, task, advance)
        space = pool.namespace(IDENTITY)
        with space.reserve(space.keys(range(2 * len(side.pairs)))) as area:
            try:
                side.prepare([int(number) for number in area.blocks])
                for pair in side.pairs:
                    side.run_pair(pair)
                return side.lead() if host == task.hosts[0] else side.follow()
            finally:
                side.board.clear()
