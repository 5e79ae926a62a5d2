"""What concurrent workers did and when: recorded by many threads and processes, complete up to a kill -9."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["UNKNOWN", "Call", "History", "Operation", "read_history", "write_history"]

T = TypeVar("T")


class _Unknown:
    """The type of UNKNOWN."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = _Unknown()
"""The result of a call that has not said what came of it: it counts as pending."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on one key. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.

    `return_ns` is None for an operation that is *pending*: it was called, and what came of it is not known, because its
    worker was killed or an exception ended it. It may have taken effect at any time after its call, or never.
    """

    worker: str
    op: str
    key: Any
    argument: Any
    call_ns: int
    return_ns: int | None = None
    result: Any = None

    @property
    def pending(self) -> bool:
        """Is it unknown whether this took effect?"""
        return self.return_ns is None

    def __str__(self) -> str:
        argument = "" if self.argument is None else repr(self.argument)
        return f"{self.op}({argument}) -> {'?' if self.pending else repr(self.result)}"


class Call:
    """A call in progress: set `result`, or, for a call on several keys, `results[i]` for `keys[i]`.

    What is still UNKNOWN at the end of the `with` stays pending. Belongs to the thread that made it.
    """

    __slots__ = ("keys", "results")

    def __init__(self, keys: Sequence[Any]) -> None:
        self.keys = keys
        self.results: list[Any] = [UNKNOWN] * len(keys)

    @property
    def result(self) -> Any:
        """The result for the only key."""
        return self.results[0]

    @result.setter
    def result(self, value: Any) -> None:
        self.results[0] = value


class _Journal:
    """The file of one thread: a line when a call begins, a line when it has ended. Only that thread writes it."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.worker = worker
        self.pid = os.getpid()
        self.calls = 0
        name = f"{self.pid}-{threading.get_native_id()}-{time.monotonic_ns()}.journal"
        self.file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        weakref.finalize(self, os.close, self.file)

    def write(self, record: dict[str, Any]) -> None:
        # A line goes out in one write(): what the kernel has taken over survives the death of the process.
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self.file, line) :]


class History:
    """A recorder of concurrent operations in a folder, and what was recorded there.

    `with history.call("get", key) as call: call.result = cache.get(key)` records one operation.

    Any number of threads and processes may record into one folder, each with a `History` of its own or with one that it
    shares or inherited by fork: every thread of every process appends to a file that nobody else writes, so recording
    takes no lock and orders nothing. A line is handed to the kernel when a call begins and another when it has ended:
    `kill -9` at any moment loses nothing but the outcome of the call that it hit, which is pending then. Nothing is
    synced: a power failure may lose all.

    Keys, arguments and results are what JSON can say (a tuple comes back as a list); record digests of long data. The
    recorded interval contains the call: it begins before the first line is written and ends before the second is.
    """

    def __init__(self, folder: str | os.PathLike[str], worker: str | None = None) -> None:
        """Record into `folder`, which is made. `worker` names this process in reports; default: its PID.

        A thread other than the main one adds its own name.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._worker = worker
        self._local = threading.local()

    def _journal(self) -> _Journal:
        journal: _Journal | None = getattr(self._local, "journal", None)
        if journal is None or journal.pid != os.getpid():
            name = self._worker or str(os.getpid())
            main = threading.current_thread() is threading.main_thread()
            journal = _Journal(self.folder, name if main else f"{name}.{threading.current_thread().name}")
            self._local.journal = journal
        return journal

    @contextlib.contextmanager
    def call_many(self, op: str, keys: Sequence[Any], arguments: Sequence[Any] | None = None) -> Iterator[Call]:
        """Record one call on several keys: an operation for each key, all with the same interval.

        Each key is checked by itself: that the call is atomic over its keys is not.
        """
        journal = self._journal()
        journal.calls += 1
        number, call = journal.calls, Call(keys)
        if arguments is not None and len(arguments) != len(keys):
            raise ValueError(f"{len(keys)} keys and {len(arguments)} arguments: give one argument per key, or none")
        record = {"call": number, "ns": time.monotonic_ns(), "worker": journal.worker, "op": op, "keys": list(keys)}
        if arguments is not None:
            record["arguments"] = list(arguments)
        journal.write(record)
        yield call
        # Not after an exception: it does not tell what has taken effect, so the call stays pending.
        end = time.monotonic_ns()
        known = {i: result for i, result in enumerate(call.results) if result is not UNKNOWN}
        journal.write({"return": number, "ns": end, "results": known})

    def call(self, op: str, key: Any, argument: Any = None) -> contextlib.AbstractContextManager[Call]:
        """Record one operation; set `result` of what the `with` gives. An exception leaves it pending."""
        return self.call_many(op, (key,), (argument,))

    def run(self, op: str, key: Any, argument: Any, function: Callable[[], T]) -> T:
        """Record `function()`, whose answer is the result; returns it."""
        with self.call(op, key, argument) as call:
            call.result = answer = function()
        return answer

    def operations(self) -> list[Operation]:
        """What all threads and processes have recorded so far, by time of call. Anybody may ask, also afterwards.

        The last line of a journal may be torn by a kill and is ignored then. Raises `ValueError` for a damaged one.
        """
        merged: list[Operation] = []
        for path in sorted(self.folder.glob("*.journal")):
            merged += _read_journal(path)
        return sorted(merged, key=lambda operation: operation.call_ns)


def _lines(path: Path, *, torn_end: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line of a file of JSON objects, with the place to name in an error."""
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line or (torn_end and number == len(lines)):  # whole lines end with a line break
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not a line of a history: {error}") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}:{number}: not a line of a history: an object is expected")
        yield f"{path}:{number}", record


def _read_journal(path: Path) -> list[Operation]:
    calls: dict[int, dict[str, Any]] = {}
    returns: dict[int, dict[str, Any]] = {}
    for place, record in _lines(path, torn_end=True):
        if "call" in record:
            calls[record["call"]] = record
        elif record.get("return") in calls:
            returns[record["return"]] = record
        else:
            raise ValueError(f"{place}: neither a call nor the return of one")
    return [operation for number, call in calls.items() for operation in _of_call(call, returns.get(number))]


def _of_call(call: dict[str, Any], end: dict[str, Any] | None) -> Iterator[Operation]:
    arguments = call.get("arguments") or [None] * len(call["keys"])
    for i, (key, argument) in enumerate(zip(call["keys"], arguments, strict=True)):
        start = Operation(call["worker"], call["op"], key, argument, call["ns"])
        if end is not None and str(i) in end["results"]:
            yield replace(start, return_ns=end["ns"], result=end["results"][str(i)])
        else:
            yield start


def write_history(path: str | os.PathLike[str], operations: Iterable[Operation]) -> None:
    """Write operations as JSON lines, one each, to be read back by `read_history` or by other programs."""
    with open(path, "w", encoding="utf-8") as file:
        for operation in operations:
            file.write(json.dumps(asdict(operation), separators=(",", ":")) + "\n")


def read_history(path: str | os.PathLike[str]) -> list[Operation]:
    """Read what `write_history` wrote. Raises `ValueError` with file and line for anything else."""
    operations = []
    for place, record in _lines(Path(path), torn_end=False):
        try:
            operations.append(Operation(**record))
        except TypeError as error:
            raise ValueError(f"{place}: not an operation: {error}") from error
    return operations
