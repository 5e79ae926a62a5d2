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
from math import inf
from typing import Any

from kvpool.testing.history import History, Operation
from kvpool.testing.models import Model

__all__ = ["Counterexample", "SearchLimit", "Verdict", "linearizable"]

STEPS_MAX = 20_000_000
_SHOWN_MIN = 8  # operations of a counterexample that are shown at least, where there are as many
_SHOWN_MAX = 40  # and how far back one goes to show where a value came from
_TRIED_MAX = 100  # how many reads are tried whether they can be left out
_BAR_MAX = 60


class SearchLimit(RuntimeError):
    """The search was given up: the history of a key has too much concurrency for `steps_max`."""


@dataclass(frozen=True)
class Counterexample:
    """The shortest failing prefix of one key, without what a reader does not need. Printed, it is a chart.

    `operations` are by time of call; those that had not returned when the prefix ends are pending in it. `last` is the
    one with whose return no order was left, `source` what brought the value that it saw. Not shown are `left_out`: what
    returned before, what came after, and reads that explain nothing; `starts` are the states to which what came before
    may have led. `order` is one of the longest orders that could be found and `state` where it leads: none of the rest
    can take effect there.
    """

    key: Any
    left_out: int
    starts: tuple[Any, ...]
    operations: tuple[Operation, ...]
    last: Operation
    source: Operation | None
    order: tuple[Operation, ...]
    state: Any

    def __str__(self) -> str:
        lines = [f"key {self.key!r}: no order of these operations explains their results"]
        starts = " or ".join(map(repr, self.starts))
        lines.append(f"  at first the state is {starts} ({self.left_out} operations are not shown)")
        lines += [f"  {line}" for line in _chart(self.operations, self.last)]
        if self.source and self.source not in self.operations:
            lines.append(f"  Not shown, long before: {self.source} by {self.source.worker}")
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
        search = _search(part, model, steps_max)
        if not search.succeeds():
            failures.append(_explain(part, model, steps_max))
        steps += search.steps
        if len(failures) == failures_max:
            break
    return Verdict(len(operations), len(per_key), steps, tuple(failures))


# low, done, used, state, how many required operations have taken effect, and their order: (last, (the one before, ...))
_Configuration = tuple[int, int, int, Any, int, Any]


def _call(operation: Operation) -> int:
    return operation.call_ns


def _return(operation: Operation) -> float:
    return inf if operation.return_ns is None else operation.return_ns


class _Search:
    """The search on one key: for orders of all `required` operations and any of the `optional` ones.

    A configuration is what has taken effect and the state after it. Of the required operations all before `low` have,
    and of the later ones those in `done` (bit i: low + i); of the optional ones those in `used`. A branch takes any
    operation next that was called before the first return of the required ones that are left.
    """

    def __init__(
        self, required: Iterable[Operation], optional: Iterable[Operation], model: Model[Any], steps_max: int
    ) -> None:
        self.required = sorted(required, key=_call)
        self.optional = sorted(optional, key=_call)
        self.spans = [(operation.call_ns, operation.return_ns or 0) for operation in self.required]
        self.optional_calls = [operation.call_ns for operation in self.optional]
        self.model, self.steps_max, self.steps = model, steps_max, 0
        self.starts: list[_Configuration] = [(0, 0, 0, model.initial(), 0, None)]
        self.longest: tuple[int, Any, Any] = (-1, None, None)  # length, order, state

    def start_after(self, taken: Sequence[Operation], state: Any) -> None:
        """Begin also where these operations have taken effect."""
        done = sum(1 << i for i, operation in enumerate(self.required) if any(operation is other for other in taken))
        used = sum(1 << i for i, operation in enumerate(self.optional) if any(operation is other for other in taken))
        order: Any = None
        for operation in taken:
            order = (operation, order)
        self.starts.append((*_normal(0, done), used, state, len(taken), order))

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

    def ends(self) -> Iterator[tuple[Any, Any]]:
        """Each end to which an order of all required operations leads: the order, linked backwards, and the state."""
        apply, required, optional = self.model.apply, self.required, self.optional
        stack = list(self.starts)
        seen: set[tuple[int, int, int, Any]] = set()
        while stack:
            low, done, used, state, length, order = stack.pop()
            try:
                if (low, done, used, state) in seen:
                    continue
            except TypeError as error:
                raise TypeError(f"the states of a model must be hashable, this one is not: {state!r}") from error
            seen.add((low, done, used, state))
            if length > self.longest[0]:
                self.longest = (length, order, state)
            if low == len(required):
                yield order, state
                continue
            self.steps += 1
            if self.steps > self.steps_max:
                raise SearchLimit(
                    f"key {required[0].key!r}: no answer after {self.steps_max} steps: "
                    "record fewer workers per key or shorter histories"
                )
            found, first = self.candidates(low, done)
            for j in range(bisect_right(self.optional_calls, first)):
                if not used >> j & 1:
                    for after in apply(state, optional[j]):
                        if after != state or not optional[j].pending:  # else it is as if it had not taken effect
                            stack.append((low, done, used | 1 << j, after, length, (optional[j], order)))
            for i in reversed(found):  # what was called first is tried first
                for after in apply(state, required[i]):
                    next_low, next_done = _normal(low, done | 1 << (i - low))
                    stack.append((next_low, next_done, used, after, length + 1, (required[i], order)))

    def succeeds(self) -> bool:
        """Is there an order? Afterwards `longest` is the furthest that any attempt got."""
        return next(self.ends(), None) is not None

    def may_succeed(self) -> bool:
        """Is there an order, or is the search too long to tell?"""
        try:
            return self.succeeds()
        except SearchLimit:
            return True


def _normal(low: int, done: int) -> tuple[int, int]:
    """The same configuration with a `low` that has not taken effect."""
    while done & 1:
        low, done = low + 1, done >> 1
    return low, done


def _search(operations: Iterable[Operation], model: Model[Any], steps_max: int) -> _Search:
    """The search through a whole history."""
    known = list(operations)
    return _Search([o for o in known if not o.pending], [o for o in known if o.pending], model, steps_max)


def _prefix(operations: Sequence[Operation], end: int) -> list[Operation]:
    """The history as it stood at a moment."""
    return [
        replace(operation, return_ns=None, result=None) if _return(operation) > end else operation
        for operation in operations
        if operation.call_ns <= end
    ]


def _shortest(operations: Sequence[Operation], model: Model[Any], steps_max: int) -> tuple[list[Operation], Operation]:
    """The shortest failing prefix, and the operation with whose return it begins to fail.

    A prefix of a linearizable history is linearizable, so bisection finds it.
    """
    returned = sorted((operation for operation in operations if not operation.pending), key=_return)
    low, high = 0, len(returned) - 1
    while low < high:
        middle = (low + high) // 2
        if _search(_prefix(operations, int(_return(returned[middle]))), model, steps_max).may_succeed():
            low = middle + 1
        else:
            high = middle
    return _prefix(operations, int(_return(returned[high]))), returned[high]


def _source(returned: Sequence[Operation], last: Operation) -> int | None:
    """Which operation brought the value that `last` saw, going by its argument."""
    if last.result is None:
        return None
    return max((i for i, operation in enumerate(returned) if operation.argument == last.result), default=None)


def _first_shown(returned: Sequence[Operation], source: int | None) -> int:
    """From which moment on a reader needs to see what happened.

    That is far enough back to show what brought the value in question, unless it would be too long to read.
    """
    first = max(0, len(returned) - _SHOWN_MIN)
    if source is not None and source >= len(returned) - _SHOWN_MAX:
        first = min(first, source)
    return returned[first].call_ns


def _explain(operations: Sequence[Operation], model: Model[Any], steps_max: int) -> Counterexample:
    """The counterexample of one key that fails.

    What returned before a moment is replaced by all configurations to which it may have led: the state, and which of
    the operations that were in progress had taken effect.
    """
    prefix, last = _shortest(operations, model, steps_max)
    prefix = [operation for operation in prefix if not operation.pending or operation.op not in model.reads]
    returned = sorted((operation for operation in prefix if not operation.pending), key=_call)
    pending = [operation for operation in prefix if operation.pending]
    source = _source(returned, last)
    moment = _first_shown(returned, source)
    shown = [operation for operation in returned if _return(operation) >= moment]
    before = [operation for operation in returned if _return(operation) < moment]
    in_progress = [operation for operation in [*shown, *pending] if operation.call_ns < moment]
    starts: list[tuple[list[Operation], Any]] = []
    try:
        for order, state in _Search(before, in_progress, model, steps_max).ends():
            starts.append((_unlink(order, in_progress), state))
    except SearchLimit:  # then all of it is shown
        shown, starts = returned, [([], model.initial())]

    def search(required: Sequence[Operation]) -> _Search:
        attempt = _Search(required, pending, model, steps_max)
        attempt.starts.clear()
        for taken, state in starts:
            attempt.start_after([o for o in taken if o.pending or any(o is other for other in required)], state)
        return attempt

    reads = [operation for operation in shown if operation.op in model.reads and operation is not last]
    for operation in reads[:_TRIED_MAX]:
        fewer = [other for other in shown if other is not operation]
        if len(shown) > _SHOWN_MIN and not search(fewer).may_succeed():
            shown = fewer
    final = search(shown)
    final.may_succeed()
    _, order, state = final.longest
    return Counterexample(
        key=last.key,
        left_out=len(operations) - len(shown) - len(pending),
        starts=tuple({state: None for _, state in starts}),
        operations=tuple(sorted([*shown, *pending], key=_call)),
        last=last,
        source=None if source is None else returned[source],
        order=tuple(_unlink(order, [*shown, *pending])),
        state=state,
    )


def _unlink(order: Any, among: Sequence[Operation]) -> list[Operation]:
    """The operations of a linked order, first to last, as far as they are among these."""
    wanted, found = {id(operation) for operation in among}, []
    while order is not None:
        operation, order = order
        if id(operation) in wanted:
            found.append(operation)
    return found[::-1]


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
