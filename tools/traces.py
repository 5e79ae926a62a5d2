"""Recorded request traces: reading them, numbering their blocks, and how far apart the uses of a block are.

A trace is a list of requests, a request a list of block ids from the first to the last block of its prompt. Formats are
rows of `FORMATS`: to read another one, write a `sniff` and a `parse` and add a row.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.bindings.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "FORMATS", "BadRecords", "Format", "Request", "Stream", "TraceError", "percentiles", "read", "reuse_distances",
]  # fmt: skip

_SNIFF_BYTES = 1 << 16


class TraceError(InvalidArgument):
    """A trace file is not what its format says; the message begins with file:line."""


class Request(NamedTuple):
    """One prompt."""

    time_s: float
    """Arrival, in seconds of the trace's own clock."""
    ids: array[int]
    """Block ids, unsigned 64 bits, first block first."""
    session: int = -1
    """Which conversation it belongs to, counted from 0; -1 where the trace does not say."""


@dataclass
class BadRecords:
    """What to do with records that cannot be read: raise `TraceError`, or count them and go on."""

    skip: bool = False
    count: int = 0

    def report(self, where: str, problem: str) -> None:
        """One bad record at `where` (file:line)."""
        if not self.skip:
            raise TraceError(f"{where}: {problem} (--skip-bad goes on without it)")
        self.count += 1


Sniff = Callable[[Path], bool]
Parse = Callable[[Sequence[Path], BadRecords], Iterable[Request]]


@dataclass(frozen=True)
class Format:
    """How one kind of trace is recognised and read."""

    name: str
    sniff: Sniff
    """Is this file of this format? Looks at its name and first bytes only."""
    parse: Parse
    """All requests of the files, in the order of access. May raise `TraceError`, OSError."""


def _ids(record: Any, wanted: str = "hash_ids") -> array[int]:
    """The block ids of a record; ValueError says what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError(f"a request is a JSON object, not {type(record).__name__}")
    ids = record.get(wanted)
    if not isinstance(ids, list):
        raise ValueError(f"no list {wanted!r}" if ids is None else f"{wanted!r} is not a list")
    try:
        return array("Q", ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{wanted!r} are integers of 64 bits: {error}") from error


def _seconds(record: dict[str, Any], name: str, unit: float) -> float:
    value = record.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name!r} is not a number")
    return value * unit


def _head(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_SNIFF_BYTES).decode(errors="replace")


# ---- mooncake: one JSON object a line; an id means the same block in all files of a run ----


def _mooncake_sniff(path: Path) -> bool:
    first = _head(path).lstrip().split("\n", 1)[0]
    return path.suffix == ".jsonl" or (first.startswith("{") and '"hash_ids"' in first and '"requests"' not in first)


def _mooncake_parse(paths: Sequence[Path], bad: BadRecords) -> Iterator[Request]:
    for path in paths:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    record = json.loads(line)
                    yield Request(_seconds(record, "timestamp", 1e-3) if isinstance(record, dict) else 0, _ids(record))
                except ValueError as error:
                    bad.report(f"{path}:{number}", str(error))


# ---- kv-cache-tester: one JSON object a session; ids are local to it; sub-agents are nested ----


def _tester_sniff(path: Path) -> bool:
    head = _head(path)
    return head.lstrip().startswith("{") and '"hash_id_scope"' in head and '"requests"' in head


def _tester_document(path: Path, bad: BadRecords) -> list[Any]:
    try:
        document = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        bad.report(f"{path}:{error.lineno}", error.msg)
        return []
    except ValueError as error:  # not text
        bad.report(f"{path}:1", str(error))
        return []
    requests = document.get("requests") if isinstance(document, dict) else None
    if not isinstance(requests, list):
        bad.report(f"{path}:1", "no list 'requests'")
        return []
    return requests


def _flat(records: list[Any], start_s: float, where: str, bad: BadRecords) -> Iterator[Request]:
    """Requests of a session in file order; those of a sub-agent count their time from when it started."""
    for number, record in enumerate(records):
        here = f"{where} request {number}"
        try:
            nested = record.get("requests") if isinstance(record, dict) else None
            time_s = start_s + (_seconds(record, "t", 1.0) if isinstance(record, dict) else 0)
            if not isinstance(nested, list):
                yield Request(time_s, _ids(record))
                continue
        except ValueError as error:
            bad.report(here, str(error))
            continue
        yield from _flat(nested, time_s, here, bad)


def _tester_parse(paths: Sequence[Path], bad: BadRecords) -> Iterator[Request]:
    """All sessions begin at once; where two requests have the same time, file order and position decide."""
    events = []
    for session, path in enumerate(paths):
        for request in _flat(_tester_document(path, bad), 0.0, f"{path}:1", bad):
            if any(local >> 32 for local in request.ids):
                bad.report(f"{path}:1", "a local block id does not fit 32 bits")
                continue
            events.append(
                Request(request.time_s, array("Q", [session << 32 | local for local in request.ids]), session)
            )
    return iter(sorted(events, key=lambda request: request.time_s))  # stable


FORMATS = {
    row.name: row
    for row in (
        Format("kv-cache-tester", _tester_sniff, _tester_parse),
        Format("mooncake", _mooncake_sniff, _mooncake_parse),
    )
}


# ---- a trace as numbers ----


@dataclass(frozen=True)
class Stream:
    """All accesses of a trace in order, blocks numbered from 0."""

    block: NDArray[np.uint32]
    """Which block each access is to."""
    start: NDArray[np.int64]
    """Where each request begins in `block`; one more entry than requests."""
    ids: NDArray[np.uint64]
    """The trace's id of each block."""
    skipped: int = field(default=0, compare=False)
    """Records left out because they could not be read."""
    session: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), compare=False)
    """The session of each request; empty where the trace does not say."""

    @property
    def requests(self) -> int:
        """How many."""
        return len(self.start) - 1

    @classmethod
    def of(cls, requests: Iterable[Iterable[int]], skipped: int = 0) -> Stream:
        """Number the blocks of these requests."""
        every, start = array("Q"), [0]
        for ids in requests:
            every.extend(ids)
            start.append(len(every))
        ids, block = np.unique(np.frombuffer(every, np.uint64), return_inverse=True)
        return cls(block.astype(np.uint32), np.array(start, np.int64), ids, skipped)


def _recognise(paths: Sequence[Path]) -> Format:
    for row in FORMATS.values():
        if all(row.sniff(path) for path in paths):
            return row
    known = ", ".join(FORMATS)
    raise TraceError(f"{paths[0]}:1: not, or not all files, of one known trace format: --format takes {known}")


def read(paths: Sequence[Path], format_name: str = "auto", *, skip_bad: bool = False) -> Stream:
    """The accesses of these trace files. Raises `TraceError` (with file:line), OSError."""
    chosen = _recognise(paths) if format_name == "auto" else FORMATS[format_name]
    bad = BadRecords(skip_bad)
    sessions = array("q")

    def ids() -> Iterator[array[int]]:
        for request in chosen.parse(paths, bad):
            sessions.append(request.session)
            yield request.ids

    stream = Stream.of(ids(), 0)
    known = np.frombuffer(sessions, np.int64) if sessions and min(sessions) >= 0 else np.empty(0, np.int64)
    if len(stream.block) == 0:
        raise TraceError(f"{paths[0]}: no block is accessed ({bad.count} records skipped)")
    return Stream(stream.block, stream.start, stream.ids, bad.count, known)


# ---- reuse ----


def _previous(block: NDArray[np.uint32]) -> NDArray[np.int64]:
    """For each access the position of the one before it to the same block, or -1."""
    order = np.argsort(block, kind="stable")
    same = block[order[1:]] == block[order[:-1]]
    previous = np.full(len(block), -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _greater_before(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each element of a permutation of 0..n-1, by value: how many greater ones stand before it.

    One pass a bit, from the highest: where values agree in the bits above, one with a 0 is passed by the ones with a 1
    that stand before it; then zeros and ones are parted, each kept in order. Because every value occurs once, a group
    of equal high bits always begins at the index that its high bits spell.
    """
    count = len(values)
    result, at = np.zeros(count, np.int64), np.arange(count)
    for bit in reversed(range(max(count - 1, 0).bit_length())):
        ones = values >> bit & 1
        begin = values >> (bit + 1) << (bit + 1)
        total = np.concatenate([[0], np.cumsum(ones)])
        before = total[:-1] - total[begin]
        zero = ones == 0
        result[values[zero]] += before[zero]
        target = np.where(zero, at - before, (values >> bit << bit) + before)
        moved = np.empty_like(values)
        moved[target] = values
        values = moved
    return result


def reuse_distances(block: NDArray[np.uint32]) -> NDArray[np.int64]:
    """For each repeated access, in order: how many distinct other blocks were accessed since the last one to it.

    With LRU and room for C blocks an access is a hit exactly if its distance is below C. O(n log n), about a second for
    two million accesses.
    """
    previous = _previous(block)
    again = np.flatnonzero(previous >= 0)
    since = previous[again]
    # Between an access and the previous one to its block, each access whose own previous one lies in between as well
    # repeats a block that was counted: so many fewer distinct ones. Those are the greater elements before it.
    order = np.argsort(since, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return again - since - 1 - _greater_before(rank)[rank]


def percentiles(values: NDArray[np.int64]) -> dict[str, int | None]:
    """p10 to p99 and max, each the element at ceil(p * n) of the sorted values; None without values."""
    names = {f"p{p}": p for p in (10, 25, 50, 75, 90, 95, 99)} | {"max": 100}
    if len(values) == 0:
        return dict.fromkeys(names)
    ordered = np.sort(values)
    return {name: int(ordered[-(-p * len(ordered) // 100) - 1]) for name, p in names.items()}
