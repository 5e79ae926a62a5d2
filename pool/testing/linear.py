"""Is a history linearizable? And if not, the smallest part of it that shows why.

A history is linearizable if every operation can be given one moment between its call and its return at which it took
effect, such that the answers are those of a sequential specification (M. Herlihy and J. Wing 1990). The search is that
of J. Wing and C. Gong (Testing and Verifying Concurrent Objects, 1993), with the set of visited configurations of
G. Lowe (Testing for Linearizability, 2017), which makes it short for real histories; in the worst case it stays
exponential, as the problem is. Keys are checked one by one: linearizability is local.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvpool.testing.history import History, Operation
from kvpool.testing.models import Model

__all__ = ["Counterexample", "SearchLimit", "Verdict", "linearizable"]

STEPS_MAX = 20_000_000
_SHOWN_MIN = 8  # operations of a counterexample that are shown at least, where there are as many
_BAR_MAX = 60


class SearchLimit(RuntimeError):
    """The search was given up: the history of a key has too much concurrency for `steps_max`."""


@dataclass(frozen=True)
class Counterexample:
    """The shortest failing prefix of one key, without what a reader does not need. Printed, it is a chart.

    `operations` are by time of call; those that had not returned when the prefix ends are pending in it. `last` is the
    one with whose return no order was left. `starts` are the states to which what came before them may have led. Not
    shown are `left_out`: what came before and after, and reads that explain nothing. `order` is one of the longest
    orders that could be found and `state` where it leads: none of the rest can take effect there.
    """

    key: Any
    left_out: int
    starts: tuple[Any, ...]
    operations: tuple[Operation, ...]
    last: Operation
    order: tuple[Operation, ...]
    state: Any

    def __str__(self) -> str:
        lines = [f"key {self.key!r}: no order of these operations explains their results"]
        starts = " or ".join(map(repr, self.starts))
        lines.append(f"  at first the state is {starts} ({self.left_out} operations are not shown)")
        lines += [f"  {line}" for line in _chart(self.operations, self.last)]
        lines.append("  With the return of the one marked * no order is left. As far as one attempt goes:")
        lines += [f"    {number}. {operation} by {operation.worker}" for number, operation in enumerate(self.order, 1)]
        lines.append(f"    Then the state is {self.state!r}, and none of the rest can take effect.")
        return "\n".join(lines)


@dataclass(frozen=True)
class Verdict:
    """What `linearizable` found. True in a condition if the history is linearizable; printed, it says why not."""

    operations: int
    keys: int
    steps: int
    failures: tuple[Counterexample, ...]

    @property
    def ok(self) -> bool:
        """Is every key's history linearizable?"""
        return not self.failures

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        head = f"{self.operations} operations on {self.keys} keys, {self.steps} steps"
        if self.ok:
            return f"linearizable: {head}"
        return "\n\n".join([f"NOT linearizable, {len(self.failures)} keys: {head}", *map(str, self.failures)])


def linearizable(
    history: History | Iterable[Operation], model: Model[Any], *, steps_max: int = STEPS_MAX, failures_max: int = 3
) -> Verdict:
    """Check the history of each key against `model`; see `Verdict`. Pure, and safe in any thread.

    Two operations one of which returns in the nanosecond in which the other is called count as concurrent. Stops after
    `failures_max` keys that fail. Raises `SearchLimit` if one key takes more than `steps_max` steps (about a million a
    second): record fewer workers per key or shorter histories.
    """
    operations = history.operations() if isinstance(history, History) else list(history)
    per_key: dict[str, list[Operation]] = {}
    for operation in operations:
        per_key.setdefault(repr(operation.key), []).append(operation)
    steps, failures = 0, []
    for part in per_key.values():
        search = _Search(part, model, steps_max)
        if not search.succeeds():
            failures.append(_explain(part, model, steps_max))
        steps += search.steps
        if len(failures) == failures_max:
            break
    return Verdict(len(operations), len(per_key), steps, tuple(failures))


class _Search:
    """The search on one key.

    A configuration is what has taken effect and the state after it. Of the operations that have returned, all before
    `low` have, and of the later ones those in `done` (bit i: low + i); of the pending ones those in `used`. A branch
    takes any operation next that was called before the first return of those that are left.
    """

    def __init__(self, operations: Iterable[Operation], model: Model[Any], steps_max: int) -> None:
        ordered = sorted(operations, key=lambda operation: operation.call_ns)
        self.returned = [operation for operation in ordered if not operation.pending]
        self.pending = [operation for operation in ordered if operation.pending]
        self.spans = [(operation.call_ns, operation.return_ns or 0) for operation in self.returned]
        self.pending_calls = [operation.call_ns for operation in self.pending]
        self.model, self.steps_max, self.steps = model, steps_max, 0
        self.starts: list[tuple[int, Any]] = [(0, model.initial())]
        self.longest: tuple[int, Any, Any] = (-1, None, None)  # length, order, state

    def candidates(self, low: int, done: int) -> tuple[list[int], int]:
        """Which of the returned operations may come next, and the first return among those left."""
        spans, first, found = self.spans, self.spans[low][1], []
        for i in range(low, len(spans)):
            call, end = spans[i]
            if call > first:
                break
            if not done >> (i - low) & 1:
                found.append(i)
                first = min(first, end)
        return [i for i in found if spans[i][0] <= first], first

    def ends(self) -> Iterator[tuple[int, Any]]:
        """Each (used, state) to which some order of all returned operations leads."""
        apply, returned, pending = self.model.apply, self.returned, self.pending
        # An order is a chain of (operation, chain before it), shared between branches.
        stack: list[tuple[int, int, int, Any, int, Any]] = [(0, 0, *start, 0, None) for start in self.starts]
        seen: set[tuple[int, int, int, Any]] = set()
        while stack:
            low, done, used, state, length, order = stack.pop()
            if (low, done, used, state) in seen:
                continue
            seen.add((low, done, used, state))
            if length > self.longest[0]:
                self.longest = (length, order, state)
            if low == len(returned):
                yield used, state
                continue
            self.steps += 1
            if self.steps > self.steps_max:
                raise SearchLimit(f"key {returned[0].key!r}: no answer after {self.steps_max} steps")
            found, first = self.candidates(low, done)
            for j in range(bisect_right(self.pending_calls, first)):
                if not used >> j & 1:
                    for after in apply(state, pending[j]):
                        if after != state:  # otherwise it is as if it had not taken effect
                            stack.append((low, done, used | 1 << j, after, length, (pending[j], order)))
            for i in reversed(found):  # what was called first is tried first
                low_after, done_after = low, done | 1 << (i - low)
                while done_after & 1:
                    low_after, done_after = low_after + 1, done_after >> 1
                for after in apply(state, returned[i]):
                    stack.append((low_after, done_after, used, after, length + 1, (returned[i], order)))

    def succeeds(self) -> bool:
        """Is there an order? Afterwards `longest` is the furthest that any attempt got."""
        return next(self.ends(), None) is not None


def _prefix(operations: Sequence[Operation], end: int) -> list[Operation]:
    """The history as it stood at a moment."""
    return [
        operation if not operation.pending and (operation.return_ns or 0) <= end else _pending(operation)
        for operation in operations
        if operation.call_ns <= end
    ]


def _pending(operation: Operation) -> Operation:
    return replace(operation, return_ns=None, result=None)


def _shortest(operations: Sequence[Operation], model: Model[Any], steps_max: int) -> tuple[list[Operation], Operation]:
    """The shortest failing prefix, and the operation with whose return it begins to fail.

    A prefix of a linearizable history is linearizable, so bisection finds it.
    """
    returned = sorted((o for o in operations if not o.pending), key=lambda operation: operation.return_ns or 0)
    low, high = 0, len(returned) - 1
    while low < high:
        middle = (low + high) // 2
        if _Search(_prefix(operations, returned[middle].return_ns or 0), model, steps_max).succeeds():
            low = middle + 1
        else:
            high = middle
    return _prefix(operations, returned[high].return_ns or 0), returned[high]


def _quiet_moment(returned: Sequence[Operation], last: Operation) -> int:
    """How many of the first operations a reader can do without: all before a moment at which none was in progress.

    That is far enough back to show the operation that brought the value which `last` saw.
    """
    latest = len(returned) - _SHOWN_MIN
    if last.result is not None:
        brought = [i for i, operation in enumerate(returned) if operation.argument == last.result]
        latest = min([latest, *brought[-1:]])
    quiet, ended = 0, 0
    for i in range(latest + 1):
        if returned[i].call_ns > ended:
            quiet = i
        ended = max(ended, returned[i].return_ns or 0)
    return quiet


def _explain(operations: Sequence[Operation], model: Model[Any], steps_max: int) -> Counterexample:
    """The counterexample of one key that fails."""
    prefix, last = _shortest(operations, model, steps_max)
    prefix = [operation for operation in prefix if not operation.pending or operation.op not in model.reads]
    returned = [operation for operation in prefix if not operation.pending]
    pending = [operation for operation in prefix if operation.pending]
    cut = _quiet_moment(returned, last)
    head = _Search([*returned[:cut], *pending], model, steps_max)
    starts = list(head.ends())

    def search(shown: Sequence[Operation]) -> _Search:
        attempt = _Search([*shown, *pending], model, steps_max)
        attempt.starts = starts
        return attempt

    shown = returned[cut:]
    for operation in returned[cut:]:
        fewer = [other for other in shown if other is not operation]
        if operation.op in model.reads and operation is not last and not search(fewer).succeeds():
            shown = fewer
    final = search(shown)
    final.succeeds()
    _, chain, state = final.longest
    order: list[Operation] = []
    while chain is not None:
        operation, chain = chain
        order.append(operation)
    return Counterexample(
        key=last.key,
        left_out=len(operations) - len(shown) - len(pending),
        starts=tuple({state: None for _, state in starts}),
        operations=tuple(sorted([*shown, *pending], key=lambda operation: operation.call_ns)),
        last=last,
        order=tuple(reversed(order)),
        state=state,
    )


def _chart(operations: Sequence[Operation], last: Operation) -> Iterator[str]:
    """One line per operation, with a bar from its call to its return; moments are ranks, not to scale."""
    moments = sorted({t for o in operations for t in (o.call_ns, o.return_ns) if t is not None})
    rank = {moment: i for i, moment in enumerate(moments)}
    width = max(1, min(len(moments), _BAR_MAX))
    column = {moment: i * (width - 1) // max(1, len(moments) - 1) for moment, i in rank.items()}
    names = max(len(operation.worker) for operation in operations)
    texts = max(len(str(operation)) for operation in operations)
    for operation in operations:
        start = column[operation.call_ns]
        if operation.return_ns is None:
            bar = " " * start + "[" + "." * (width - start)
        else:
            bar = " " * start + "[" + "-" * (column[operation.return_ns] - start) + "]"
        mark = "*" if operation is last else " "
        yield f"{mark} {operation.worker:{names}}  {operation!s:{texts}}  {bar}"
