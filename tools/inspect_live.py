"""One pool, over time: top."""

from __future__ import annotations

import itertools
import os
import select
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import click

import kvpool
from kvpool.tools.console import emit, host_option, json_option, look_at, short, stdout, table
from kvpool.tools.inspect_state import BYTE_RATES, RATES, class_table

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["top"]

EVENTS_KEPT = 5
POLLS_MAX = 16


class Sampler:
    """Differences between two looks at a pool. Rates are per second of the time between them."""

    def __init__(self, pool: kvpool.Pool) -> None:
        self.pool = pool
        self.stream = pool.events()
        self.events: deque[str] = deque(maxlen=EVENTS_KEPT)
        self._poll()
        self.stats, self.at = pool.stats(), time.monotonic()

    def _poll(self) -> list[int]:
        """Take note of recoveries in the logs; returns the workers that made one, an entry each."""
        makers = []
        for _ in range(POLLS_MAX):  # bounded: busy workers may write as fast as we read
            events = self.stream.poll()
            for event in events:
                if event.kind == "recovered":
                    self.events.append(f"worker {event.ref} recovered by {event.worker}")
                    makers.append(event.worker)
            if not events:
                break
        return makers

    def _note_lost(self, worker: dict[str, Any], recoveries: int, seen: list[int]) -> None:
        """Logs are short: what was overwritten before we read it still shows in the counters."""
        lost = recoveries - seen.count(worker["slot"])
        if lost > 0:
            self.events.append(f"{lost} dead worker{'s' * (lost > 1)} recovered by {worker['slot']}")

    def tick(self) -> dict[str, Any]:
        """What happened since the last tick, as plain numbers."""
        before, self.stats = self.stats, self.pool.stats()
        since, self.at = self.at, time.monotonic()
        seconds = max(self.at - since, 1e-9)
        old = {worker["slot"]: worker for worker in before["worker_list"]}
        seen = self._poll()
        workers = []
        for worker in self.stats["worker_list"]:
            base = old.get(worker["slot"], {})
            rates = {f"{name}_per_s": (worker[name] - base.get(name, 0)) / seconds for name in (*RATES, *BYTE_RATES)}
            workers.append({name: worker[name] for name in ("slot", "pid", "state")} | rates)
            self._note_lost(worker, worker["recoveries"] - base.get("recoveries", 0), seen)
        return self._summary(before, seconds) | {"workers": workers, "events": list(self.events)}

    def _summary(self, before: dict[str, Any], seconds: float) -> dict[str, Any]:
        stats = self.stats
        lookups, hits = (stats[name] - before[name] for name in ("lookups", "hits"))
        return {
            "uri": stats["uri"], "time": time.time(), "interval": seconds, "policy": stats["policy"],
            "lookups": lookups, "hits": hits, "hit_ratio": hits / lookups if lookups else None,
            "hit_ratio_total": stats["hit_ratio"], "pins": self.pool.check().pins, "classes": stats["classes"],
        }  # fmt: skip


def _screen(tick: dict[str, Any]) -> Group:
    from rich.console import Group

    now = "-" if tick["hit_ratio"] is None else f"{tick['hit_ratio']:.2%}"
    head = (
        f"{tick['uri']}  {tick['policy']}  {time.strftime('%H:%M:%S', time.localtime(tick['time']))}\n"
        f"hits {now} of {tick['lookups']:,} in {tick['interval']:.1f} s, {tick['hit_ratio_total']:.2%} in all; "
        f"{tick['pins']:,} pins"
    )
    shown = table("workers", "slot", "state", "pid", *(f"{name}/s" for name in RATES), "GB/s in", "GB/s out", left=2)
    for worker in tick["workers"]:
        rates = [short(worker[f"{name}_per_s"]) for name in RATES]
        rates += [f"{worker[f'{name}_per_s'] / 1e9:.2f}" for name in BYTE_RATES]
        shown.add_row(str(worker["slot"]), worker["state"], str(worker["pid"]), *rates)
    return Group(head, class_table(tick["classes"]), shown, *tick["events"])


@contextmanager
def _keys() -> Iterator[bool]:
    """Single key presses on stdin, if it is a terminal; its settings are put back afterwards."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield False
        return
    import termios
    import tty

    settings = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield True
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, settings)


def _wait(seconds: float, keys: bool) -> bool:
    """Sleep; False as soon as q is pressed."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not keys:
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0]:
            pressed = os.read(sys.stdin.fileno(), 64)  # past the text buffer, which select cannot see
            if not pressed or b"q" in pressed.lower():
                return False
    return True


def _ticks(pool: kvpool.Pool, interval: float, most: int | None) -> Generator[dict[str, Any]]:
    sampler = Sampler(pool)
    with _keys() as keys:
        for _ in itertools.count() if most is None else range(most):
            if not _wait(interval, keys):
                return
            yield sampler.tick()


def _live(ticks: Iterator[dict[str, Any]]) -> None:
    from rich.live import Live

    screen = stdout()
    if not screen.is_terminal:
        for tick in ticks:
            screen.print(_screen(tick))
            sys.stdout.flush()
        return
    with Live("looking…", console=screen, auto_refresh=False) as live:
        for tick in ticks:
            live.update(_screen(tick), refresh=True)


@click.command()
@click.argument("uri")
@click.option("--interval", type=click.FloatRange(0.01), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--ticks", type=click.IntRange(1), help="End after so many.")
@click.option("--once", is_flag=True, help="The same as --ticks 1.")
@host_option
@json_option
def top(uri: str, interval: float, ticks: int | None, once: bool, host: int | None, as_json: bool) -> None:
    """Watch the pool URI: q or Ctrl-C ends. With --json, one line a tick. Looking takes one worker slot."""
    with look_at(uri, host) as pool, closing(_ticks(pool, interval, 1 if once else ticks)) as source:
        if as_json:
            for tick in source:
                emit(tick)
        else:
            _live(source)
