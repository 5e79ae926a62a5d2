"""`kvpool demo --hosts N`: the same job over simulated hosts, one of which is killed midway and adopted by a survivor.

A context is prefilled on host 0, 1 or 2, requests are decoded on every host. Midway all processes of host 1 are killed
and its cache is reset: what was dirty in it is lost. Its lease lapses, the site (a function here) confirms the reset
and names host 0, which adopts its blocks. Requests go on all the while.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvpool
from kvpool.bindings import core
from kvpool.tools.demo import (
    ANSWER_S,
    KILL_AT_TOKEN,
    KILL_REQUEST,
    POOL_BLOCKS,
    RECOVERY_S,
    Run,
    Worker,
    decode_all,
    draw,
    make_requests,
    receive,
)
from kvpool.tools.demo_worker import DTYPE, Request, decode, prefill
from kvpool.tools.model import Config, Tokenizer

__all__ = ["Rack", "make_pool", "rack"]

VICTIM, ADOPTER = 1, 0
LEASE_S, TEND_S, FENCE_S = 1.0, 0.1, 60.0


@dataclass
class Rack(Run):
    """A run over several hosts. The process that directs it works as host 0."""

    hosts: int = 4
    lost_lines: int = 0
    """Of the killed host's cache, that never reached the pool."""
    events: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """A line for people and for the result."""
        self.events.append(text)
        self.progress.console.print(text, markup=False, highlight=False)

    def may_have(self, worker: Worker) -> bool:
        """Until the victim is dead, the last request is kept for it."""
        return super().may_have(worker) and (bool(self.killed) or worker.host == VICTIM or len(self.pending) > 1)

    def request_for(self, worker: Worker) -> Request:
        """The next request; the first that the victim gets after every host has had one is its last."""
        request = self.pending.popleft()
        if worker.host != VICTIM or request.number < min(self.hosts, KILL_REQUEST) or self.killed:
            return request
        return Request(request.number, request.ids, request.new_tokens, KILL_AT_TOKEN)

    def kill(self, worker: Worker, decoders: list[Worker]) -> None:
        """SIGKILL to every process of the worker's host, in the middle of a request, with blocks pinned."""
        time.sleep(1.0)  # it is generating now
        gone = [each for each in self.workers if each.host == worker.host]
        for each in gone:
            each.process.kill()
        for each in gone:
            each.process.join()
        self.killed += 1
        assert worker.busy is not None
        self.pending.appendleft(Request(worker.busy.number, worker.busy.ids, worker.busy.new_tokens))
        decoders.remove(worker)
        names = ", ".join(each.name for each in gone)
        self.say(f"killed host {worker.host} ({names}) in request {worker.busy.number}; {len(decoders)} decoders left")

    def reset(self, lost: kvpool.LostHost) -> int:
        """The site's answer to a lapsed lease: the machine is reset, which is confirmed, and host 0 adopts."""
        sim = core("sim")
        self.lost_lines = sim.check(sim.lib.kvp_pool_lose_host(self.pool.uri.encode(), lost.host))
        self.say(
            f"host {lost.host} silent for {lost.silent_ms} ms: reset confirmed, {self.lost_lines} dirty lines of its "
            f"cache lost, host {ADOPTER} named to adopt {lost.segments} segments"
        )
        return ADOPTER


def make_pool(uri: str, config: Config, hosts: int) -> kvpool.Pool:
    """Each host has room for a context and the tails of its requests."""
    share = max(POOL_BLOCKS // hosts, 96)
    return kvpool.create(
        uri, block=config.block_bytes(DTYPE), blocks=hosts * share, hosts=hosts, lease=LEASE_S, workers=8
    )


def prefill_all(run: Rack, shared: list[list[int]]) -> int:
    """One context a host, as far as there are hosts; the processes stay, as those of a service do. Blocks published."""
    makers = [run.start(f"prefill@{host}", prefill, host) for host in range(min(len(shared), run.hosts))]
    run.workers += makers
    for maker in makers:
        receive(maker)
    for number, ids in enumerate(shared):
        makers[number % len(makers)].pipe.send(ids)
    return sum(receive(makers[number % len(makers)]) for number in range(len(shared)))


def await_adoption(pool: kvpool.Pool) -> dict[str, Any]:
    """The lost host, once it is fenced and owns nothing any more; as it is after a minute."""
    deadline = time.monotonic() + FENCE_S
    while True:
        row = pool.hosts()[VICTIM]
        if (row["state"] == "fenced" and not row["segments"]) or time.monotonic() > deadline:
            return row
        time.sleep(0.02)


def leave(run: Rack, worker: Worker) -> dict[str, Any] | None:
    """Let a process go; what a decoder has found of its host at the end."""
    found = None
    worker.pipe.send(None)
    if worker.name.startswith("decode"):
        _, found = receive(worker)
    worker.process.join(ANSWER_S)
    return found


def execute(run: Rack, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The whole job; what each surviving host found at its end."""
    shared, requests = make_requests(tokenizer)
    run.pending = deque(requests)
    run.say(f"prefill published {prefill_all(run, shared)} blocks of {len(shared)} contexts")
    decoders = [run.start(f"decode@{host}", decode, host) for host in range(run.hosts)]
    run.workers += decoders
    for worker in decoders:
        receive(worker)
    with kvpool.Tender(run.pool, run.reset, TEND_S):
        decode_all(run, decoders, len(requests))
        row = await_adoption(run.pool)
    run.say(f"host {row['host']} is {row['state']}, {run.pool.hosts()[ADOPTER]['segments']} segments are the adopter's")
    alive = [worker for worker in run.workers if worker.host != VICTIM]
    return [found for found in [leave(run, worker) for worker in alive] if found]


def await_clean(pool: kvpool.Pool) -> kvpool.CheckReport:
    """The check of the director's own host after the others have left."""
    deadline = time.monotonic() + RECOVERY_S
    while True:
        report = pool.check()
        if (report.clean and not report.pins and not report.leaked) or time.monotonic() > deadline:
            return report
        time.sleep(0.02)


def summarise(run: Rack, found: list[dict[str, Any]], picture: Path) -> dict[str, Any]:
    """The result under the names of the demo with one host, and what is of hosts."""
    answers = [run.answers[number] for number in sorted(run.answers)]
    report, counts = await_clean(run.pool), run.pool.line_counts()
    problems = report.problems + [f"host {each['host']}: {text}" for each in found for text in each["problems"]]
    return {
        "requests": answers,
        "killed": run.killed,
        "killed_host": VICTIM,
        "adopter": ADOPTER,
        "lost_lines": run.lost_lines,
        "leaked_blocks": report.leaked + sum(each["leaked"] for each in found),
        "pins_left": report.pins,
        "check": problems[0] if problems else "clean",
        "checks": found,
        "hosts": run.pool.hosts(),
        "conflicts": counts["conflicts"],
        "events": run.events,
        "picture": draw(answers, picture),
    }


def rack(run: Rack, tokenizer: Tokenizer, picture: Path) -> dict[str, Any]:
    """Run the job; the processes are gone afterwards."""
    try:
        found = execute(run, tokenizer)
    finally:
        for worker in run.workers:
            worker.process.kill()
    for worker in run.workers:
        worker.process.join()
    return summarise(run, found, picture)
