"""What every suite of `kvpool bench` is made of: rows, efforts, and samples taken in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

__all__ = ["Effort", "Report", "Row", "Timed", "in_turn", "merge", "per_call_ns"]

SEED = 1
Timed = Callable[[], float]
"""Takes one sample and returns it, in the unit of its row."""


@dataclass(frozen=True)
class Row:
    """One measured number beside the physical or structural bound of the same run."""

    name: str
    unit: str
    measured: float
    bound: float
    """What no design could beat on this machine, or must not exceed; sampled in the same run."""
    ratio: float
    """measured / bound; with repeats the median of the ratios."""
    target: float | None = None
    """What the ratio must stay within."""
    verdict: str = "measured"

    @classmethod
    def of(cls, name: str, unit: str, measured: float, bound: float) -> Row:
        """A row that no target judges."""
        return cls(name, unit, measured, bound, measured / bound)


@dataclass
class Report:
    """The rows of a suite, and why others are missing."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    """What a reader must know besides the machine."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    quick: bool = False

    def samples(self, full: int) -> int:
        """`full` samples, or about an eighth of them if it has to be quick."""
        return max(3, full // 8) if self.quick else full


def in_turn(samples: int, *timed: Timed) -> list[float]:
    """The median sample of each, taken one after the other so that all see the same machine."""
    taken: list[list[float]] = [[] for _ in timed]
    for _ in range(samples):
        for sample, into in zip(timed, taken, strict=True):
            into.append(sample())
    return [statistics.median(each) for each in taken]


def per_call_ns(call: Callable[[], object], calls: int) -> Timed:
    """A sample: nanoseconds of one call, from `calls` of them less an empty loop.

    `call` is entered as a Python function: what is measured through it and its bound pay that alike.
    """
    rounds = range(calls)

    def nothing() -> None:
        pass

    def loop(body: Callable[[], object]) -> int:
        start = time.perf_counter_ns()
        for _ in rounds:
            body()
        return time.perf_counter_ns() - start

    return lambda: max(loop(call) - loop(nothing), 1) / calls


def merge(reports: Iterable[Report]) -> Report:
    """Repeats of one suite as one report: the medians of each row."""
    runs = list(reports)
    rows = []
    for same in zip(*(run.rows for run in runs), strict=True):
        measured, bound, ratio = (
            statistics.median(getattr(row, name) for row in same) for name in ("measured", "bound", "ratio")
        )
        rows.append(Row(same[0].name, same[0].unit, measured, bound, ratio, same[0].target, same[0].verdict))
    return Report(rows, runs[0].notes, runs[0].about)
