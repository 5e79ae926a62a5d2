"""Sequential specifications: what each operation may answer, if operations came one after the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import ClassVar, Generic, TypeVar

from kvpool.testing.history import Operation

__all__ = ["CacheModel", "Model", "PoolModel", "RegisterModel"]

State = TypeVar("State", bound=Hashable)


class Model(Generic[State]):
    """A sequential specification of one key. Subclass it, and see `RegisterModel` for the shortest example.

    Stateless: one object may serve any number of checks and threads. States are hashable and never changed in place.
    """

    reads: ClassVar[frozenset[str]] = frozenset()
    """Operations that never change the state: a counterexample is shown without those that it does not need."""

    def initial(self) -> State:
        """The state of a key before the first operation."""
        raise NotImplementedError

    def apply(self, state: State, operation: Operation) -> Iterable[State]:
        """Every state that may follow when `operation` takes effect in `state` with the result that it has.

        None at all means that this result is impossible here; several, that the specification leaves it open. For a
        pending operation the result is not known: the states that follow for any result. (That it never took effect
        need not be said here.)
        """
        raise NotImplementedError


class RegisterModel(Model[object]):
    """A register per key: `write` stores its argument, `read` answers what was written last, None before."""

    reads = frozenset({"read"})

    def initial(self) -> object:
        """Nothing was written."""
        return None

    def apply(self, state: object, operation: Operation) -> Iterable[object]:
        """A read that is pending changes nothing; one that has an answer must have the right one."""
        if operation.op == "write":
            return [operation.argument]
        if operation.op == "read":
            return [state] if operation.pending or operation.result == state else []
        raise ValueError(f"a register has no operation {operation.op!r}: read, write")


class CacheModel(Model[object]):
    """A cache per key that may forget at any time: a miss (None) is always allowed, a wrong or an old value never.

    `put` stores its argument (anything but None), whatever was there. `get` answers it, or None. `delete` forgets it
    for good: only another put brings something back.
    """

    reads = frozenset({"get"})

    def initial(self) -> object:
        """Nothing is there."""
        return None

    def apply(self, state: object, operation: Operation) -> Iterable[object]:
        """Forgetting needs no state of its own: after a put the old value may never be seen again anyway."""
        if operation.op == "put":
            return [operation.argument]
        if operation.op == "get":
            return [state] if operation.pending or operation.result in (None, state) else []
        if operation.op == "delete":
            return [None]
        raise ValueError(f"a cache has no operation {operation.op!r}: put, get, delete")


class PoolModel(Model[object]):
    """One key of a kvpool: write-once publications, a miss always allowed, what was removed does not come back.

    | operation | argument | result |
    |---|---|---|
    | publish | what identifies the bytes, not None | True: it is ours; False: given back, somebody was first |
    | match | | what identifies the bytes that were read; None: a miss |
    | remove | | True: it was there; False: it was not |

    With `evicts=False` nothing may be evicted (the pool has room for all keys): a publication stands until it is
    removed, so a second one cannot succeed and a remove must find it. `match` may miss still, and a publication may be
    given back for want of room in the directory.
    """

    reads = frozenset({"match"})

    def __init__(self, *, evicts: bool = True) -> None:
        self.evicts = evicts

    def initial(self) -> object:
        """Nothing is published."""
        return None

    def apply(self, state: object, operation: Operation) -> Iterable[object]:
        """States are None, or what identifies the bytes that are published."""
        if operation.op not in ("publish", "match", "remove"):
            raise ValueError(f"a pool has no operation {operation.op!r}: publish, match, remove")
        if operation.op == "match":
            return [state] if operation.pending or operation.result in (None, state) else []
        if operation.op == "publish":
            if not operation.pending and not operation.result:
                return [state]
            return [operation.argument] if state is None or self.evicts else []
        if operation.pending:
            return [None]
        possible = state is not None if operation.result else state is None or self.evicts
        return [None] if possible else []
