"""Drive a real pool with a recorded trace, and count.

Every block access of the trace is one call: read the block under its key; if it is there its bytes are compared with
what its id says they must be, if not it is put. Nothing is simulated: hits and evictions are the pool's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

import kvpool
from kvpool.tools.children import children
from kvpool.tools.console import emit, grid, json_option, progress, size, stdout, table
from kvpool.tools.traces import FORMATS, Stream, percentiles, read, reuse_distances

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Plan", "capacity_blocks", "replay", "run"]

PAYLOAD_BYTES = 64
IDENTITY = kvpool.Identity(model="trace", revision="1", dtype="none", layout="id", block_tokens=1)
ROUND = 16
"""Requests of one worker between two reports; no worker is further ahead of another than that."""
TOUCH_KEYS_MAX = 64
SHARE = 128
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Plan:
    """What to run a trace on."""

    capacity: int
    """Blocks."""
    policy: str = "leaf"
    workers: int = 1
    """Processes; each takes every `workers`-th request."""
    block_bytes: int = 4096
    uri: str = "memfd:"
    hosts: int = 1
    """With more than one, one worker on each; requests go round them in turn, or where the trace has them by session.
    The capacity is that of each host, rounded up to SHARE blocks."""
    mode: str | None = None
    """Of a pool of several hosts: sim (default) or noncoherent."""

    def place(self) -> str:
        """Where the pool is made. Several hosts need a name: with it their own memories go too."""
        if self.hosts == 1 or self.uri != "memfd:":
            return self.uri
        return f"{'sim' if self.core() == 'sim' else 'shm'}:replay-{os.getpid()}"

    def core(self) -> str:
        """The mode."""
        return self.mode or ("sim" if self.hosts > 1 or self.uri.startswith("sim:") else "coherent")

    def blocks(self) -> int:
        """Of the whole pool. Hosts get equal shares if each can be cut into the segments of a host."""
        return self.capacity if self.hosts == 1 else self.hosts * -(-self.capacity // SHARE) * SHARE

    def host_of(self, stream: Stream, request: int) -> int:
        """Which host serves a request."""
        return int(stream.session[request] if len(stream.session) else request) % self.hosts


@dataclass
class Counts:
    """What workers saw."""

    accesses: int = 0
    hits: int = 0
    wrong_payloads: int = 0

    def add(self, other: Counts) -> None:
        """Sum up."""
        self.accesses += other.accesses
        self.hits += other.hits
        self.wrong_payloads += other.wrong_payloads


# ---- from ids to keys and payloads ----


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (S. Vigna, public domain): one-to-one, and 0 stays 0."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def key_rows(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A 16-byte key per id, as two words. One-to-one, and never all zero: the halves mix different numbers."""
    return np.stack([_mix(ids), _mix(ids + _GOLDEN)], axis=1)


def payload_rows(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What the block of each id holds: its key, its id, and words that follow from both."""
    keys = key_rows(ids)
    steps = np.arange(1, 6, dtype=np.uint64) * _GOLDEN
    rest = _mix(keys[:, :1] + steps) ^ keys[:, 1:]
    return np.concatenate([keys, ids[:, None], rest], axis=1)


# ---- one worker ----


class Driver:
    """Runs requests of a stream on one namespace."""

    def __init__(self, pool: kvpool.Pool, stream: Stream) -> None:
        self.space = pool.namespace(IDENTITY)
        self.stream = stream
        self.tail_first = pool.info["policy"] == "leaf"
        self.rows = key_rows(stream.ids)
        self.keys = [row.tobytes() for row in self.rows]
        self.payloads = [row.tobytes() for row in payload_rows(stream.ids)]
        self.counts = Counts()

    def run(self, first: int, step: int, advance: Callable[[int], None]) -> Counts:
        """Every `step`-th request from `first` on; tells `advance` after each round how many accesses are new."""
        told = 0
        for turn, request in enumerate(range(first, self.stream.requests, step), 1):
            self.serve(request)
            if turn % ROUND == 0:
                advance(self.counts.accesses - told)
                told = self.counts.accesses
        advance(self.counts.accesses - told)
        return self.counts

    def serve(self, request: int) -> int:
        """One request; returns how many accesses it had."""
        blocks = self.stream.block[self.stream.start[request] : self.stream.start[request + 1]]
        self._access(blocks.tolist())
        if self.tail_first:
            self._touch(blocks)
        return len(blocks)

    def _access(self, blocks: list[int]) -> None:
        get, put, counts = self.space.get_into, self.space.put, self.counts
        seen = bytearray(PAYLOAD_BYTES)
        for block in blocks:
            key = self.keys[block]
            if not get(key, [seen])[0]:
                put(key, [self.payloads[block]])
            else:
                counts.hits += 1
                counts.wrong_payloads += seen != self.payloads[block]
        counts.accesses += len(blocks)

    def _touch(self, blocks: NDArray[np.uint32]) -> None:
        """Tell the policy of a whole request as an engine does with one match: of a chain the tail is the oldest.

        Within a call the leaf policy stamps the last key oldest already; longer chains are touched a part at a time,
        the last part first.
        """
        for begin in reversed(range(0, len(blocks), TOUCH_KEYS_MAX)):
            self.space.touch(self.rows[blocks[begin : begin + TOUCH_KEYS_MAX]].tobytes())


# ---- several workers ----


def _work(uri: str, first: int, step: int, link: Connection) -> None:
    """A worker process: takes the stream; after each round sends how many accesses are new, and waits for the others.

    At last it sends its counts. An error may come in place of any of these.
    """

    def pause(new: int) -> None:
        link.send(new)
        link.recv()

    try:
        stream = link.recv()
        with kvpool.open(uri) as pool:
            driver = Driver(pool, stream)
            pause(0)  # ready
            link.send(driver.run(first, step, pause))
    except kvpool.Error as error:
        link.send(error)
    except (EOFError, BrokenPipeError):
        pass  # whoever started us has gone


def _work_as_host(uri: str, host: int, step: int, link: Connection) -> None:
    """The worker of a host: takes the stream, then requests one by one, each answered with its accesses; None ends it.

    At last it sends its counts and what the check finds.
    """
    try:
        stream = link.recv()
        with kvpool.open(uri, host=host, unqualified=True) as pool:
            driver = Driver(pool, stream)
            link.send(0)  # ready
            for request in iter(link.recv, None):
                link.send(driver.serve(request))
            report = pool.check()
            link.send((driver.counts, report.clean, report.problems, pool.stats()["evicted"]))
    except kvpool.Error as error:
        link.send(error)
    except (EOFError, BrokenPipeError):
        pass  # whoever started us has gone


Work = Callable[[str, int, int, Connection], None]


@contextmanager
def _processes(uri: str, stream: Stream, count: int, work: Work = _work) -> Iterator[list[Connection]]:
    """`count` workers, one link each. None of them outlives the block."""
    with children(work, [(uri, first, count) for first in range(count)]) as links:
        for link in links:  # not as an argument: start() would wait for ever for a child that died before it read it
            link.send(stream)
        yield links


def _collect(links: list[Connection], advance: Callable[[int], None]) -> tuple[Counts, float]:
    """The sum of what the workers count, and the seconds from their common start.

    They go round by round: one that the scheduler favours would else run far ahead in the trace, where none of the
    others has put anything yet, and the hits would say more of the scheduler than of the pool.
    """
    total, busy, paused, begin = Counts(), set(links), set[Connection](), 0.0
    while busy or paused:
        if not busy:
            begin = begin or time.perf_counter()
            for link in paused:
                link.send(None)
            busy, paused = paused, set()
        for link in [link for link in wait(list(busy)) if isinstance(link, Connection)]:
            busy.discard(link)
            message = link.recv()
            if isinstance(message, kvpool.Error):
                raise message
            if isinstance(message, Counts):
                total.add(message)
            else:
                paused.add(link)
                advance(message)
    return total, time.perf_counter() - begin


def _share_out(uri: str, stream: Stream, count: int, advance: Callable[[int], None]) -> tuple[Counts, float]:
    """What `count` processes count together, and the seconds they take."""
    try:
        with _processes(uri, stream, count) as links:
            return _collect(links, advance)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise kvpool.SystemFailure("a worker process of the replay died") from None


# ---- several hosts ----


@dataclass
class Sum:
    """What the hosts of a replay have found, together."""

    counts: Counts
    seconds: float = 0.0
    evicted: int = 0
    problems: list[str] = field(default_factory=list)


def _receive(link: Connection) -> Any:
    message = link.recv()
    if isinstance(message, kvpool.Error):
        raise message
    return message


def _in_turn(uri: str, stream: Stream, plan: Plan, advance: Callable[[int], None]) -> Sum:
    """Each request at the host that it belongs to, after the one before it has ended: what the counts say is exact."""
    total = Sum(Counts())
    try:
        with _processes(uri, stream, plan.hosts, _work_as_host) as links:
            for link in links:
                _receive(link)
            begin = time.perf_counter()
            for request in range(stream.requests):
                link = links[plan.host_of(stream, request)]
                link.send(request)
                advance(_receive(link))
            total.seconds = time.perf_counter() - begin
            for host, link in enumerate(links):
                link.send(None)
                counts, clean, problems, evicted = _receive(link)
                total.counts.add(counts)
                total.evicted += evicted
                total.problems += [] if clean else [f"host {host}: {problem}" for problem in problems]
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise kvpool.SystemFailure("a worker process of the replay died") from None
    return total


# ---- the whole of it ----


@contextmanager
def _pool(plan: Plan) -> Iterator[kvpool.Pool]:
    """A pool of exactly the plan's capacity that is gone afterwards."""
    workers = min(plan.workers + 2, 64)  # room for this process, and for one who watches
    pool = kvpool.create(
        plan.place(), block=plan.block_bytes, blocks=plan.blocks(), policy=plan.policy, workers=workers,
        mode=plan.core(), hosts=plan.hosts, unqualified=True,
    )  # fmt: skip
    try:
        yield pool
    finally:
        pool.close()
        if not plan.place().startswith(("memfd:", "hugetlb:")):
            kvpool.remove(pool.uri, force=True)


def run(stream: Stream, plan: Plan, advance: Callable[[int], None] = lambda new: None) -> dict[str, Any]:
    """Replay a stream on a new pool; returns the report that `kvpool replay --json` prints, times in seconds.

    With one worker, or one on each of several hosts, the counts are exact and the same every time. Raises what
    `kvpool.create` raises.
    """
    with _pool(plan) as pool:
        problems: list[str] = []
        evicted = 0
        if plan.hosts > 1:
            total = _in_turn(pool.uri, stream, plan, advance)
            counts, seconds, evicted, problems = total.counts, total.seconds, total.evicted, total.problems
        elif plan.workers == 1:
            driver, begin = Driver(pool, stream), time.perf_counter()
            counts, seconds = driver.run(0, 1, advance), time.perf_counter() - begin
        else:
            counts, seconds = _share_out(pool.uri, stream, plan.workers, advance)
        stats, check = pool.stats(), pool.check()
        if plan.hosts == 1:
            evicted = stats["evicted"]
        problems = check.problems + problems
    return {
        "requests": stream.requests, "accesses": counts.accesses, "unique": len(stream.ids), "hits": counts.hits,
        "hit_ratio": counts.hits / counts.accesses, "evictions": evicted,
        "wrong_payloads": counts.wrong_payloads, "metadata_bytes": stats["metadata_bytes"], "policy": plan.policy,
        "capacity_blocks": plan.blocks(), "workers": plan.workers, "hosts": plan.hosts, "mode": stats["mode"],
        "seconds": seconds, "check": {"clean": not problems, "problems": problems},
        "reuse_distance": percentiles(reuse_distances(stream.block)),
    }  # fmt: skip


def _number(text: str, whole: str) -> Fraction:
    try:
        return Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        raise kvpool.InvalidArgument(f"{whole!r} is not a capacity: 10%, 64MiB, '500 blocks' or unlimited") from None


def capacity_blocks(text: str, unique: int, block_bytes: int) -> int:
    """Blocks for "10%" (of the trace's unique blocks, rounded down), "500 blocks", "unlimited", or a size ("64MiB").

    At least one. Raises `InvalidArgument`.
    """
    if text == "unlimited":
        return unique
    if text.endswith("%"):
        blocks = _number(text[:-1], text) / 100 * unique
    elif text.endswith("blocks"):
        blocks = _number(text.removesuffix("blocks"), text)
    else:
        blocks = Fraction(kvpool.parse_size(text), block_bytes)
        if blocks < 1:
            hint = f"write '{text} blocks' for a number of blocks"
            raise kvpool.InvalidArgument(f"{text!r} is less than a block of {size(block_bytes)}: {hint}")
    if blocks <= 0:
        raise kvpool.InvalidArgument(f"{text!r} leaves no room for a block")
    return max(int(blocks), 1)


def _show(report: dict[str, Any]) -> None:
    check = report["check"]
    rows = {name: f"{report[name]:,}" for name in ("requests", "accesses", "unique")}
    rows |= {"policy": report["policy"], "capacity": f"{report['capacity_blocks']:,} blocks"}
    if report["hosts"] > 1:
        rows |= {"hosts": f"{report['hosts']}, mode {report['mode']}"}
    rows |= {"workers": str(report["workers"]), "hits": f"{report['hits']:,} ({report['hit_ratio']:.6f})"}
    rows |= {name.replace("_", " "): f"{report[name]:,}" for name in ("evictions", "wrong_payloads")}
    rows |= {"metadata": size(report["metadata_bytes"])}
    rows |= {"time": f"{report['seconds']:.2f} s, {report['accesses'] / report['seconds']:,.0f} accesses/s"}
    rows |= {"check": "clean" if check["clean"] else "; ".join(check["problems"])}
    distances = table("reuse distance (distinct other blocks in between)", *report["reuse_distance"], left=0)
    distances.add_row(*("-" if value is None else f"{value:,}" for value in report["reuse_distance"].values()))
    screen = stdout()
    screen.print(grid("replay", rows))
    screen.print(distances)


def _with_bar(stream: Stream, plan: Plan) -> dict[str, Any]:
    done, total = 0, len(stream.block)
    with progress("replaying") as show:

        def advance(new: int) -> None:
            nonlocal done
            done += new
            show(done, total)

        return run(stream, plan, advance)


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True,
                type=click.Path(exists=True, dir_okay=False, path_type=Path))  # fmt: skip
@click.option("--format", "format_name", type=click.Choice(["auto", *FORMATS]), default="auto", show_default=True)
@click.option("--policy", type=click.Choice(kvpool.POLICIES), default="leaf", show_default=True)
@click.option("--capacity", default="10%", show_default=True,
              help="Share of the unique blocks, or a size, or 'N blocks', or unlimited.")  # fmt: skip
@click.option("--workers", type=click.IntRange(1, 63), default=1, show_default=True, help="Processes.")
@click.option("--hosts", type=click.IntRange(1, 16), default=1, show_default=True,
              help="One worker on each; the capacity is that of each; requests go round them.")  # fmt: skip
@click.option("--mode", type=click.Choice(("sim", "noncoherent")), help="Of several hosts. [default: sim]")
@click.option("--block", default="4KiB", show_default=True, help="Bytes a block.")
@click.option("--uri", default="memfd:", show_default=True, help="Pool to make for the replay; removed at its end.")
@click.option("--skip-bad", is_flag=True, help="Count records that cannot be read, and go on.")
@json_option
@click.pass_context
def replay(ctx: click.Context, files: tuple[Path, ...], format_name: str, policy: str, capacity: str, workers: int,
           hosts: int, mode: str | None, block: str, uri: str, skip_bad: bool, as_json: bool) -> None:  # fmt: skip
    """Run the block accesses of a recorded trace on a real pool, and report its hits.

    Every access reads one block under its key and checks its bytes; a block that is missing is put. Exit code 1 if any
    payload was wrong or the pool is not clean afterwards. Several files of kv-cache-tester are sessions that begin
    together; several of mooncake are parts of one trace. With --hosts the requests are served one after the other, each
    at its host: the hits are those of one host of unlimited capacity if --capacity is unlimited.
    """
    if hosts > 1 and workers > 1:
        raise click.UsageError("--hosts has one worker on each host: leave --workers out")
    block_bytes = kvpool.parse_size(block)
    stream = read(files, format_name, skip_bad=skip_bad)
    if stream.skipped:
        click.echo(f"kvpool: {stream.skipped} bad records skipped", err=True)
    room = capacity_blocks(capacity, len(stream.ids), block_bytes)
    report = _with_bar(stream, Plan(room, policy, workers, block_bytes, uri, hosts, mode))
    if as_json:
        emit(report)
    else:
        _show(report)
    ctx.exit(0 if report["check"]["clean"] and not report["wrong_payloads"] else 1)
