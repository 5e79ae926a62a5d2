"""What `kvpool bench` holds its rows to: the targets, once. They are ratios to a bound of the same run, or limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from kvpool.tools.bench_suite import Row

__all__ = ["TARGETS", "Target", "judge"]


@dataclass(frozen=True)
class Target:
    """What rows of these names must stay within."""

    rows: str
    """A pattern of row names, as of files."""
    limit: float
    of: str = "ratio"
    """`ratio` or `measured`."""


TARGETS = (
    Target("match 1024 of 1e6*, hot (C)", 0.8),
    Target("match 1024 of 1e6*, cold (C)", 0.4),
    Target("hash+match of 16384 tokens, *", 1.7),
    Target("get in place, 1 block, lowest calls (Python)", 1.5),
    Target("get in place, 1 block, Namespace (Python)", 3.0),
    Target("get in place, batch of 64, * (Python)", 50.0, "measured"),
    Target("put, 128 KiB (Python)", 1 / 0.94),
    Target("put, 512 KiB (Python)", 1 / 0.97),
    Target("put, 2 MiB (Python)", 1 / 0.97),
    Target("get_into, * (Python)", 1 / 0.95),
    Target("alloc+free, hit (C)", 1.0),
    Target("alloc+free, burst of 2048 (C)", 2.5),
    Target("alloc+free, hit, two processes (C)", 1 / 1.5),
    Target("alloc+free, burst of 2048, two processes (C)", 1 / 1.5),
    Target("alloc+free, 1 block (Python)", 1.2),
    Target("alloc+free, batch of 64 (Python)", 6.0, "measured"),
    Target("handoff to a spinning process (C)", 1.6),
    Target("handoff to a sleeping process (C)", 1.2),
    Target("publication that nobody waits for, the look (C)", 30.0, "measured"),
    Target("put, noncoherent, 128 KiB, to coherent", 1.06),
    Target("put, noncoherent, 512 KiB, to coherent", 1.02),
    Target("put, noncoherent, 2 MiB, to coherent", 1.02),
    Target("recovery, SIGKILL to detected, *", 200.0, "measured"),
    Target("recovery, SIGKILL to reusable, *", 2000.0, "measured"),
    Target("metadata, 1e6 blocks of 128 KiB", 96.0, "measured"),
    Target("metadata, * blocks of 128 KiB, share", 0.1, "measured"),
    Target("replay of 1024 records, *", 0.05, "measured"),
)


def judge(rows: Iterable[Row]) -> list[Row]:
    """The rows with their targets and verdicts; those without a target as they are."""
    judged = []
    for row in rows:
        for target in TARGETS:
            if fnmatchcase(row.name, target.rows):
                verdict = "met" if getattr(row, target.of) <= target.limit else "missed"
                what = "" if target.of == "ratio" else f" ({row.unit.split(',')[0]})"
                row = replace(row, target=target.limit, verdict=verdict + what)
                break
        judged.append(row)
    return judged
