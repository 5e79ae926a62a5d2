"""What every suite of `kvpool bench` is made of: rows, efforts, and samples taken in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

__all__ = ["Effort", "Report", "Row", "Spread", "Timed", "in_turn", "merge", "per_call_ns", "spread"]

SEED = 1
Timed = Callable[[], float]
"""Takes one sample and returns it, in the unit of its row."""


class Spread(float):
    """The median of samples, as a number, with the tenth and the ninety-ninth percentile."""

    p10: float
    p99: float

    def __new__(cls, median: float, p10: float, p99: float) -> Spread:
        """The three of them."""
        made = super().__new__(cls, median)
        made.p10, made.p99 = p10, p99
        return made

    def __truediv__(self, divisor: float) -> Spread:
        """In another unit."""
        return Spread(float(self) / divisor, self.p10 / divisor, self.p99 / divisor)


def spread(samples: Iterable[float]) -> Spread:
    """Of at least one sample."""
    ordered = sorted(samples)
    return Spread(statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 100])


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
    """What the ratio must stay within, or where the verdict says so the measured value."""
    verdict: str = "measured"
    p10: float | None = None
    p99: float | None = None
    """Of the measured samples, where they were kept."""

    @classmethod
    def of(cls, name: str, unit: str, measured: float, bound: float) -> Row:
        """A row that no target judges yet."""
        tails = (measured.p10, measured.p99) if isinstance(measured, Spread) else (None, None)
        return cls(name, unit, float(measured), float(bound), float(measured) / float(bound), None, "measured", *tails)


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


def in_turn(samples: int, *timed: Timed) -> list[Spread]:
    """The median sample of each, with its percentiles, taken one after the other so that all see the same machine."""
    taken: list[list[float]] = [[] for _ in timed]
    for _ in range(samples):
        for sample, into in zip(timed, taken, strict=True):
            into.append(sample())
    return [spread(each) for each in taken]


def per_call_ns(call: Callable[[], object], calls: int) -> Timed:
    """A sample: nanoseconds of one call, from `calls` of them less an empty loop; of this thread's processor time.

    `call` is entered as a Python function: what is measured through it and its bound pay that alike.
    """
    rounds = range(calls)

    def nothing() -> None:
        pass

    def loop(body: Callable[[], object]) -> int:
        start = time.thread_time_ns()
        for _ in rounds:
            body()
        return time.thread_time_ns() - start

    return lambda: max(loop(call) - loop(nothing), 1) / calls


def merge(reports: Iterable[Report]) -> Report:
    """Repeats of one suite as one report: the medians of each row."""
    runs = list(reports)
    rows = []
    for same in zip(*(run.rows for run in runs), strict=True):
        numbers = {
            name: statistics.median(getattr(row, name) for row in same)
            for name in ("measured", "bound", "ratio", "p10", "p99")
            if getattr(same[0], name) is not None
        }
        rows.append(replace(same[0], **numbers))
    return Report(rows, runs[0].notes, runs[0].about)
